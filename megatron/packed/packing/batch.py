"""PackPlan to tensors: the only file of this room that knows torch and megatron-core."""

from __future__ import annotations

import copy
import zlib
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray
from torch import Tensor

from megatron.packed.packing.buffer import BufferLayout
from megatron.packed.packing.plan import PackPlan, chunk_edges
from megatron.packed.packing.records import SegmentRecords, unknown_segments
from megatron.packed.packing.views import PackStatistics, PartitionLike


def _no_boundaries() -> NDArray[np.int32]:
    return np.zeros(1, dtype=np.int32)


def _no_rows() -> NDArray[np.int64]:
    return np.zeros(0, dtype=np.int64)


@dataclass
class PackedSeqParamsWithValidTokens(PackedSeqParams):
    """megatron-core's packed parameters plus what this project's consumers need.

    Fields of the base class describe *this chunk of the pack, over all context-parallel ranks*
    (the chunk is the whole pack unless `chunk()` made it): `cu_seqlens_q/kv` are the real
    boundaries, `cu_seqlens_q/kv_padded` the aligned ones, the same tensor in both when nothing
    is padded. `max_seqlen_q/kv` is the longest *padded* segment, because external kernels divide
    it by the context-parallel size.

    Attributes:
        cu_seqlens_host: int32 `[n + 1]` numpy, real boundaries of this chunk. Reading it never
            waits for a device.
        cu_seqlens_padded_host: int32 `[n + 1]` numpy, aligned boundaries of this chunk.
        max_seqlen: longest real segment of this chunk.
        chunk_total_tokens: padded tokens of this chunk, over all context-parallel ranks.
        chunk_num_valid_tokens: real tokens of this chunk.
        chunk_index: which chunk this is.
        num_chunks: 1 for a whole pack.
        valid_total_num_tokens: real tokens of the *whole* pack: normalise sums with this one.
        valid_tokens_per_row: int64 `[B]` numpy, real tokens of each source row, *whole* pack.
        valid_local_token_mask: bool `[1, T_local]`, real tokens among those this rank holds of
            this chunk.
        position_ids: int64 `[1, T_local]`, position in the document, to index RoPE with.
        partition: how this chunk is cut over context-parallel ranks; None when it is not.
        cp_rank: the rank whose share the local fields describe.
        attention: that rank's attention plans, made ahead of the step; None when it is not cut.
        document_ids: int32 `[1, T_local]`, segment of each of this rank's tokens, -1 in padding.
        token_weights: float64 `[n]`, what each token of a segment weighs in the objective.
        segments: where each segment comes from, on the host.
        segment_targets: int64 `[depths, n]` numpy, supervised positions of each segment over all
            context-parallel ranks, for the main loss and each multi-token-prediction depth.
        token_weights_host: float64 `[n]` numpy, `token_weights`.
    """

    cu_seqlens_host: NDArray[np.int32] = field(default_factory=_no_boundaries)
    cu_seqlens_padded_host: NDArray[np.int32] = field(default_factory=_no_boundaries)
    max_seqlen: int = 0
    chunk_total_tokens: int = 0
    chunk_num_valid_tokens: int = 0
    chunk_index: int = 0
    num_chunks: int = 1
    valid_total_num_tokens: int = 0
    valid_tokens_per_row: NDArray[np.int64] = field(default_factory=_no_rows)
    valid_local_token_mask: Tensor = None
    position_ids: Tensor = None
    partition: PartitionLike | None = None
    cp_rank: int = 0
    attention: Any = None
    document_ids: Tensor = None
    token_weights: Tensor = None
    segments: SegmentRecords = field(default_factory=lambda: SegmentRecords.unknown(0))
    segment_targets: NDArray[np.int64] = field(default_factory=lambda: np.zeros((1, 0), np.int64))
    token_weights_host: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    @property
    def pad_between_seqs(self) -> bool:
        """Whether real and aligned boundaries differ."""
        return self.cu_seqlens_q is not self.cu_seqlens_q_padded

    @pad_between_seqs.setter
    def pad_between_seqs(self, value: bool | None) -> None:
        # Newer megatron-core has a field of this name; its constructor assigns the default here.
        # The boundaries alone decide, so the value is not kept.
        del value

    def digest(self) -> int:
        """Checksum of the metadata that all ranks of a model must agree on.

        Host arrays only, so it is the same for every tensor-, context- and pipeline-parallel
        rank of a micro-batch, and computing it never waits for a device.
        """
        numbers = (
            self.max_seqlen,
            self.max_seqlen_q,
            self.chunk_total_tokens,
            self.chunk_index,
            self.num_chunks,
            self.valid_total_num_tokens,
        )
        value = zlib.crc32(repr(numbers).encode())
        for array in (
            self.cu_seqlens_host,
            self.cu_seqlens_padded_host,
            self.valid_tokens_per_row,
        ):
            value = zlib.crc32(np.ascontiguousarray(array).tobytes(), value)
        return value

    def chunk(self, num_chunks: int) -> list[PackedSeqParamsWithValidTokens]:
        """Cut into chunks of whole segments, for schedules that split a micro-batch.

        Chunk i covers the segments whose padded start lies in the i-th part of the pack, so no
        attention crosses a chunk. Tokens of chunk i are
        `[1, offset : offset + chunk_total_tokens]` with the chunks laid end to end.

        Args:
            num_chunks: at most the number of segments.

        Raises:
            ValueError: for a pack cut over context-parallel ranks (cut the plan instead:
                `PackPlan.chunk`), for chunks of chunks, or more chunks than segments.
        """
        if self.partition is not None:
            raise ValueError(
                "partition: this pack is cut over context-parallel ranks already; use "
                "PackPlan.chunk and cut each part"
            )
        if self.num_chunks != 1:
            raise ValueError("num_chunks: this is a chunk already")
        edges = chunk_edges(self.cu_seqlens_padded_host, num_chunks)
        return [
            self._segments(a, b, index, num_chunks)
            for index, (a, b) in enumerate(zip(edges[:-1], edges[1:], strict=True))
        ]

    def _segments(
        self, first: int, last: int, index: int, num_chunks: int
    ) -> PackedSeqParamsWithValidTokens:
        """The chunk of segments first .. last - 1."""
        real = self.cu_seqlens_host[first : last + 1] - self.cu_seqlens_host[first]
        padded = self.cu_seqlens_padded_host[first : last + 1]
        begin, end = int(padded[0]), int(padded[-1])
        padded = padded - padded[0]
        device = self.cu_seqlens_q.device
        chunk = copy.copy(self)
        chunk.cu_seqlens_host = chunk.cu_seqlens_padded_host = real
        chunk.cu_seqlens_q = chunk.cu_seqlens_q_padded = torch.from_numpy(real).to(device)
        if not np.array_equal(real, padded):
            chunk.cu_seqlens_padded_host = padded
            chunk.cu_seqlens_q_padded = torch.from_numpy(padded).to(device)
        chunk.cu_seqlens_kv = chunk.cu_seqlens_q
        chunk.cu_seqlens_kv_padded = chunk.cu_seqlens_q_padded
        chunk.max_seqlen_q = chunk.max_seqlen_kv = int(np.diff(padded).max())
        chunk.max_seqlen = int(np.diff(real).max())
        chunk.chunk_total_tokens = end - begin
        chunk.chunk_num_valid_tokens = int(real[-1])
        chunk.chunk_index, chunk.num_chunks = index, num_chunks
        chunk.valid_local_token_mask = self.valid_local_token_mask[:, begin:end]
        chunk.position_ids = self.position_ids[:, begin:end]
        ids = self.document_ids[:, begin:end]
        chunk.document_ids = torch.where(ids < 0, ids, ids - first)
        chunk.token_weights = self.token_weights[first:last]
        chunk.token_weights_host = self.token_weights_host[first:last]
        chunk.segments = self.segments[first:last]
        chunk.segment_targets = self.segment_targets[:, first:last]
        return chunk


