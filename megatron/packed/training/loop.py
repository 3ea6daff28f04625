"""The training loop: steps, reports, evaluations."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.num_microbatches_calculator import (
    get_num_microbatches,
    init_num_microbatches_calculator,
)

from megatron.packed.arguments import Config
from megatron.packed.arguments.stages import stages_of
from megatron.packed.model.builder import sum_over_parameters
from megatron.packed.training.batches import MicroBatchIterator, pack_alignment, pack_capacity
from megatron.packed.training.environment import Environment, print_rank_0
from megatron.packed.training.evaluation import evaluate
from megatron.packed.training.pipeline import StepShape
from megatron.packed.training.reporting import Reporter
from megatron.packed.training.step import TrainStep


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        iteration: finished iterations.
        consumed_samples: samples trained on by all ranks.
        data: `Splits.state_dict()` at that point, where training goes on; None plans what was
            consumed again.
    """

    iteration: int = 0
    consumed_samples: int = 0
    data: dict[str, Any] | None = None


@dataclass(frozen=True)
class HeldOut:
    """Micro-batches to evaluate on.

    Attributes:
        key: in saved states, such as `valid`.
        name: in logs, such as `validation`.
        batches: micro-batches of this rank.
        iterations: global batches of one evaluation.
    """

    key: str
    name: str
    batches: MicroBatchIterator
    iterations: int


@dataclass(frozen=True)
class Splits:
    """Micro-batches of each split.

    Attributes:
        train: of training.
        valid: sets to validate on, one by one; empty where there is none.
        test: for the test after training; empty where there is none.
    """

    train: MicroBatchIterator
    valid: tuple[HeldOut, ...] = ()
    test: tuple[HeldOut, ...] = ()

    def iterators(self) -> dict[str, MicroBatchIterator]:
        """All micro-batches, by the key of their state."""
        held_out = {each.key: each.batches for each in (*self.valid, *self.test)}
        return {"train": self.train, **held_out}

    def state_dict(self) -> dict[str, Any]:
        """Where each split goes on, for `Progress.data`: small, plain, the same for any layout.

        Take it between steps. Ranks that read no data lack the packers' states: save rank 0's.
        """
        return {name: batches.state_dict() for name, batches in self.iterators().items()}


def step_shape(config: Config, transformer_config: object) -> StepShape:
    """Shape of a micro-batch; packs without a fixed capacity differ in theirs."""
    stages = stages_of(config)
    if not config.packing.use_packed_sequence:
        return StepShape(config.data.seq_length, config.training.micro_batch_size, stages)
    capacity = pack_capacity(config, pack_alignment(config))
    if capacity is None:
        transformer_config.variable_seq_lengths = True  # type: ignore[attr-defined]
        capacity = config.training.micro_batch_size * config.data.seq_length
    return StepShape(capacity, 1, stages)


@torch.no_grad()
def parameters_norm(model: list[DistributedDataParallel], device: torch.device) -> float:
    """L2 norm of all parameters, each counted once."""
    return math.sqrt(
        sum_over_parameters(model, lambda parameter: parameter.double().square().sum(), device)
    )


@dataclass
class Trainer:
    """One run from its first step to its last evaluation.

    Attributes:
        config: the run's configuration.
        environment: what this process stands on.
        step: the training step.
        splits: the data.
        reporter: the log.
        progress: where the run is.
    """

    config: Config
    environment: Environment
    step: TrainStep
    splits: Splits
    reporter: Reporter
    progress: Progress = field(default_factory=Progress)

    def train(self) -> None:
        """Run the remaining iterations, with periodic evaluation."""
        training, evaluation = self.config.training, self.config.evaluation
        print_rank_0(f"training from iteration {self.progress.iteration + 1}")
        self.reporter.restart_clock()
        while self.progress.iteration < training.train_iters:
            self._train_one()
            iteration = self.progress.iteration
            if self.splits.valid and iteration % evaluation.eval_interval == 0:
                measured = self.reporter.pause_clock()
                self._evaluate(self.splits.valid, f"iteration {iteration}")
                self.reporter.resume_clock(measured)
            if training.exit_interval and iteration % training.exit_interval == 0:
                print_rank_0(f"exiting program at iteration {iteration}")
                break

    def _train_one(self) -> None:
        batches, progress = self.splits.train, self.progress
        batches.iteration = progress.iteration + 1
        batch_size = self.config.training.global_batch_size
        batches.check_metadata(get_num_microbatches())
        result = self.step(batches, get_num_microbatches(), batch_size)
        progress.iteration += 1
        progress.consumed_samples += batch_size
        # As upstream logs it: the rate that the schedule has arrived at.
        learning_rate = self._learning_rate()
        if not result.loss_count:
            print_rank_0(
                f"iteration {progress.iteration}: no supervised token in the global batch, "
                "update skipped"
            )
        self.reporter.record(result, progress.iteration, progress.consumed_samples, learning_rate)
        if progress.iteration % self.config.logging.log_interval == 0:
            norm = None
            if self.config.logging.log_params_norm:
                device = self.environment.accelerator.device
                norm = parameters_norm(self.step.model, device)
            self.reporter.report(
                progress.iteration,
                progress.consumed_samples,
                learning_rate,
                batches.take_statistics(),
                norm,
            )
            if packer := batches.packer_summary():
                print_rank_0(f"   packer | so far: {packer} |")

    def _learning_rate(self) -> float:
        for group in self.step.optimizer.param_groups:
            if group.get("default_config", True) and not group.get("is_decoupled_lr", False):
                return float(group["lr"])
        return float(self.config.optimization.lr)

    def _evaluate(self, held_out: tuple[HeldOut, ...], where: str) -> None:
        config = evaluation_config(self.config)
        training = config.training
        replicas = config.parallel.data_parallel_size
        for each in held_out:
            each.batches.restart()
            result = evaluate(
                self.step.model,
                each.batches,
                step_shape(config, self.step.transformer_config),
                num_iterations=each.iterations,
                num_microbatches=training.global_batch_size
                // (training.micro_batch_size * replicas),
            )
            progress = self.progress
            self.reporter.report_evaluation(
                result, each.name, where, progress.iteration, progress.consumed_samples
            )

    def evaluate_final(self) -> None:
        """Evaluate what the run ends with, on validation and test data."""
        where = f"the end of training, iteration {self.progress.iteration}"
        self._evaluate(self.splits.valid, where)
        self._evaluate(self.splits.test, where)
        self.reporter.close()


def evaluation_config(config: Config) -> Config:
    """What evaluations run with: the configuration with their batch sizes for training's."""
    evaluation = config.evaluation
    return config.with_values(
        {
            "global_batch_size": evaluation.eval_global_batch_size,
            "micro_batch_size": evaluation.eval_micro_batch_size,
        }
    )


def start_microbatch_calculator(config: Config) -> None:
    """Tell megatron-core how a global batch is cut."""
    init_num_microbatches_calculator(
        rank=config.parallel.rank,
        rampup_batch_size=None,
        global_batch_size=config.training.global_batch_size,
        micro_batch_size=config.training.micro_batch_size,
        data_parallel_size=config.parallel.data_parallel_size,
    )
