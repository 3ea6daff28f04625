"""MagiAttention's own engine over packs, behind our core attention.

The package decides which rank holds which token, on the device and with its process group. So
data-loader workers leave packs whole, and every rank cuts its share when a batch has arrived:

```
key      = magi_attn_varlen_key(boundaries of the documents, and the pack's tail as one more)
index    = dispatch(0 1 2 ... T - 1)         this rank's slots; everything else is a gather by them
in layers  calc_attn(q, k, v, key)           [tokens, heads, d]
```

Dispatching slot numbers, not tensors, keeps its traps away: `get_position_ids` counts through the
pack where rotary embeddings count through a document, and padding a tensor with its default of 0
makes a target of it. Slots are never padded here: chunks divide the ranks' shares.

Source: https://github.com/SandAI-org/MagiAttention (1.1), `magi_attention/api`.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.packed.errors import ConfigurationError, TrainingError
from megatron.packed.packing import PackedBatch

PACKAGE = "magi_attention"
# Its kernels begin with Hopper.
COMPUTE_CAPABILITY = (9, 0)
# With fewer chunks a rank its balance is up to 1.6 off.
CHUNKS_PER_RANK = 16


@dataclass(frozen=True)
class MagiApi:
    """What is used of the package, by its own names.

    Attributes:
        magi_attn_varlen_key: boundaries and mask to a key.
        make_varlen_key_for_new_mask_after_dispatch: another mask on the layout of a key.
        dispatch: whole tensor to this rank's rows.
        undispatch: rows of all ranks to the whole tensor.
        calc_attn: attention of this rank's rows.
        DistAttnConfig, DispatchConfig: settings of a key.
    """

    magi_attn_varlen_key: Callable[..., Any]
    make_varlen_key_for_new_mask_after_dispatch: Callable[..., Any]
    dispatch: Callable[..., Tensor]
    undispatch: Callable[..., Tensor]
    calc_attn: Callable[..., tuple[Tensor, Any]]
    DistAttnConfig: Callable[..., Any]
    DispatchConfig: Callable[..., Any]


def is_installed() -> bool:
    """Whether the package is there; nothing of it is imported."""
    return importlib.util.find_spec(PACKAGE) is not None


def load_api() -> MagiApi:
    """Import the package.

    Raises:
        ConfigurationError: if it can't be imported, or has other names.
    """
    try:
        api = importlib.import_module(f"{PACKAGE}.api")
        config = importlib.import_module(f"{PACKAGE}.config")
        return MagiApi(
            api.magi_attn_varlen_key,
            api.make_varlen_key_for_new_mask_after_dispatch,
            api.dispatch,
            api.undispatch,
            api.calc_attn,
            config.DistAttnConfig,
            config.DispatchConfig,
        )
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"--attention-backend magi: the package {PACKAGE} can't be used ({error}); install "
            "version 1.1, or use --cp-comm-type dispatch with --attention-backend flash"
        ) from error


@dataclass(frozen=True)
class MagiShape:
    """What the layers compute on one tensor-parallel rank.

    Attributes:
        heads: query heads.
        kv_heads: key-value heads.
        width: channels of a head.
        cp_size: context-parallel ranks.
        chunk_size: tokens of the largest chunk (`--magi-attn-chunk-size`); None for 16 a rank.
        windows: sliding windows of the layers, each once; None for layers that see everything.
    """

    heads: int
    kv_heads: int
    width: int
    cp_size: int
    chunk_size: int | None = None
    windows: tuple[int | None, ...] = (None,)


def chunk_of_share(share: int, asked: int | None) -> int:
    """Tokens of a chunk: the largest divisor of a rank's share that leaves it chunks enough.

    Args:
        share: tokens of a rank.
        asked: the most that was asked for.
    """
    most = max(min(share // CHUNKS_PER_RANK, asked or share), 1)
    return next(size for size in range(most, 0, -1) if share % size == 0)


@dataclass(frozen=True, eq=False)
class MagiShare:
    """How the layers attend over one micro-batch; stands where our plans do.

    Attributes:
        api: the package.
        keys: its keys by sliding window; all of one layout.
        valid: bool `[tokens, 1, 1]`, slots of this rank that hold a token.
        cp_size: context-parallel ranks.
    """

    api: MagiApi
    keys: Mapping[int | None, Any]
    valid: Tensor
    cp_size: int

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float
    ) -> Tensor:
        """Attention of this rank's rows, `[tokens, heads, d]`; zeros in padding."""
        made = self.keys[window]
        out, _ = self.api.calc_attn(query, key, value, made, softmax_scale=scale)
        return torch.where(self.valid, out, 0.0)

    def gather(self, rows: Tensor, *, partial_gradients: bool = True) -> Tensor:
        """Rows of all ranks in the order of the pack: for logits, and for tests.

        Args:
            rows: `[tokens, ...]` of this rank.
            partial_gradients: every rank goes on with its own part of the loss, so that gradients
                of a row come from all of them and are summed.
        """
        made = next(iter(self.keys.values()))
        return self.api.undispatch(rows, made, is_partial_grad=partial_gradients)


