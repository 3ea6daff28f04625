"""One training step: forward and backward over the micro-batches, then the update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config

from megatron.packed.errors import TrainingError
from megatron.packed.loss.calculation import LM_LOSS, OBJECTIVE, LossCalculationHelper
from megatron.packed.model.mtp import DeeperTargets
from megatron.packed.packing.batch import PackedSeqParamsWithValidTokens
from megatron.packed.training.batches import MicroBatch, MicroBatchIterator
from megatron.packed.training.document_losses import DocumentLosses
from megatron.packed.training.expert_losses import ExpertLosses, collect_expert_losses
from megatron.packed.training.pipeline import StepShape, forward_backward
from megatron.packed.training.reruns import Reruns, StepRejected

Totals = dict[str, tuple[float, float]]
"""(sum, count) by name, over the global batch."""


@dataclass
class GradientFinalizer:
    """megatron-core's finalize_model_grads, with a watch on counts and local gradients.

    Attributes:
        check_local_gradients: look for NaN and Inf before gradients of different ranks are mixed.
        on_local_gradients: called when this rank's own work on a step is done.
        on_local_norm: called with the L2 norm of this rank's gradients, before any is reduced.
        num_tokens: supervised tokens of the global batch, known once a step's gradients are
            final; None when the loss isn't normalised per token.
        local_gradients_finite: outcome of the check for this rank.
    """

    check_local_gradients: bool
    on_local_gradients: Callable[[], None] | None = None
    on_local_norm: Callable[[torch.Tensor], None] | None = None
    num_tokens: torch.Tensor | None = None
    local_gradients_finite: bool = True

    def __call__(
        self,
        model: list[DistributedDataParallel],
        num_tokens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        """Finalize, as a `finalize_model_grads_func`."""
        if self.on_local_gradients is not None:
            self.on_local_gradients()
        if self.check_local_gradients:
            self.local_gradients_finite = all(
                bool(torch.isfinite(buffer.grad_data.sum()))
                for chunk in model
                for buffer in chunk.buffers + chunk.expert_parallel_buffers
            )
        if self.on_local_norm is not None:
            self.on_local_norm(_local_norm(model))
        finalize_model_grads(model, num_tokens, **kwargs)
        # All-reduced in place over data- and context-parallel ranks.
        self.num_tokens = num_tokens


def _local_norm(model: list[DistributedDataParallel]) -> torch.Tensor:
    norms = [
        torch.linalg.vector_norm(buffer.grad_data, dtype=torch.float32)
        for chunk in model
        for buffer in chunk.buffers + chunk.expert_parallel_buffers
    ]
    return torch.linalg.vector_norm(torch.stack(norms))


@dataclass(frozen=True)
class StepResult:
    """What one step did; equal on every rank.

    Attributes:
        loss_sum: sum of supervised losses over the global batch.
        loss_count: supervised tokens of the global batch.
        grad_norm: norm before clipping; None when the update was skipped.
        num_zeros_in_grad: zero entries of the gradient, if counted.
        updated: whether the weights moved.
        reports: (sum, count) over the global batch of whatever else is reported.
        expert_losses: losses of the routers; none in a dense model.
        loss_scale: factor on the losses that gradients were computed of.
        decoupled_learning_rate: of embedding and output layer, where it is another one.
        samples: of the global batch.
        bad: what was not finite and where, if the batch was skipped for it.
    """

    loss_sum: float
    loss_count: float
    grad_norm: float | None
    num_zeros_in_grad: float | None
    updated: bool
    reports: Totals = field(default_factory=dict)
    expert_losses: ExpertLosses = field(default_factory=ExpertLosses)
    loss_scale: float = 1.0
    decoupled_learning_rate: float | None = None
    samples: int = 0
    bad: str | None = None

    @property
    def loss(self) -> float:
        """Mean loss per supervised token; NaN when there is none."""
        return self.loss_sum / self.loss_count if self.loss_count else float("nan")


@dataclass(frozen=True)
class ForwardStep:
    """One micro-batch forward and its loss; megatron-core's schedules call this.

    Attributes:
        loss: from per-token losses to the objective.
        documents: keeps the losses of documents; None where nobody asks.
        on_micro_batch: called as each begins.
        on_loss: called in training with the sum and the count of each.
    """

    loss: LossCalculationHelper = field(default_factory=LossCalculationHelper)
    documents: DocumentLosses | None = None
    on_micro_batch: Callable[[], None] | None = None
    on_loss: Callable[[torch.Tensor, torch.Tensor], None] | None = None

    @property
    def needs_scales(self) -> bool:
        """Whether losses are divided by something else than supervised tokens."""
        return self.loss.weighted or self.loss.mtp_depths > 0

    def __call__(
        self, batches: MicroBatchIterator, model: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        """Run one micro-batch; returns the output, and what makes the loss of it."""
        if self.on_micro_batch is not None:
            self.on_micro_batch()
        batch = next(batches)
        config = get_model_config(model)
        more: dict[str, Any] = {}
        if config.num_moe_experts is not None:
            more["padding_mask"] = batch.token_slots()
        deeper = batch.deeper_targets()
        if deeper is not None:
            more["mtp"] = deeper
        output = model(
            batch.tokens,
            batch.position_ids,
            batch.attention_mask,
            labels=batch.labels,
            loss_mask=batch.loss_mask,
            packed_seq_params=batch.packed_seq_params,
            **more,
        )
        per_token = config.calculate_per_token_loss
        return output, partial(self._loss_function, batch, deeper, per_token)

    def _loss_function(
        self,
        batch: MicroBatch,
        deeper: DeeperTargets | None,
        per_token: bool,
        losses: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """What the schedules take: sum, count, and what is reported.

        Without a loss per token, they divide each micro-batch by its own count and average over
        context-parallel ranks too: then the count is that of all these ranks, and the average a
        sum.
        """
        loss = self.loss.compute_loss(
            losses,
            batch.packed_seq_params,
            batch.loss_mask,
            scale=None if batch.scales is None else batch.scales.objective,
            mtp_reports=() if deeper is None else deeper.reports,
        )
        if self.on_loss is not None and torch.is_grad_enabled():
            self.on_loss(loss.total, loss.count)
        if self.documents is not None and torch.is_grad_enabled():
            params = batch.packed_seq_params
            # The loss of a run with this log keeps the sums.
            assert loss.document_sums is not None
            assert isinstance(params, PackedSeqParamsWithValidTokens)
            self.documents.add(loss.document_sums, params)
        if per_token or batch.cp_size == 1:
            return loss.total, loss.count, loss.reports
        count = torch.full_like(loss.count, batch.statistics.supervised_tokens)
        return loss.total * batch.cp_size, count, loss.reports


def reduce_reports(
    reports: list[dict[str, torch.Tensor]], names: tuple[str, ...], device: torch.device
) -> torch.Tensor:
    """Add (sum, count) pairs over micro-batches and ranks.

    Args:
        reports: what the loss function reported; empty except on the last pipeline stage.
        names: what it reports, the same on every rank.
        device: where collectives run.

    Returns:
        float64 [names, 2], the same on every rank.
    """
    total = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
    for report in reports:
        total += torch.stack([report[name].double() for name in names])
    torch.distributed.all_reduce(
        total, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        torch.distributed.broadcast(
            total,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
    return total


def by_name(totals: torch.Tensor, names: tuple[str, ...]) -> Totals:
    """Reduced reports as plain numbers; waits for the device.

    Args:
        totals: float64 [names, 2].
        names: of the rows.
    """
    rows = totals.tolist()
    return {name: (total, count) for name, (total, count) in zip(names, rows, strict=True)}


@contextmanager
def naming_lost_ranks(batches: MicroBatchIterator) -> Iterator[None]:
    """Say in which iteration another rank was lost, whatever was waiting for it.

    Raises:
        TrainingError: in place of what the communication library says.
    """
    where = f"iteration {batches.iteration}"
    try:
        yield
    except StepRejected:
        raise
    except TrainingError as error:
        raise TrainingError(f"{where}: {error}") from error
    except RuntimeError as error:
        text = str(error)
        if not isinstance(error, torch.distributed.DistError) and "gloo" not in text:
            raise
        raise TrainingError(
            f"{where}: rank {torch.distributed.get_rank()} lost another rank in a collective; look "
            f"for the first error in the logs of the others ({text.splitlines()[0]})"
        ) from error


def _of_chunks(functions: list[Any]) -> Any:
    """One for each chunk, as megatron-core's schedules take it: a single one without a list."""
    return functions if len(functions) > 1 else functions[0]


