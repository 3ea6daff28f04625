"""What losses of a step are divided by: counts of the global batch, known before its first forward.

megatron-core divides all gradients once, by the supervised tokens of the global batch. An objective
that is divided by something else, weights of documents or the targets of a deeper prediction, is
scaled by the ratio of the two beforehand. The counts stand in the plans of the micro-batches, on
the host: one small sum over data-parallel ranks makes them global.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.packed.packing import PackedBatch
from megatron.packed.training.sharing import HostBatch


@dataclass(frozen=True)
class Scales:
    """Ratios of a global batch, on the device: reading them would wait for it.

    Attributes:
        objective: float64 scalar, supervised tokens over the sum of their weights.
        depths: float64 `[K]`, supervised tokens over the targets of each deeper prediction.
    """

    objective: torch.Tensor
    depths: torch.Tensor


def counts_of(batch: HostBatch) -> NDArray[np.float64]:
    """Supervised tokens, their weight, and targets of depth 1, 2, ..: float64 `[2 + K]`.

    They are those of all context-parallel ranks, the same on each.
    """
    if isinstance(batch, PackedBatch):
        params = batch.packed_seq_params
        targets = params.segment_targets.sum(axis=1)
        weight = np.dot(params.segment_targets[0], params.token_weights_host)
        return np.array([targets[0], weight, *targets[1:]], dtype=np.float64)
    tokens = batch.supervised_tokens
    return np.array([tokens, tokens, *batch.mtp_targets], dtype=np.float64)


def global_scales(
    batches: Iterable[HostBatch], device: torch.device, group: torch.distributed.ProcessGroup
) -> Scales:
    """The ratios of the global batch that these micro-batches are this replica's part of.

    A collective call. Where there is nothing to divide by, a ratio is 0: then no such loss exists.

    Args:
        batches: all micro-batches of the step on this rank.
        device: where the ratios are wanted and the collective runs.
        group: data-parallel ranks, without context parallelism.
    """
    counts = torch.from_numpy(np.sum([counts_of(batch) for batch in batches], axis=0))
    counts = counts.to(device, non_blocking=True)
    if group.size() > 1:
        torch.distributed.all_reduce(counts, group=group)
    others = counts[1:]
    ratios = torch.where(others > 0, counts[0] / others.clamp(min=1e-300), 0.0)
    return Scales(objective=ratios[0], depths=ratios[1:])