class MagiEngine:
    """Cuts whole packs by the package's layout.

    Args:
        shape: of the attention.
        group: the context-parallel process group, of nccl.
        api: the package; imported by default.

    Raises:
        ConfigurationError: if the package can't be used.
    """

    def __init__(self, shape: MagiShape, group: Any, api: MagiApi | None = None) -> None:
        self._shape = shape
        self._group = group
        self._api = load_api() if api is None else api

    def share(self, batch: PackedBatch) -> PackedBatch:
        """This rank's share of a whole pack; a collective call.

        Args:
            batch: the whole pack, on the device, padded at its end alone.

        Raises:
            TrainingError: if the package cuts otherwise than in equal shares.
        """
        params, shape = batch.packed_seq_params, self._shape
        total = params.chunk_total_tokens
        keys = self._keys(params.cu_seqlens_host, total)
        layout = next(iter(keys.values()))
        slots = torch.arange(total, device=batch.tokens.device)
        index = self._api.dispatch(slots, layout, pad_value=-1)
        if index.shape != (total // shape.cp_size,):
            raise TrainingError(
                f"{PACKAGE}: gives {tuple(index.shape)} of {total} tokens to one of "
                f"{shape.cp_size} ranks; use --cp-comm-type dispatch with another "
                "--attention-backend, and report its version"
            )

        def cut(x: Tensor) -> Tensor:
            return x.index_select(1, index)

        valid = cut(batch.valid_mask)
        mine = copy.copy(params)
        mine.valid_local_token_mask, mine.position_ids = valid, cut(batch.position_ids)
        mine.document_ids = cut(batch.document_ids)
        mine.attention = MagiShare(self._api, keys, valid.view(-1, 1, 1), shape.cp_size)
        return replace(
            batch,
            tokens=cut(batch.tokens),
            labels=cut(batch.labels),
            loss_mask=cut(batch.loss_mask),
            position_ids=mine.position_ids,
            valid_mask=valid,
            document_ids=mine.document_ids,
            mtp_labels=[cut(x) for x in batch.mtp_labels],
            mtp_loss_masks=[cut(x) for x in batch.mtp_loss_masks],
            packed_seq_params=mine,
        )

    def _keys(self, cu_seqlens: Any, total: int) -> dict[int | None, Any]:
        shape, api = self._shape, self._api
        # The tail is a segment of its own, so that the package has nothing to pad.
        edges = torch.from_numpy(np.unique(np.append(cu_seqlens, total)).astype(np.int32))
        chunk = chunk_of_share(total // shape.cp_size, shape.chunk_size)
        keys: dict[int | None, Any] = {}
        for window in shape.windows:
            mask: dict[str, Any] = {"causal": True}
            if window is not None:
                mask = {"causal": False, "window_size": (window, 0)}
            if keys:
                keys[window] = api.make_varlen_key_for_new_mask_after_dispatch(
                    cu_seqlens_q=edges,
                    cu_seqlens_k=edges,
                    key_for_dispatch=next(iter(keys.values())),
                    **mask,
                )
                continue
            keys[window] = api.magi_attn_varlen_key(
                cu_seqlens_q=edges,
                cu_seqlens_k=edges,
                num_heads_q=shape.heads,
                num_heads_kv=shape.kv_heads,
                head_dim=shape.width,
                pad_size=0,
                cp_group_or_mesh=self._group,
                dist_attn_config=api.DistAttnConfig(
                    dispatch_config=api.DispatchConfig(chunk_size=chunk)
                ),
                **mask,
            )
        return keys
