"""From collated batches to what the model's forward takes, on every rank that needs it.

Tensor-parallel rank 0 of every pipeline stage reads the data; its peers receive the batch over
the host group before it moves to the device. So every stage, the middle ones too, has tokens,
positions and boundaries, and no step waits for a device to learn a shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from megatron.packed.arguments import Config
from megatron.packed.data.bshd import BshdBatch, BshdCollator
from megatron.packed.packing import Alignment, PackedBatch, build_pack_plan
from megatron.packed.training.environment import Environment

# No token has this id: rows say by position what is padding.
_NO_PAD_ID = -1


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
    """

    packs: int = 0
    segments: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    supervised_tokens: int = 0
    sum_squared_lengths: int = 0

    def add(self, other: BatchStatistics) -> None:
        """Add counts of other micro-batches."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def reduced(self, device: torch.device) -> BatchStatistics:
        """The sum over data-parallel ranks; a collective call."""
        counts = [getattr(self, each.name) for each in fields(self)]
        total = torch.tensor(counts, dtype=torch.int64, device=device)
        torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return BatchStatistics(*total.tolist())


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass takes. B is 1 and S is T for a pack.

    Attributes:
        tokens: int64 [B, S].
        labels: int64 [B, S].
        loss_mask: float32 [B, S].
        position_ids: int64 [B, S].
        attention_mask: None, or int32 [n + 1] segment boundaries in the flattened rows.
        packed_seq_params: boundaries of a pack; None for rows.
        statistics: counts of this micro-batch.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    packed_seq_params: PackedSeqParams | None
    statistics: BatchStatistics


@dataclass(frozen=True)
class PackingCollator:
    """Turns the rows of a micro-batch into one pack; runs in the data-loader workers.

    Attributes:
        eod_id: id that ends a document.
        alignment: multiples that the parallel layout needs.
        capacity: tokens every pack is padded to, so that pipeline stages know its shape.
    """

    eod_id: int
    alignment: Alignment
    capacity: int | None

    def __call__(self, samples: list[dict[str, Any]]) -> PackedBatch:
        """Pack samples `{"text": int64 [S + 1], "length": int}`."""
        rows = np.stack([sample["text"] for sample in samples])
        plan = build_pack_plan(
            rows[:, :-1],
            self.eod_id,
            _NO_PAD_ID,
            extra_token=rows[:, -1],
            row_lengths=np.array([sample["length"] for sample in samples]),
            alignment=self.alignment,
            capacity=self.capacity,
        )
        return PackedBatch.from_plan(plan, rows)


def pack_capacity(config: Config, alignment: Alignment) -> int | None:
    """Tokens of every pack, or None where segments are padded one by one.

    Rows of a micro-batch hold at most micro-batch-size * seq-length tokens, so that many, rounded
    up to the layout's multiple, always suffices when only the pack's end is padded.
    """
    if alignment.segment != 1:
        return None
    slots = config.training.micro_batch_size * config.data.seq_length
    return slots + (-slots) % alignment.pack_multiple


def pack_alignment(config: Config) -> Alignment:
    """The alignment that this run's layout needs."""
    return Alignment.for_layout(
        cp_size=config.parallel.context_parallel_size,
        tp_size=config.parallel.tensor_model_parallel_size,
        sequence_parallel=config.parallel.sequence_parallel,
        mode=config.packing.packing_alignment,
    )


def build_collator(config: Config, eod_id: int) -> PackingCollator | BshdCollator:
    """The collator that `--use-packed-sequence` asks for, or the one for rows."""
    if config.packing.use_packed_sequence:
        alignment = pack_alignment(config)
        return PackingCollator(eod_id, alignment, pack_capacity(config, alignment))
    data = config.data
    return BshdCollator(
        eod_id,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
    )


def _from_pack(batch: PackedBatch) -> MicroBatch:
    counts = batch.statistics
    return MicroBatch(
        tokens=batch.tokens,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        position_ids=batch.position_ids,
        attention_mask=None,
        packed_seq_params=batch.packed_seq_params,
        statistics=BatchStatistics(
            packs=1,
            segments=counts.num_segments,
            real_tokens=counts.real_tokens,
            padded_tokens=counts.padded_tokens,
            supervised_tokens=counts.supervised_tokens,
            sum_squared_lengths=counts.sum_squared_lengths,
        ),
    )


def _from_rows(batch: BshdBatch, block_diagonal: bool) -> MicroBatch:
    lengths = torch.diff(batch.cu_seqlens).long()
    return MicroBatch(
        tokens=batch.tokens,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        position_ids=batch.position_ids,
        attention_mask=batch.cu_seqlens if block_diagonal else None,
        packed_seq_params=None,
        statistics=BatchStatistics(
            packs=1,
            segments=len(lengths),
            real_tokens=batch.real_tokens,
            padded_tokens=batch.tokens.numel() - batch.real_tokens,
            supervised_tokens=int(torch.count_nonzero(batch.loss_mask)),
            sum_squared_lengths=int((lengths * lengths).sum()),
        ),
    )


@dataclass(frozen=True)
class BatchSource:
    """How this rank gets its batches.

    Attributes:
        loader: collated batches on tensor-parallel rank 0; None on its peers.
        environment: device and host group.
        block_diagonal: rows attend inside their segments only (`--reset-attention-mask`).
    """

    loader: Iterator[PackedBatch | BshdBatch] | None
    environment: Environment
    block_diagonal: bool

    def read(self) -> PackedBatch | BshdBatch:
        """The next batch, on the host, equal on all tensor-parallel ranks."""
        group = self.environment.host_tp_group
        holder = [None if self.loader is None else next(self.loader)]
        if group.size() > 1:
            source = torch.distributed.get_global_rank(group, 0)
            torch.distributed.broadcast_object_list(holder, src=source, group=group)
        batch = holder[0]
        if batch is None:
            raise StopIteration
        return batch


@dataclass
class MicroBatchIterator:
    """Micro-batches of this rank, with a count of what they held since the last report.

    Attributes:
        source: where batches come from.
        consumed_samples: samples trained on by all ranks before the current step.
        iteration: number of the current step, from 1.
        statistics: counts since `take_statistics`.
    """

    source: BatchSource
    consumed_samples: int = 0
    iteration: int = 0
    statistics: BatchStatistics = field(default_factory=BatchStatistics)

    def __iter__(self) -> MicroBatchIterator:
        return self

    def __next__(self) -> MicroBatch:
        batch = self.source.read()
        on_device = batch.to(self.source.environment.accelerator.device, non_blocking=True)
        if isinstance(on_device, PackedBatch):
            micro_batch = _from_pack(on_device)
        else:
            micro_batch = _from_rows(on_device, self.source.block_diagonal)
        self.statistics.add(micro_batch.statistics)
        return micro_batch

    def take_statistics(self) -> BatchStatistics:
        """Counts of all data-parallel ranks since the last call; a collective call."""
        taken, self.statistics = self.statistics, BatchStatistics()
        return taken.reduced(self.source.environment.accelerator.device)
