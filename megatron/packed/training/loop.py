"""The training loop: steps, reports, evaluations."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_num_microbatches,
    init_num_microbatches_calculator,
    reconfigure_num_microbatches_calculator,
)

from megatron.packed.arguments import Config
from megatron.packed.arguments.batch_sizes import batch_sizes
from megatron.packed.arguments.stages import stages_of
from megatron.packed.model.builder import sum_over_parameters
from megatron.packed.training.checkpointing import CheckpointSaver
from megatron.packed.training.collation import pack_alignment, pack_capacity
from megatron.packed.training.environment import Environment, print_rank_0
from megatron.packed.training.evaluation import evaluate
from megatron.packed.training.garbage import GarbageCollection
from megatron.packed.training.pipeline import StepShape
from megatron.packed.training.progress import HeldOut, Progress, Splits, evaluation_config
from megatron.packed.training.replicas import check_replicas, gathered_parameters
from megatron.packed.training.reporting import Reporter
from megatron.packed.training.reruns import StepRejected
from megatron.packed.training.signals import SignalWatch, true_on_any_rank
from megatron.packed.training.step import TrainStep
from megatron.packed.training.timers import timers_report
from megatron.packed.training.watch import RunWatch


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
    with gathered_parameters(model):
        squares = sum_over_parameters(model, lambda each: each.double().square().sum(), device)
    return math.sqrt(squares)


_PROGRAM_START = time.monotonic()


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
        saver: writes checkpoints; None without `--save`.
        signals: knows whether the run was asked to end; None without `--exit-signal-handler`.
        garbage: when Python's garbage is collected.
        watch: looks for signs of life; None where nobody looks.
    """

    config: Config
    environment: Environment
    step: TrainStep
    splits: Splits
    reporter: Reporter
    progress: Progress = field(default_factory=Progress)
    saver: CheckpointSaver | None = None
    signals: SignalWatch | None = None
    garbage: GarbageCollection = GarbageCollection()
    watch: RunWatch | None = None
    _step_start: float = 0.0

    def train(self) -> None:
        """Run the remaining iterations, with periodic evaluation."""
        with self._watched():
            self._train()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Have every micro-batch and save show signs of life to the watch."""
        if self.watch is None:
            yield
            return
        forward = self.step.forward
        self.step.forward = replace(forward, on_micro_batch=lambda: self._beat("micro-batch"))
        if self.watch.stragglers is not None:
            self.step.finalizer.on_local_gradients = self._count_own_work
        with self.watch.hang.watching():
            yield
        self.step.forward = forward

    def _beat(self, phase: str) -> None:
        if self.watch is not None:
            progress = self.progress
            self.watch.beat(phase, progress.iteration, progress.consumed_samples)

    def _count_own_work(self) -> None:
        """Measure what this rank did of a step before it waits for the others."""
        assert self.watch is not None and self.watch.stragglers is not None
        if self.environment.accelerator.name == "cuda":
            torch.cuda.synchronize()
        self.watch.stragglers.add(time.perf_counter() - self._step_start)

    def _train(self) -> None:
        training, evaluation = self.config.training, self.config.evaluation
        print_rank_0(f"training from iteration {self.progress.iteration + 1}")
        self.reporter.restart_clock()
        self.garbage.start()
        if self.progress.evaluation_pending and self.splits.valid:
            self._evaluate_beside_training()
            self.progress.evaluation_pending = False
        while self.progress.iteration < training.train_iters:
            self._train_one()
            iteration = self.progress.iteration
            due = bool(self.splits.valid) and iteration % evaluation.eval_interval == 0
            if self._asked_to_end():
                self.progress.evaluation_pending = due
                self._say_why_it_ends()
                break
            if due:
                self._evaluate_beside_training()
            self._save_if_due()
            self.garbage.after_step(iteration)
            if self._time_is_up():
                print_rank_0(
                    f"exiting program after --exit-duration-in-mins, iteration {iteration}"
                )
                break
            if training.exit_interval and iteration % training.exit_interval == 0:
                print_rank_0(f"exiting program at iteration {iteration}")
                break
        self._save_last()
        self.garbage.stop()

    def _evaluate_beside_training(self) -> None:
        measured = self.reporter.pause_clock()
        self.garbage.around_evaluation()
        self._evaluate(self.splits.valid, f"iteration {self.progress.iteration}")
        self.garbage.around_evaluation()
        self.reporter.resume_clock(measured)

    def _asked_to_end(self) -> bool:
        """Whether a signal reached any rank; with it, in one collective call, what else any
        rank decides: an asynchronous save that none still writes is taken on.
        """
        questions = {}
        if self.signals is not None:
            questions["end"] = self.signals.received is not None
        if self.saver is not None and self.saver.in_flight:
            questions["writing"] = self.saver.is_writing
        answers = true_on_any_rank(questions, self.environment.accelerator.device)
        if self.saver is not None and not answers.get("writing", True):
            self.saver.advance()
        return answers.get("end", False)

    def _say_why_it_ends(self) -> None:
        assert self.signals is not None
        received = self.signals.received
        name = received.name if received is not None else "a signal on another rank"
        kept = "saving" if self.saver is not None else "without --save, nothing is saved"
        print_rank_0(
            f"{name}: ending after iteration {self.progress.iteration}, {kept}; exit code 0"
        )

    def _time_is_up(self) -> bool:
        """Whether the program has run for as long as it may, by any rank's clock."""
        limit = self.config.schedule.exit_duration_in_mins
        if limit is None:
            return False
        late = time.monotonic() - _PROGRAM_START > 60.0 * limit
        return true_on_any_rank({"late": late}, self.environment.accelerator.device)["late"]

    def _save_if_due(self) -> None:
        """Begin the next checkpoint where one is due."""
        if self.saver is None:
            return
        interval = self.config.checkpoint.save_interval
        if interval and self.progress.iteration % interval == 0:
            self._save(self.saver)

    def _save_last(self) -> None:
        """Leave a whole checkpoint of where the run ends."""
        if self.saver is None:
            return
        if self.saver.saved_iteration != self.progress.iteration:
            self._save(self.saver)
        self.saver.wait()

    def _save(self, saver: CheckpointSaver) -> None:
        measured = self.reporter.pause_clock()
        self._beat("saving")
        saver.save(self.progress)
        self._beat("saved")
        self.reporter.resume_clock(measured)

    def _train_one(self) -> None:
        batches, progress = self.splits.train, self.progress
        batches.iteration = progress.iteration + 1
        batch_size = batch_sizes(self.config).at(progress.consumed_samples)
        num_microbatches = cut_batch(self.config, batch_size)
        self._beat("step")
        if self.step.reruns is not None and self.step.reruns.enabled:
            batches.mark()
        batches.check_metadata(num_microbatches)
        self._step_start = time.perf_counter()
        try:
            result = self.step(batches, num_microbatches, batch_size)
        except StepRejected as rejected:
            if rejected.save and self.saver is not None:
                self._save(self.saver)  # the run as it was before this step
                self.saver.wait()
            raise
        progress.iteration += 1
        progress.consumed_samples += batch_size
        interval = self.config.optimizer_options.check_weight_hash_across_dp_replicas_interval
        if interval and progress.iteration % interval == 0:
            check_replicas(self.step.model, progress.iteration)
        # As upstream logs it: the rate that the schedule has arrived at.
        learning_rate = self._learning_rate()
        if result.bad is not None:
            progress.bad_batches += 1
            print_rank_0(
                f"iteration {progress.iteration}: NaN or Inf, update skipped ({result.bad}); bad "
                f"batch {progress.bad_batches} of {self.config.faults.skip_bad_batches} "
                "(--skip-bad-batches)"
            )
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
            timed = timers_report(self.step.transformer_config, self.config.logging.log_interval)
            if timed:
                print_rank_0(timed)
            if self.watch is not None and self.watch.stragglers is not None:
                for line in self.watch.stragglers.report():
                    print_rank_0(line)
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
                forward=self.step.forward,
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
        with self._watched():
            for held_out in (self.splits.valid, self.splits.test):
                if held_out and not self._asked_to_end():
                    self._evaluate(held_out, where)
        self.reporter.close()


def start_microbatch_calculator(config: Config) -> None:
    """Tell megatron-core how a global batch is cut."""
    init_num_microbatches_calculator(**_calculator(config, config.training.global_batch_size))


def cut_batch(config: Config, batch_size: int) -> int:
    """Micro-batches of a step on each replica; megatron-core is told where the size changes.

    Args:
        config: the run's configuration.
        batch_size: samples of the step.
    """
    if get_current_global_batch_size() != batch_size:
        reconfigure_num_microbatches_calculator(**_calculator(config, batch_size))
    return get_num_microbatches()


def _calculator(config: Config, batch_size: int) -> dict[str, Any]:
    return {
        "rank": config.parallel.rank,
        "rampup_batch_size": None,
        "global_batch_size": batch_size,
        "micro_batch_size": config.training.micro_batch_size,
        "data_parallel_size": config.parallel.data_parallel_size,
    }
