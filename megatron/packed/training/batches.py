"""From collated batches to what the model's forward takes, on every rank that needs it.

Tensor-parallel rank 0 of every pipeline stage reads the data; its peers receive the batch over
the host group before it moves to the device. So every stage, the middle ones too, has tokens,
positions and boundaries, and no step waits for a device to learn a shape.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from megatron.packed.attention.core_attention import RowSeqParams
from megatron.packed.context_parallel.agreement import assert_same_metadata
from megatron.packed.data.bshd import BshdBatch
from megatron.packed.model.mtp import DeeperTargets
from megatron.packed.model.token_slots import pack_slots, row_slots
from megatron.packed.packing import PackedBatch
from megatron.packed.training.environment import Environment
from megatron.packed.training.flops import attended_pairs
from megatron.packed.training.normalisation import Scales, global_scales
from megatron.packed.training.packs import PackBatches
from megatron.packed.training.sharing import HostBatch, next_shared


@dataclass
class BatchStatistics:
    """What micro-batches were made of; adds up.

    Attributes:
        packs: micro-batches.
        segments: pieces of documents that attend among themselves.
        real_tokens: input tokens.
        padded_tokens: slots of the batch that hold no token.
        supervised_tokens: positions with a target.
        sum_squared_lengths: Σℓ² over segments.
        windowed_pairs: query-key pairs, a head, of a layer with the run's sliding window.
        data_seconds: time that steps waited for micro-batches.
    """

    packs: int = 0
    segments: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    supervised_tokens: int = 0
    sum_squared_lengths: int = 0
    windowed_pairs: int = 0
    data_seconds: float = field(default=0.0, compare=False)

    @property
    def fill(self) -> float:
        """Share of the batches' slots that hold a token."""
        slots = self.real_tokens + self.padded_tokens
        return self.real_tokens / slots if slots else 0.0

    def add(self, other: BatchStatistics) -> None:
        """Add counts of other micro-batches."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def reduced(self, device: torch.device) -> BatchStatistics:
        """Sums over data-parallel ranks, and the longest wait; a collective call."""
        names = [each.name for each in fields(self) if each.compare]
        counts = [getattr(self, name) for name in names]
        group = parallel_state.get_data_parallel_group()
        total = torch.tensor(counts, dtype=torch.int64, device=device)
        torch.distributed.all_reduce(total, group=group)
        # All ranks of a step wait for the slowest one. Context-parallel ranks count the same packs.
        longest = torch.tensor(self.data_seconds, dtype=torch.float64, device=device)
        everyone = parallel_state.get_data_parallel_group(with_context_parallel=True)
        torch.distributed.all_reduce(longest, torch.distributed.ReduceOp.MAX, group=everyone)
        sums = dict(zip(names, total.tolist(), strict=True))
        return BatchStatistics(**sums, data_seconds=longest.item())


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass takes. B is 1 and S is T for a pack, this context-parallel rank's.

    Attributes:
        tokens: int64 [B, S].
        labels: int64 [B, S].
        loss_mask: float32 [B, S].
        position_ids: int64 [B, S].
        attention_mask: None, or int32 [n + 1] segment boundaries in the flattened rows.
        valid_mask: bool [B, S], slots that hold a token.
        document_ids: int32 [1, T] of a pack, -1 in padding; None for rows.
        packed_seq_params: boundaries of a pack, or what rows cut over context-parallel ranks
            attend by; None for whole rows.
        statistics: counts of this micro-batch, over all context-parallel ranks.
        cp_size: context-parallel ranks that share this micro-batch.
        scales: of the global batch that a step trains on, where its loss needs them.
        mtp_labels: int64 [K, B, S], labels of multi-token prediction; K may be 0.
        mtp_loss_masks: float32 [K, B, S].
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    valid_mask: torch.Tensor
    document_ids: torch.Tensor | None
    packed_seq_params: PackedSeqParams | None
    statistics: BatchStatistics
    mtp_labels: torch.Tensor
    mtp_loss_masks: torch.Tensor
    cp_size: int = 1
    scales: Scales | None = None

    def deeper_targets(self) -> DeeperTargets | None:
        """What multi-token prediction takes of this micro-batch; None without depths."""
        if not len(self.mtp_labels):
            return None
        scales = None if self.scales is None else self.scales.depths
        return DeeperTargets.of(self.labels, self.mtp_labels, self.mtp_loss_masks, scales)

    def token_slots(self) -> torch.Tensor:
        """What a mixture of experts must know of each slot: int64 [B, S], see `token_slots`."""
        if self.document_ids is None:
            # Only a rank that holds whole rows knows places by counting.
            place = self.position_ids if self.cp_size > 1 else None
            return row_slots(self.valid_mask, place)
        assert self.packed_seq_params is not None
        starts = self.packed_seq_params.cu_seqlens_q_padded
        return pack_slots(self.document_ids, self.position_ids, starts)


def _from_pack(batch: PackedBatch) -> MicroBatch:
    counts = batch.statistics
    plans = batch.packed_seq_params.attention
    return MicroBatch(
        tokens=batch.tokens,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        position_ids=batch.position_ids,
        attention_mask=None,
        valid_mask=batch.valid_mask,
        document_ids=batch.document_ids,
        packed_seq_params=batch.packed_seq_params,
        statistics=BatchStatistics(
            packs=1,
            segments=counts.num_segments,
            real_tokens=counts.real_tokens,
            padded_tokens=counts.padded_tokens,
            supervised_tokens=counts.supervised_tokens,
            sum_squared_lengths=counts.sum_squared_lengths,
        ),
        mtp_labels=batch.mtp_labels,
        mtp_loss_masks=batch.mtp_loss_masks,
        cp_size=1 if plans is None else plans.cp_size,
    )


def _from_rows(batch: BshdBatch, block_diagonal: bool) -> MicroBatch:
    plans = batch.attention
    cp_size = 1 if plans is None else plans.cp_size
    return MicroBatch(
        tokens=batch.tokens,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        position_ids=batch.position_ids,
        attention_mask=batch.cu_seqlens if block_diagonal and plans is None else None,
        valid_mask=batch.valid_mask,
        document_ids=None,
        packed_seq_params=None if plans is None else RowSeqParams("sbhd", attention=plans),
        statistics=BatchStatistics(
            packs=1,
            segments=batch.num_blocks,
            real_tokens=batch.real_tokens,
            padded_tokens=batch.tokens.numel() * cp_size - batch.real_tokens,
            supervised_tokens=batch.supervised_tokens,
            sum_squared_lengths=batch.sum_squared_lengths,
        ),
        mtp_labels=batch.mtp_labels,
        mtp_loss_masks=batch.mtp_loss_masks,
        cp_size=cp_size,
    )


def _segment_boundaries(batch: HostBatch) -> np.ndarray:
    """Real boundaries of all segments, from the batch as it is on the host."""
    if isinstance(batch, PackedBatch):
        return batch.packed_seq_params.cu_seqlens_host
    return batch.cu_seqlens.numpy()


@dataclass(frozen=True)
class BatchSource:
    """How this rank gets its batches.

    Attributes:
        loader: collated batches on tensor-parallel rank 0; None on its peers.
        environment: device and host groups.
        block_diagonal: rows attend inside their segments only (`--reset-attention-mask`).
        window: tokens to the left that layers with a sliding window see; None without.
        share: cuts a pack that arrived whole, on the device; None where workers cut.
    """

    loader: Iterator[HostBatch] | None
    environment: Environment
    block_diagonal: bool
    window: int | None = None
    share: Callable[[PackedBatch], PackedBatch] | None = None

    def read(self) -> HostBatch:
        """The next batch, on the host, equal on all tensor-parallel ranks."""
        on_cuda = self.environment.accelerator.name == "cuda"
        return next_shared(self.loader, self.environment.host_tp_group, pin_memory=on_cuda)


@dataclass(frozen=True)
class _Mark:
    """A point of a stream of batches, and what was read since."""

    state: dict[str, Any]
    consumed_samples: int
    statistics: BatchStatistics
    read: list[HostBatch] = field(default_factory=list)


@dataclass
class MicroBatchIterator:
    """Micro-batches of this rank, with a count of what they held since the last report.

    Attributes:
        source: where batches come from.
        samples_per_micro_batch: samples that all data-parallel ranks take with one micro-batch.
        consumed_samples: samples of all ranks in the micro-batches handed out so far.
        iteration: number of the current step, from 1.
        statistics: counts since `take_statistics`.
        reopen: gives a loader from the first sample on; None where batches go on for ever.
        scales: of the current step, see `normalise`.
    """

    source: BatchSource
    samples_per_micro_batch: int = 1
    consumed_samples: int = 0
    reopen: Callable[[], Iterator[HostBatch] | None] | None = None
    iteration: int = 0
    statistics: BatchStatistics = field(default_factory=BatchStatistics)
    scales: Scales | None = None
    _mark: _Mark | None = None
    _ahead: deque[HostBatch] = field(default_factory=deque)
    _lengths: list[int] = field(default_factory=list)

    def __iter__(self) -> MicroBatchIterator:
        return self

    def __next__(self) -> MicroBatch:
        start = time.perf_counter()
        batch = self._ahead.popleft() if self._ahead else self._read()
        on_device = batch.to(self.source.environment.accelerator.device, non_blocking=True)
        if isinstance(on_device, PackedBatch):
            if self.source.share is not None:
                on_device = self.source.share(on_device)
            micro_batch = _from_pack(on_device)
        else:
            micro_batch = _from_rows(on_device, self.source.block_diagonal)
        if self.source.window is not None:
            lengths = np.diff(_segment_boundaries(batch)).astype(np.int64)
            micro_batch.statistics.windowed_pairs = attended_pairs(lengths, self.source.window)
        if self.scales is not None:
            micro_batch = replace(micro_batch, scales=self.scales)
        self.consumed_samples += self.samples_per_micro_batch
        self.statistics.add(micro_batch.statistics)
        self.statistics.data_seconds += time.perf_counter() - start
        return micro_batch

    def restart(self) -> None:
        """Go back to the first sample, where `reopen` says how; otherwise go on."""
        if self.reopen is None or not self.consumed_samples:
            return
        self.source = replace(self.source, loader=self.reopen())
        self.consumed_samples = 0
        self._ahead.clear()

    def _read(self) -> HostBatch:
        batch = self.source.read()
        self._lengths.append(batch.tokens.shape[1])
        if self._mark is not None:
            self._mark.read.append(batch)
        return batch

    def mark(self) -> None:
        """Remember this point, between two steps, to come back to it with `rewind`."""
        self._mark = _Mark(self.state_dict(), self.consumed_samples, replace(self.statistics))

    def rewind(self) -> None:
        """Hand out everything since the mark again."""
        assert self._mark is not None
        self._ahead = deque(self._mark.read)
        self.consumed_samples = self._mark.consumed_samples
        self.statistics = replace(self._mark.statistics)

    def begin_step(self) -> None:
        """Count micro-batches from the next one on."""
        self._lengths = [batch.tokens.shape[1] for batch in self._ahead]

    def length_of(self, number: int) -> int:
        """Tokens of a row, or of a pack, on this context-parallel rank.

        Args:
            number: counts from the first micro-batch of the step; a later one than those
                handed out is read ahead.
        """
        while len(self._lengths) <= number:
            self._ahead.append(self._read())
        return self._lengths[number]

    def take_statistics(self) -> BatchStatistics:
        """Counts of all data-parallel ranks since the last call; a collective call."""
        taken, self.statistics = self.statistics, BatchStatistics()
        return taken.reduced(self.source.environment.accelerator.device)

    def check_metadata(self, num_microbatches: int) -> None:
        """Compare the next micro-batches' boundaries over all ranks of this model replica.

        A collective call with `--check-packing-metadata`, and nothing without. The batches are
        read before the step: inside it, pipeline stages would wait for each other.

        Args:
            num_microbatches: micro-batches of the step on this rank.

        Raises:
            TrainingError: on every rank, when one has other boundaries.
        """
        group = self.source.environment.host_model_group
        if group is None:
            return
        self._read_ahead(num_microbatches)
        for number, batch in enumerate(self._ahead):
            assert isinstance(batch, PackedBatch)  # the flag needs --use-packed-sequence
            first = self.consumed_samples + number * self.samples_per_micro_batch
            what = f"iteration {self.iteration}, micro-batch {number} (samples from {first} on)"
            assert_same_metadata(batch.packed_seq_params, group, what)

    def normalise(self, num_microbatches: int) -> None:
        """Learn what the losses of the next step are divided by; a collective call.

        Args:
            num_microbatches: micro-batches of the step on this rank.
        """
        self._read_ahead(num_microbatches)
        self.scales = global_scales(
            self._ahead,
            self.source.environment.accelerator.device,
            parallel_state.get_data_parallel_group(),
        )

    def _read_ahead(self, num_microbatches: int) -> None:
        while len(self._ahead) < num_microbatches:
            self._ahead.append(self._read())

    def state_dict(self) -> dict[str, Any]:
        """Where to go on after the micro-batches handed out so far, as plain numbers and lists.

        It holds for any number of data-parallel ranks and workers. `packing` is None for rows,
        which the number of consumed samples describes, and on ranks that read no data: save
        global rank 0's.
        """
        if self._mark is not None and self.consumed_samples == self._mark.consumed_samples:
            return self._mark.state  # of the loader, which is ahead once batches were put back
        packing = None
        if isinstance(self.source.loader, PackBatches):
            packing = self.source.loader.state_dict()
        return {"consumed_samples": self.consumed_samples, "packing": packing}

    def packer_summary(self) -> str | None:
        """What the packer did so far; None without one, or where no data is read."""
        loader = self.source.loader
        return loader.summary() if isinstance(loader, PackBatches) else None
