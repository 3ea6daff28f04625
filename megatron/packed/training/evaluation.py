"""Evaluation: global sums over global counts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron.packed.training.batches import MicroBatchIterator
from megatron.packed.training.pipeline import StepShape, forward_backward
from megatron.packed.training.step import forward_step, reduce_reports


@dataclass(frozen=True)
class EvaluationResult:
    """Loss on held-out data.

    Attributes:
        loss: mean over all supervised tokens of all batches and ranks; NaN if there was none.
        tokens: how many tokens that were.
    """

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(loss), with upstream's cap on the exponent; NaN if the loss is."""
        return math.exp(min(self.loss, 20.0))


@torch.no_grad()
def evaluate(
    model: list[DistributedDataParallel],
    batches: MicroBatchIterator,
    shape: StepShape,
    *,
    num_iterations: int,
    num_microbatches: int,
) -> EvaluationResult:
    """Measure the loss without training.

    Args:
        model: wrapped chunks of this rank.
        batches: held-out micro-batches of this rank.
        shape: shape of a micro-batch.
        num_iterations: global batches to average over.
        num_microbatches: micro-batches of each on this rank.

    Returns:
        The result, equal on every rank.
    """
    for chunk in model:
        chunk.eval()
    device = batches.source.environment.accelerator.device
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for _ in range(num_iterations):
        batches.check_metadata(num_microbatches)
        reports = forward_backward(
            forward_step, model, batches, shape, num_microbatches, forward_only=True
        )
        total += reduce_reports(reports, device)
    for chunk in model:
        chunk.train()
    loss_sum, count = total.tolist()
    return EvaluationResult(loss=loss_sum / count if count else float("nan"), tokens=int(count))
