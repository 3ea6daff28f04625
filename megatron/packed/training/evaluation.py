"""Evaluation: global sums over global counts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron.packed.loss.calculation import LM_LOSS
from megatron.packed.training.batches import MicroBatchIterator
from megatron.packed.training.pipeline import StepShape, forward_backward
from megatron.packed.training.step import ForwardStep, by_name, reduce_reports


@dataclass(frozen=True)
class EvaluationResult:
    """Loss on held-out data.

    Attributes:
        loss: mean over all supervised tokens of all batches and ranks; NaN if there was none.
        tokens: how many tokens that were.
        others: means of whatever else is measured, by name; none of it over nothing.
    """

    loss: float
    tokens: int
    others: dict[str, float] = field(default_factory=dict)

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
    forward: ForwardStep,
    num_iterations: int,
    num_microbatches: int,
) -> EvaluationResult:
    """Measure the loss without training.

    Args:
        model: wrapped chunks of this rank.
        batches: held-out micro-batches of this rank.
        shape: shape of a micro-batch.
        forward: a micro-batch and its loss.
        num_iterations: global batches to average over.
        num_microbatches: micro-batches of each on this rank.

    Returns:
        The result, equal on every rank.
    """
    for chunk in model:
        chunk.eval()
    device = batches.source.environment.accelerator.device
    names = forward.loss.report_names
    total = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
    for _ in range(num_iterations):
        batches.check_metadata(num_microbatches)
        reports = forward_backward(
            forward, model, batches, shape, num_microbatches, forward_only=True
        )
        total += reduce_reports(reports, names, device)
    for chunk in model:
        chunk.train()
    totals = by_name(total, names)
    loss_sum, count = totals.pop(LM_LOSS)
    return EvaluationResult(
        loss=loss_sum / count if count else float("nan"),
        tokens=int(count),
        others={name: total / weight for name, (total, weight) in totals.items() if weight},
    )