@dataclass
class PackedBatch:
    """One micro-batch, ready for the step. T is the whole pack, or one rank's share of it.

    All tensors are views of one buffer, so moving, pinning, sending to another process and
    broadcasting a batch is one operation.

    Attributes:
        tokens: int64 `[1, T]`.
        labels: int64 `[1, T]`, 0 where unsupervised.
        loss_mask: float32 `[1, T]`.
        position_ids: int64 `[1, T]`.
        valid_mask: bool `[1, T]`.
        document_ids: int32 `[1, T]`, -1 in padding.
        mtp_labels: int64 `[K, 1, T]`, of depth 1, 2, ...
        mtp_loss_masks: float32 `[K, 1, T]`.
        packed_seq_params: metadata of the whole pack.
        statistics: counts of the whole pack.
        buffer: uint8, the bytes that the tensors are views of.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    valid_mask: Tensor
    document_ids: Tensor
    mtp_labels: Tensor
    mtp_loss_masks: Tensor
    packed_seq_params: PackedSeqParamsWithValidTokens
    statistics: PackStatistics
    buffer: Tensor

    @classmethod
    def from_plan(
        cls,
        plan: PackPlan,
        rows: Any,
        *,
        mtp_depths: int = 0,
        partition: PartitionLike | None = None,
        rank: int = 0,
        chunk_index: int = 0,
        num_chunks: int = 1,
        attention: Any = None,
        segments: SegmentRecords | None = None,
        supervised: Any = None,
    ) -> PackedBatch:
        """Gather everything a step reads.

        Args:
            plan: the pack.
            rows: the raw rows it was built from, numpy or torch, `[B, S]` or `[B, S + 1]`.
            mtp_depths: multi-token-prediction depths beyond the main loss.
            partition: cut the pack over context-parallel ranks; None keeps it whole.
            rank: context-parallel rank.
            chunk_index: which part of a larger pack the plan is, if `PackPlan.chunk` made it.
            num_chunks: parts of that larger pack.
            attention: plans of this rank's attention.
            segments: where each of the plan's segments comes from; None where nobody knows.
            supervised: integers shaped as `rows`, not 0 where a token is a target, of whichever
                depth predicts it; None where all are.

        Raises:
            ValueError: for records of another number of segments.
        """
        if segments is None:
            segments = unknown_segments(plan.num_segments)
        if len(segments) != plan.num_segments:
            raise ValueError(f"segments: {len(segments)} records for {plan.num_segments} segments")
        view = plan.full if partition is None else plan.local(partition, rank)
        layout = BufferLayout(
            num_tokens=view.num_tokens,
            depths=1 + mtp_depths,
            num_segments=plan.num_segments,
            num_rows=len(plan.valid_tokens_per_row),
        )
        # Numpy asks for huge pages for large arrays; torch doesn't, and page faults would take
        # longer than the gathers.
        host = np.empty(layout.num_bytes, dtype=np.uint8)
        view.write(rows, layout, host)
        targets, token_weights = (
            layout.array(host, n) for n in ("segment_targets", "token_weights")
        )
        for depth in range(layout.depths):
            targets[depth] = plan.segment_targets(depth, supervised)
            if supervised is not None:
                left_out = ~view.target_mask(supervised, depth)
                layout.array(host, "labels")[depth][left_out] = 0
                layout.array(host, "loss_masks")[depth][left_out] = 0
        statistics = plan.statistics
        if supervised is not None:
            statistics = replace(statistics, supervised_tokens=int(targets[0].sum()))
        layout.array(host, "segment_records")[:] = segments.integers
        layout.array(host, "segment_weights")[:] = token_weights[:] = segments.weights
        params = PackedSeqParamsWithValidTokens(
            qkv_format="thd",
            max_seqlen_q=plan.max_seqlen_padded,
            max_seqlen_kv=plan.max_seqlen_padded,
            cu_seqlens_host=plan.cu_seqlens,
            cu_seqlens_padded_host=plan.cu_seqlens_padded,
            max_seqlen=plan.max_seqlen,
            chunk_total_tokens=plan.total_tokens,
            chunk_num_valid_tokens=int(plan.cu_seqlens[-1]),
            chunk_index=chunk_index,
            num_chunks=num_chunks,
            valid_total_num_tokens=plan.whole_pack_valid_tokens,
            valid_tokens_per_row=plan.valid_tokens_per_row,
            partition=partition,
            cp_rank=rank,
            attention=attention,
            segments=segments,
            segment_targets=targets,
            token_weights_host=token_weights,
        )
        layout.write_header(
            host,
            [*(getattr(params, name) for name in _IN_HEADER), *vars(statistics).values()],
        )
        return cls._over(torch.from_numpy(host), layout, params, statistics)

    @classmethod
    def from_buffer(
        cls, buffer: Tensor, *, partition: PartitionLike | None = None, attention: Any = None
    ) -> PackedBatch:
        """Rebuild a batch from its bytes, such as another rank received them.

        Args:
            buffer: uint8 `[at least num_bytes]`, on the host.
            partition: the partition the batch was cut with.
            attention: the plans that go with it.

        Raises:
            ValueError: when the bytes are no batch.
        """
        layout, numbers = BufferLayout.read_header(buffer.numpy())
        arrays = layout.arrays(buffer.numpy())
        real, padded = arrays["cu_seqlens"].copy(), arrays["cu_seqlens_padded"].copy()
        if np.array_equal(real, padded):
            padded = real
        numbered = dict(zip(_IN_HEADER, numbers, strict=False))
        params = PackedSeqParamsWithValidTokens(
            qkv_format="thd",
            max_seqlen_kv=numbered["max_seqlen_q"],
            cu_seqlens_host=real,
            cu_seqlens_padded_host=padded,
            valid_tokens_per_row=arrays["valid_tokens_per_row"].copy(),
            partition=partition,
            attention=attention,
            segments=SegmentRecords.from_arrays(
                arrays["segment_records"].copy(), arrays["segment_weights"].copy()
            ),
            segment_targets=arrays["segment_targets"].copy(),
            token_weights_host=arrays["token_weights"].copy(),
            **numbered,
        )
        first = len(_IN_HEADER)
        statistics = PackStatistics(*numbers[first : first + _NUM_STATISTICS])
        return cls._over(buffer, layout, params, statistics)

    @classmethod
    def _over(
        cls,
        buffer: Tensor,
        layout: BufferLayout,
        params: PackedSeqParamsWithValidTokens,
        statistics: PackStatistics,
    ) -> PackedBatch:
        """Take views of a buffer on any device, and put them into `params`."""

        # One view of the bytes a dtype, then one strided view an array.
        held = buffer if len(buffer) == layout.num_bytes else buffer[: layout.num_bytes]
        words, halves = held.view(torch.int64), held.view(torch.int32)
        first, first_half = words.storage_offset(), halves.storage_offset()
        t, depths = layout.num_tokens, layout.depths
        shape, strides = (1, t), (t, 1)
        tokens, positions, labels, weights, documents, valid, real, padded, *_ = layout.places
        position_ids = words.as_strided(shape, strides, first + positions // 8)
        flags = buffer.as_strided(shape, strides, buffer.storage_offset() + valid)
        valid_mask = flags.view(torch.bool)
        by_depth, depth_strides = (depths, 1, t), (t, t, 1)
        label_rows = words.as_strided(by_depth, depth_strides, first + labels // 8)
        weight_rows = halves.as_strided(by_depth, depth_strides, first_half + weights // 4).view(
            torch.float32
        )
        bounds = (layout.num_segments + 1,)
        cu_seqlens = cu_padded = halves.as_strided(bounds, (1,), first_half + real // 4)
        if params.cu_seqlens_padded_host is not params.cu_seqlens_host:
            cu_padded = halves.as_strided(bounds, (1,), first_half + padded // 4)
        params.cu_seqlens_q = params.cu_seqlens_kv = cu_seqlens
        params.cu_seqlens_q_padded = params.cu_seqlens_kv_padded = cu_padded
        params.valid_local_token_mask = valid_mask
        params.position_ids = position_ids
        document_ids = halves.as_strided(shape, strides, first_half + documents // 4)
        params.document_ids = document_ids
        of_tokens = first + layout.places[-2] // 8
        params.token_weights = words.as_strided((layout.num_segments,), (1,), of_tokens).view(
            torch.float64
        )
        return cls(
            tokens=words.as_strided(shape, strides, first + tokens // 8),
            labels=label_rows[0],
            loss_mask=weight_rows[0],
            position_ids=position_ids,
            valid_mask=valid_mask,
            document_ids=document_ids,
            mtp_labels=label_rows[1:],
            mtp_loss_masks=weight_rows[1:],
            packed_seq_params=params,
            statistics=statistics,
            buffer=buffer,
        )

    @property
    def layout(self) -> BufferLayout:
        """Sizes of this batch, known on the host."""
        params = self.packed_seq_params
        return BufferLayout(
            num_tokens=self.tokens.shape[1],
            depths=1 + len(self.mtp_labels),
            num_segments=len(params.cu_seqlens_host) - 1,
            num_rows=len(params.valid_tokens_per_row),
        )

    def _on(self, buffer: Tensor) -> PackedBatch:
        params = copy.copy(self.packed_seq_params)
        return self._over(buffer, self.layout, params, self.statistics)

    def to(self, device: torch.device | str, non_blocking: bool = True) -> PackedBatch:
        """Copy to a device; one copy, which from pinned memory doesn't wait for the device."""
        return self._on(self.buffer.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedBatch:
        """Copy to page-locked memory; the name is the one that DataLoader calls."""
        return self._on(self.buffer.pin_memory())

    def __reduce__(self) -> tuple[Any, ...]:
        # From a data-loader worker one shared-memory tensor travels, not a dozen.
        params = self.packed_seq_params
        return _rebuild, (self.buffer, params.partition, params.attention)


def _rebuild(buffer: Tensor, partition: PartitionLike | None, attention: Any) -> PackedBatch:
    return PackedBatch.from_buffer(buffer, partition=partition, attention=attention)


# Fields of the parameters that travel in the buffer's header, before the statistics.
_IN_HEADER = (
    "max_seqlen",
    "max_seqlen_q",
    "chunk_total_tokens",
    "chunk_num_valid_tokens",
    "chunk_index",
    "num_chunks",
    "valid_total_num_tokens",
    "cp_rank",
)
_NUM_STATISTICS = len(fields(PackStatistics))