@dataclass
class TrainStep:
    """Everything one step needs, assembled once.

    Attributes:
        model: wrapped chunks of this rank.
        optimizer: megatron-core's optimizer.
        scheduler: learning-rate and weight-decay schedules.
        transformer_config: the configuration the schedules read their hooks from.
        shape: shape of a micro-batch.
        device: device of this rank.
        check_for_nan: stop on NaN or Inf instead of training on.
        forward: a micro-batch and its loss.
        error_on_empty: stop at a global batch without a supervised token instead of skipping it.
        adapts_loss_scale: gradients that overflow skip the update and lower the loss scale;
            only the loss itself is checked then.
        reruns: runs a step again that looks wrong; None where nobody looks.
        skips_left: batches with NaN or Inf that may still be left out instead of stopping.
        before_update: called before weights and optimizer change; None where nobody waits.
    """

    model: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    transformer_config: TransformerConfig
    shape: StepShape
    device: torch.device
    check_for_nan: bool
    forward: ForwardStep = field(default_factory=ForwardStep)
    error_on_empty: bool = False
    adapts_loss_scale: bool = False
    reruns: Reruns | None = None
    skips_left: int = 0
    before_update: Callable[[], None] | None = None
    finalizer: GradientFinalizer = field(init=False)

    def __post_init__(self) -> None:
        self.finalizer = GradientFinalizer(self.check_for_nan and not self.adapts_loss_scale)
        self.transformer_config.finalize_model_grads_func = self.finalizer
        self.transformer_config.grad_scale_func = self.optimizer.scale_loss
        if self.model[0].ddp_config.overlap_grad_reduce:
            # Gradients go out with the last micro-batch, chunk by chunk on all stages at once.
            self.transformer_config.no_sync_func = _of_chunks([c.no_sync for c in self.model])
            self.transformer_config.grad_sync_func = _of_chunks(
                [c.start_grad_sync for c in self.model]
            )
        if self.reruns is not None:
            self.finalizer.on_local_norm = self.reruns.check_gradients
            self.forward = replace(self.forward, on_loss=self.reruns.check_loss)

    def __call__(
        self, batches: MicroBatchIterator, num_microbatches: int, global_batch_size: int
    ) -> StepResult:
        """Train on one global batch.

        Args:
            batches: this rank's micro-batches.
            num_microbatches: how many of them make up the step.
            global_batch_size: samples of the step over all ranks.

        Returns:
            Losses, norms and statistics of the step.

        Raises:
            TrainingError: NaN or Inf in the loss or the gradients, with `check_for_nan`; nothing
                to train on, with `error_on_empty`; another rank that was lost.
            StepRejected: results that `reruns` doesn't trust.
        """
        with naming_lost_ranks(batches):
            for _ in [None] if self.reruns is None else self.reruns.attempts(batches):
                reports = self._forward_backward(batches, num_microbatches)
            names = self.forward.loss.report_names
            totals = by_name(reduce_reports(reports, names, self.device), names)
            expert_losses = collect_expert_losses(
                self.model, self.transformer_config, num_microbatches, self.device
            )
        loss_sum, loss_count = totals.pop(LM_LOSS)
        bad = self._look_for_nan(loss_sum, batches, global_batch_size)
        updated, grad_norm, num_zeros = False, None, None
        # Documents that all weigh nothing are no batch to train on, either.
        weighed = bool(loss_count and totals.get(OBJECTIVE, (0.0, 1.0))[1])
        trainable = weighed and bad is None
        if self.error_on_empty and not weighed:
            raise TrainingError(
                f"iteration {batches.iteration}: no supervised token in the global batch, and "
                "--on-empty-batch is error; look at its samples "
                f"{self._samples(batches, global_batch_size)}, or use --on-empty-batch skip"
            )
        loss_scale = float(self.optimizer.get_loss_scale())
        if trainable:
            if self.before_update is not None:
                self.before_update()
            with naming_lost_ranks(batches):
                updated, grad_norm, num_zeros = self.optimizer.step()
        if updated or not trainable:  # as upstream, an overflow takes no step of the schedules
            self.scheduler.step(increment=global_batch_size)
        return StepResult(
            loss_sum=loss_sum,
            loss_count=loss_count,
            grad_norm=None if grad_norm is None else float(grad_norm),
            num_zeros_in_grad=None if num_zeros is None else float(num_zeros),
            updated=bool(updated),
            reports=totals,
            expert_losses=expert_losses,
            loss_scale=loss_scale,
            decoupled_learning_rate=self._decoupled_learning_rate(),
            samples=global_batch_size,
            bad=bad,
        )

    def _forward_backward(
        self, batches: MicroBatchIterator, num_microbatches: int
    ) -> list[dict[str, torch.Tensor]]:
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self.forward.needs_scales:
            batches.normalise(num_microbatches)
        return forward_backward(
            self.forward, self.model, batches, self.shape, num_microbatches, forward_only=False
        )

    @staticmethod
    def _samples(batches: MicroBatchIterator, global_batch_size: int) -> str:
        """The samples of the step that has just read its batches."""
        first = batches.consumed_samples - global_batch_size
        return f"{first}..{first + global_batch_size - 1}"

    def _decoupled_learning_rate(self) -> float | None:
        for group in self.optimizer.param_groups:
            if not group.get("default_config", True):
                return float(group["lr"])
        return None

    def _look_for_nan(
        self, loss_sum: float, batches: MicroBatchIterator, global_batch_size: int
    ) -> str | None:
        """Stop every rank when one has a NaN or Inf; name it and the samples it trained on.

        Returns:
            The same in words, where the batch may be skipped instead.
        """
        if not self.check_for_nan:
            return None
        bad = torch.zeros(torch.distributed.get_world_size(), device=self.device)
        bad[torch.distributed.get_rank()] = float(not self.finalizer.local_gradients_finite)
        torch.distributed.all_reduce(bad)
        ranks = torch.nonzero(bad).flatten().tolist()
        if math.isfinite(loss_sum) and not ranks:
            return None
        where = f"samples {self._samples(batches, global_batch_size)}"
        if ranks:
            replicas = [parallel_state.get_data_parallel_rank()] * len(bad)
            torch.distributed.all_gather_object(replicas, replicas[0])
            listed = "; ".join(f"rank {r}, data-parallel rank {replicas[r]}" for r in ranks)
            where += f", gradients of {listed}"
        if self.skips_left:
            self.skips_left -= 1
            return where
        raise TrainingError(
            f"NaN or Inf at iteration {batches.iteration}: {where}; lower --lr, look at the data "
            "of these samples, or pass --no-check-for-nan-in-loss-and-grad to train on"
        )
