"""PackPlan to tensors: the only file of this room that knows torch and megatron-core."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron.packed.packing.plan import PackPlan, PackStatistics, PackView, PartitionLike


@dataclass
class PackedSeqParamsWithValidTokens(PackedSeqParams):
    """megatron-core's packed parameters plus what this project's consumers need.

    Fields of the base class (all *whole pack*, never one rank's): `cu_seqlens_q/kv` are the real
    boundaries, `cu_seqlens_q/kv_padded` the aligned ones, the same tensor in both when nothing
    is padded. `max_seqlen_q/kv` is the longest *padded* segment, because external kernels divide
    it by the context-parallel size.

    Attributes:
        cu_seqlens_host: int32 `[n + 1]` numpy, real boundaries. Reading it never waits for a
            device.
        cu_seqlens_padded_host: int32 `[n + 1]` numpy, aligned boundaries.
        max_seqlen: longest real segment of the pack.
        total_tokens_global: T, length of the padded pack.
        valid_total_num_tokens: real tokens of the whole pack.
        valid_tokens_per_row: int64 `[B]` numpy, real tokens of each source row.
        valid_local_token_mask: bool `[1, T_local]`, real tokens among those this rank holds.
        position_ids: int64 `[1, T_local]`, position in the document, to index RoPE with.
        partition: how the pack is cut over context-parallel ranks; None when it is not.
        cp_rank: the rank whose share the `*_local` fields describe.
    """

    cu_seqlens_host: np.ndarray | None = None
    cu_seqlens_padded_host: np.ndarray | None = None
    max_seqlen: int | None = None
    total_tokens_global: int | None = None
    valid_total_num_tokens: int | None = None
    valid_tokens_per_row: np.ndarray | None = None
    valid_local_token_mask: Tensor | None = None
    position_ids: Tensor | None = None
    partition: PartitionLike | None = None
    cp_rank: int = 0

    @property
    def pad_between_seqs(self) -> bool:
        """Whether real and aligned boundaries differ."""
        return self.cu_seqlens_q is not self.cu_seqlens_q_padded

    @pad_between_seqs.setter
    def pad_between_seqs(self, value: bool | None) -> None:
        # Newer megatron-core has a field of this name; its constructor assigns the default here.
        # The boundaries alone decide, so the value is not kept.
        del value


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def packed_seq_params(
    plan: PackPlan, view: PackView | None = None, *, partition: PartitionLike | None = None, rank: int = 0
) -> PackedSeqParamsWithValidTokens:
    """Build the parameters of a pack.

    Args:
        plan: the pack.
        view: the positions this rank holds; the whole pack by default.
        partition: the partition that gave the view.
        rank: context-parallel rank of the view.
    """
    view = plan.full if view is None else view
    cu_seqlens = _tensor(plan.cu_seqlens)
    padded = cu_seqlens
    if plan.cu_seqlens_padded is not plan.cu_seqlens:
        padded = _tensor(plan.cu_seqlens_padded)
    return PackedSeqParamsWithValidTokens(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=plan.max_seqlen_padded,
        max_seqlen_kv=plan.max_seqlen_padded,
        cu_seqlens_host=plan.cu_seqlens,
        cu_seqlens_padded_host=plan.cu_seqlens_padded,
        max_seqlen=plan.max_seqlen,
        total_tokens_global=plan.total_tokens,
        valid_total_num_tokens=int(plan.cu_seqlens[-1]),
        valid_tokens_per_row=plan.valid_tokens_per_row,
        valid_local_token_mask=_tensor(view.valid_mask)[None],
        position_ids=_tensor(view.position_ids)[None],
        partition=partition,
        cp_rank=rank,
    )


def _move(value: Any, moved: dict[int, Tensor], device: Any, non_blocking: bool, pin: bool) -> Any:
    """Move a tensor once, however many fields hold it: identity between fields is kept."""
    if not isinstance(value, Tensor):
        return value
    if id(value) not in moved:
        moved[id(value)] = (
            value.pin_memory() if pin else value.to(device, non_blocking=non_blocking)
        )
    return moved[id(value)]


@dataclass
class PackedBatch:
    """One micro-batch, ready for the step. T is the whole pack, or one rank's share of it.

    Attributes:
        tokens: int64 `[1, T]`.
        labels: int64 `[1, T]`, 0 where unsupervised.
        loss_mask: float32 `[1, T]`.
        position_ids: int64 `[1, T]`.
        valid_mask: bool `[1, T]`.
        document_ids: int32 `[1, T]`, -1 in padding.
        packed_seq_params: whole-pack metadata.
        statistics: counts of the whole pack.
        mtp_labels: int64 `[1, T]` for depth 1, 2, ...
        mtp_loss_masks: float32 `[1, T]` for depth 1, 2, ...
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    valid_mask: Tensor
    document_ids: Tensor
    packed_seq_params: PackedSeqParamsWithValidTokens
    statistics: PackStatistics
    mtp_labels: list[Tensor] = field(default_factory=list)
    mtp_loss_masks: list[Tensor] = field(default_factory=list)

    @classmethod
    def from_plan(
        cls,
        plan: PackPlan,
        rows: Any,
        *,
        mtp_depths: int = 0,
        partition: PartitionLike | None = None,
        rank: int = 0,
    ) -> PackedBatch:
        """Gather everything a step reads.

        Args:
            plan: the pack.
            rows: the raw rows it was built from, numpy or torch, `[B, S]` or `[B, S + 1]`.
            mtp_depths: multi-token-prediction depths beyond the main loss.
            partition: cut the pack over context-parallel ranks; None keeps it whole.
            rank: context-parallel rank.
        """
        view = plan.full if partition is None else plan.local(partition, rank)
        depths = range(1, mtp_depths + 1)
        params = packed_seq_params(plan, view, partition=partition, rank=rank)
        return cls(
            tokens=_tensor(view.gather_tokens(rows))[None],
            labels=_tensor(view.gather_labels(rows))[None],
            loss_mask=_tensor(view.loss_mask())[None].float(),
            position_ids=params.position_ids,
            valid_mask=params.valid_local_token_mask,
            document_ids=_tensor(view.document_ids)[None],
            packed_seq_params=params,
            statistics=plan.statistics,
            mtp_labels=[_tensor(view.gather_labels(rows, depth))[None] for depth in depths],
            mtp_loss_masks=[_tensor(view.loss_mask(depth))[None].float() for depth in depths],
        )

    def _map(self, device: Any, non_blocking: bool, pin: bool) -> PackedBatch:
        moved: dict[int, Tensor] = {}

        def move(value: Any) -> Any:
            if isinstance(value, list):
                return [move(item) for item in value]
            return _move(value, moved, device, non_blocking, pin)

        params = self.packed_seq_params
        fields = {
            f.name: move(getattr(params, f.name))
            for f in dataclasses.fields(params)
            if f.name != "pad_between_seqs"
        }
        own = {f.name: move(getattr(self, f.name)) for f in dataclasses.fields(self)}
        own["packed_seq_params"] = type(params)(**fields)
        return type(self)(**own)

    def to(self, device: torch.device | str, non_blocking: bool = True) -> PackedBatch:
        """Copy to a device. From pinned memory the copies don't wait for the device."""
        return self._map(device, non_blocking, pin=False)

    def pin_memory(self) -> PackedBatch:
        """Copy to page-locked memory; the name is the one that DataLoader calls."""
        return self._map(None, False, pin=True)
