"""A stand-in for `transformer_engine.pytorch.DotProductAttention` under context parallelism.

It asserts what the real one demands and doesn't check in release builds, computes the answer by
dense attention over all ranks' rows, and leaves garbage in padding as the real one may. Ranks are
threads: each call waits until all ranks have made theirs.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron.packed.attention.kernels import tiles_reference
from megatron.packed.attention.task_graph import Mask


def zigzag(cu_padded: list[int], size: int, rank: int) -> list[int]:
    """`thd_get_partitioned_indices`: of every sequence chunk r, then chunk 2 * size - 1 - r."""
    rows: list[int] = []
    for start, end in pairwise(cu_padded):
        assert (end - start) % (2 * size) == 0, "a sequence that the ranks can't cut"
        chunk = (end - start) // (2 * size)
        for index in (rank, 2 * size - 1 - rank):
            rows += range(start + index * chunk, start + (index + 1) * chunk)
    return rows


class DotProductAttention(torch.nn.Module):
    """The constructor and call of TransformerEngine 2.x, as far as they are used."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.1,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__()
        assert attention_dropout == 0.0 and attn_mask_type == "causal"
        assert cp_comm_type in ("p2p", "all_gather", "a2a")
        assert window_size is None or (window_size[1] == 0 and cp_comm_type != "p2p")
        assert cp_global_ranks == list(range(cp_group.world.size))
        kv_heads = (num_gqa_groups or num_attention_heads) // tp_size
        self.heads = num_attention_heads // tp_size, kv_heads
        size = cp_group.world.size
        assert cp_comm_type != "a2a" or all(heads % size == 0 for heads in self.heads)
        widths = kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
        self.widths, self.group, self.kind = widths, cp_group, cp_comm_type
        self.window, self.scale, self.calls = window_size, softmax_scale, 0

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        pad_between_seqs: bool | None = None,
    ) -> Tensor:
        assert attention_mask is None
        heads, kv_heads = self.heads
        width, value_width = self.widths
        assert query.shape[-2:] == (heads, width) and key.shape[-2:] == (kv_heads, width)
        assert value.shape[-2:] == (kv_heads, value_width)
        size, rank = self.group.world.size, self.group.rank
        if qkv_format == "thd":
            assert attn_mask_type == "padding_causal" and pad_between_seqs is True
            for one, other in (
                (cu_seqlens_q, cu_seqlens_q_padded),
                (cu_seqlens_kv, cu_seqlens_kv_padded),
            ):
                assert one.dtype == other.dtype == torch.int32 and one.dim() == 1
                assert one.data_ptr() != other.data_ptr(), "one tensor: taken for no padding"
            assert torch.equal(cu_seqlens_q, cu_seqlens_kv)
            assert torch.equal(cu_seqlens_q_padded, cu_seqlens_kv_padded)
            real, padded = cu_seqlens_q.tolist(), cu_seqlens_q_padded.tolist()
            assert padded[-1] == query.shape[0] * size, "boundaries are those of all ranks"
            for longest in (max_seqlen_q, max_seqlen_kv):
                assert type(longest) is int and longest % (2 * size) == 0
                assert longest >= max(b - a for a, b in pairwise(padded))
            rows = 1
        else:
            assert qkv_format == "sbhd" and attn_mask_type == "causal" and cu_seqlens_q is None
            length, rows = query.shape[0] * size, query.shape[1]
            real = padded = [i * length for i in range(rows + 1)]
            query, key, value = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        self.calls += 1
        everyone = self.group.world.swap(rank, self.calls, (query, key, value))
        order = torch.tensor([i for each in range(size) for i in zigzag(padded, size, each)])
        whole = []
        for parts in zip(*everyone, strict=True):
            whole.append(torch.zeros_like(torch.cat(parts)).index_copy(0, order, torch.cat(parts)))
        window = None if self.window is None else self.window[0]
        scale = width**-0.5 if self.scale is None else self.scale
        out = tiles_reference.packed_attention(*whole, real, padded, Mask("causal", window), scale)
        mine = torch.tensor(zigzag(padded, size, rank))
        padding = torch.ones(padded[-1], dtype=torch.bool)
        for (a, b), start in zip(pairwise(real), padded, strict=False):
            padding[start : start + b - a] = False
        local = out[mine].masked_fill(padding[mine][:, None, None], torch.nan).to(query.dtype)
        local = local.flatten(1)
        if qkv_format == "thd":
            return local
        return local.unflatten(0, (rows, -1)).transpose(0, 1)


MODULE = SimpleNamespace(DotProductAttention=DotProductAttention)
