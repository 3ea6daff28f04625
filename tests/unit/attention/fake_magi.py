"""A stand-in for `magi_attention.api`: its call contract, its layout, and dense attention.

Ranks are threads: each exchange waits until all ranks have made theirs.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megatron.packed.attention.kernels import tiles_reference
from megatron.packed.attention.magi import MagiApi
from megatron.packed.attention.task_graph import Mask
from tests.unit.attention.fake_world import FakeGroup


@dataclass
class DispatchConfig:
    chunk_size: int


@dataclass
class DistAttnConfig:
    dispatch_config: DispatchConfig


@dataclass
class Key:
    """What the package keeps of a pack."""

    group: FakeGroup
    edges: list[int]
    heads: tuple[int, int, int]
    window: int | None
    layout: list[list[int]] = field(repr=False)
    calls: int = 0

    @property
    def mine(self) -> Tensor:
        return torch.tensor(self.layout[self.group.rank])

    def swap(self, value: Any) -> list[Any]:
        self.calls += 1
        # Keys of one pack take turns in one order, so a number for each call will do.
        number = hash((id(type(self)), self.window, self.calls))
        return self.group.world.swap(self.group.rank, number, value)


def layout(edges: list[int], chunk: int, size: int) -> list[list[int]]:
    """Chunks by unmasked pairs, heaviest first, to the least loaded rank; ascending in a rank."""
    total = edges[-1]
    chunk = min(chunk, math.ceil(total / (8 * size)))
    assert total % (chunk * size) == 0, "the package would pad"
    start_of = [start for start, end in pairwise(edges) for _ in range(start, end)]
    pairs = [i - start_of[i] + 1 for i in range(total)]
    areas = torch.tensor([sum(pairs[at : at + chunk]) for at in range(0, total, chunk)])
    order = areas.argsort(stable=True).flip(0).tolist()
    heap = [(0, rank) for rank in range(size)]
    held: list[list[int]] = [[] for _ in range(size)]
    for index in order:
        full = []
        load, rank = heapq.heappop(heap)
        while len(held[rank]) >= len(order) // size:
            full.append((load, rank))
            load, rank = heapq.heappop(heap)
        held[rank].append(index)
        for entry in (*full, (load + int(areas[index]), rank)):
            heapq.heappush(heap, entry)
    return [[i for c in sorted(own) for i in range(c * chunk, (c + 1) * chunk)] for own in held]


def _mask(causal: bool, window_size: tuple[int, int]) -> int | None:
    if causal:
        assert window_size == (-1, -1)
        return None
    assert window_size[0] >= 0 and window_size[1] == 0
    return window_size[0]


def _edges(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[int]:
    assert cu_seqlens_q.dtype == torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_k)
    edges = cu_seqlens_q.tolist()
    assert edges[0] == 0 and all(a < b for a, b in pairwise(edges)), "an empty range"
    return edges


def magi_attn_varlen_key(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    pad_size: int,
    cp_group_or_mesh: FakeGroup,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    dist_attn_config: DistAttnConfig | None = None,
    chunk_size: int | None = None,
) -> Key:
    assert pad_size == 0 and chunk_size is None, "deprecated"
    assert head_dim % 8 == 0 and head_dim <= 192 and num_heads_q % num_heads_kv == 0
    edges, group = _edges(cu_seqlens_q, cu_seqlens_k), cp_group_or_mesh
    held = layout(edges, dist_attn_config.dispatch_config.chunk_size, group.world.size)
    heads = num_heads_q, num_heads_kv, head_dim
    return Key(group, edges, heads, _mask(causal, window_size), held)


def make_varlen_key_for_new_mask_after_dispatch(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    key_for_dispatch: Key,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    dist_attn_config: DistAttnConfig | None = None,
) -> Key:
    assert dist_attn_config is None
    assert _edges(cu_seqlens_q, cu_seqlens_k) == key_for_dispatch.edges
    return replace(key_for_dispatch, window=_mask(causal, window_size), calls=0)


def dispatch(x: Tensor, key: Key, pad_value: float = 0.0) -> Tensor:
    assert pad_value < 0, "0 is a slot, a label and a token"
    assert len(x) == key.edges[-1]
    return x[key.mine]


def undispatch(x: Tensor, key: Key, is_partial_grad: bool = False) -> Tensor:
    parts = key.swap(x)
    if not is_partial_grad:  # gradients of other ranks' losses don't come back
        parts = [part if part is x else part.detach() for part in parts]
    order = torch.tensor([i for own in key.layout for i in own])
    return torch.zeros_like(torch.cat(parts)).index_copy(0, order, torch.cat(parts))


def calc_attn(
    q: Tensor, k: Tensor, v: Tensor, key: Key, softmax_scale: float | None = None
) -> tuple[Tensor, str]:
    heads, kv_heads, width = key.heads
    tokens = len(key.mine)
    assert q.shape == (tokens, heads, width) and k.shape == v.shape == (tokens, kv_heads, width)
    order = torch.tensor([i for own in key.layout for i in own])
    whole = []
    for parts in zip(*key.swap((q, k, v)), strict=True):
        whole.append(torch.zeros_like(torch.cat(parts)).index_copy(0, order, torch.cat(parts)))
    mask = Mask("causal", key.window)
    out = tiles_reference.packed_attention(*whole, key.edges, key.edges, mask, softmax_scale)
    return out[key.mine].to(q.dtype), "meta"


API = MagiApi(
    magi_attn_varlen_key,
    make_varlen_key_for_new_mask_after_dispatch,
    dispatch,
    undispatch,
    calc_attn,
    DistAttnConfig,
    DispatchConfig,
)
