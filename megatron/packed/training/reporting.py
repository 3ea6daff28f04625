"""The log: upstream's iteration line, packing statistics, TensorBoard."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import datetime

import torch

from megatron.packed.arguments import Config
from megatron.packed.training.batches import BatchStatistics
from megatron.packed.training.document_losses import DocumentLosses, DocumentLossFile
from megatron.packed.training.environment import print_rank_0
from megatron.packed.training.evaluation import EvaluationResult
from megatron.packed.training.flops import FlopsCounter
from megatron.packed.training.interval import Interval
from megatron.packed.training.memory import memory_counters
from megatron.packed.training.step import StepResult
from megatron.packed.training.writers import ScalarWriters


@dataclass(frozen=True)
class Throughput:
    """Speed over the iterations since the last line.

    Attributes:
        seconds_per_iteration: wall time.
        tokens_per_second: real tokens, all ranks.
        flops_per_rank: model FLOP/s of one process.
        mfu: share of the measured GEMM peak of one process.
        data_share: share of the time in which steps waited for their data.
    """

    seconds_per_iteration: float
    tokens_per_second: float
    flops_per_rank: float
    mfu: float
    data_share: float


@dataclass
class Reporter:
    """Collects steps and writes them out at the log interval.

    Attributes:
        config: the run's configuration.
        flops: operation counter of the model.
        gemm_peak: FLOP/s that one process reaches in a matrix product.
        writers: where curves go.
        device: device of this rank.
        documents: keeps the documents of the highest loss; None where nobody asks.
        document_file: where they go.
    """

    config: Config
    flops: FlopsCounter
    gemm_peak: float
    writers: ScalarWriters
    device: torch.device
    documents: DocumentLosses | None = None
    document_file: DocumentLossFile | None = None
    skipped_iterations: int = 0
    nan_iterations: int = 0
    _interval: Interval = field(default_factory=Interval)
    _since: float = field(default_factory=time.perf_counter)

    def record(
        self, step: StepResult, iteration: int, consumed_samples: int, learning_rate: float
    ) -> None:
        """Take in one step and write its TensorBoard entries."""
        self._interval.add(step)
        self.skipped_iterations += not step.updated
        self.nan_iterations += (
            step.bad is not None or step.loss_count > 0 and step.loss != step.loss
        )
        due = iteration % self.config.logging.tensorboard_log_interval == 0
        if self.writers and due:
            self._write_step(step, iteration, consumed_samples, learning_rate)

    def _write_step(
        self, step: StepResult, iteration: int, consumed_samples: int, learning_rate: float
    ) -> None:
        add = self.writers.add_scalar
        logging = self.config.logging
        if logging.log_learning_rate_to_tensorboard:
            add("learning-rate", learning_rate, iteration)
            add("learning-rate vs samples", learning_rate, consumed_samples)
        add("batch-size", step.samples, iteration)
        if step.loss_count:
            add("lm loss", step.loss, iteration)
            add("lm loss vs samples", step.loss, consumed_samples)
        for name, (total, count) in step.reports.items():
            if count:
                add(name, total / count, iteration)
                add(f"{name} vs samples", total / count, consumed_samples)
        for name, value in step.expert_losses.means().items():
            add(name, value, iteration)
        if self.config.moe.moe_per_layer_logging:
            for name, values in step.expert_losses.by_layer.items():
                for layer, value in enumerate(values):
                    add(f"moe/{name}_layer_{layer}", value, iteration)
        if step.grad_norm is not None:
            add("grad-norm", step.grad_norm, iteration)
            add("grad-norm vs samples", step.grad_norm, consumed_samples)
        if step.num_zeros_in_grad is not None:
            add("num-zeros", step.num_zeros_in_grad, iteration)
        if logging.log_world_size_to_tensorboard:
            add("world-size", self.config.parallel.world_size, iteration)
        if logging.log_memory_to_tensorboard:
            for name, value in memory_counters(self.device).items():
                add(name, value, iteration)

    def restart_clock(self) -> None:
        """Leave out what happened since the last line, an evaluation say, of the next timing."""
        self._since = time.perf_counter()

    def pause_clock(self) -> float:
        """Seconds measured so far, to be given back to `resume_clock`."""
        return time.perf_counter() - self._since

    def resume_clock(self, measured: float) -> None:
        """Go on from `pause_clock`."""
        self._since = time.perf_counter() - measured

    def _throughput(self, statistics: BatchStatistics) -> Throughput:
        seconds = time.perf_counter() - self._since
        operations = self.flops.count(
            statistics.real_tokens, statistics.sum_squared_lengths, statistics.windowed_pairs
        )
        per_rank = operations / seconds / self.config.parallel.world_size
        return Throughput(
            seconds_per_iteration=seconds / self._interval.steps,
            tokens_per_second=statistics.real_tokens / seconds,
            flops_per_rank=per_rank,
            mfu=per_rank / self.gemm_peak,
            data_share=statistics.data_seconds / seconds,
        )

    def report(
        self,
        iteration: int,
        consumed_samples: int,
        learning_rate: float,
        statistics: BatchStatistics,
        params_norm: float | None,
    ) -> None:
        """Print the lines of an interval and start the next one.

        Args:
            iteration: the last iteration of the interval.
            consumed_samples: samples trained on so far.
            learning_rate: of the last iteration.
            statistics: counts of the interval over all ranks.
            params_norm: L2 norm of the parameters, if asked for.
        """
        speed = self._throughput(statistics)
        print_rank_0(
            self._iteration_line(iteration, consumed_samples, learning_rate, speed, params_norm)
        )
        print_rank_0(self._packing_line(statistics, speed))
        if self.writers:
            self._write_interval(iteration, statistics, speed, params_norm)
        self._report_documents(iteration)
        self._interval = Interval()
        self.skipped_iterations = self.nan_iterations = 0
        self._since = time.perf_counter()

    def _report_documents(self, iteration: int) -> None:
        """Write the documents of the highest loss; a collective call where it does anything."""
        if self.documents is None or self.document_file is None:
            return
        entries = self.documents.take()
        if torch.distributed.get_rank() == 0:
            table = self.document_file.write(iteration, entries)
            self.writers.add_text("documents of highest loss", table, iteration)

    def _iteration_line(
        self,
        iteration: int,
        consumed_samples: int,
        learning_rate: float,
        speed: Throughput,
        params_norm: float | None,
    ) -> str:
        """Upstream's line: its fields, in its order and formats."""
        train_iters = self.config.training.train_iters
        interval = self._interval
        last = interval.last
        assert last is not None
        now = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
        parts = [
            f"[{now}] iteration {iteration:8d}/{train_iters:8d}",
            f"consumed samples: {consumed_samples:12d}",
            f"elapsed time per iteration (ms): {speed.seconds_per_iteration * 1000.0:.1f}",
        ]
        if self.config.logging.log_throughput:
            parts.append(f"throughput per GPU (TFLOP/s/GPU): {speed.flops_per_rank / 1e12:.3f}")
        parts.append(f"learning rate: {learning_rate:.6E}")
        if last.decoupled_learning_rate is not None:
            parts.append(f"decoupled learning rate: {last.decoupled_learning_rate:.6E}")
        parts += [
            f"global batch size: {last.samples:5d}",
        ]
        if interval.loss_count:
            parts.append(f"lm loss: {interval.loss_sum / interval.loss_count:.6E}")
        for name, (total, count) in interval.reports.items():
            if count:
                parts.append(f"{name}: {total / count:.6E}")
        for name, total in interval.expert_losses.items():
            parts.append(f"{name}: {total / interval.steps:.6E}")
        parts.append(f"loss scale: {last.loss_scale:.1f}")
        if last.grad_norm is not None:
            parts.append(f"grad norm: {last.grad_norm:.3f}")
        if last.num_zeros_in_grad is not None:
            parts.append(f"num zeros: {int(last.num_zeros_in_grad)}")
        if params_norm is not None:
            parts.append(f"params norm: {params_norm:.3f}")
        parts += [
            f"number of skipped iterations: {self.skipped_iterations:3d}",
            f"number of nan iterations: {self.nan_iterations:3d}",
        ]
        return " " + " | ".join(parts) + " |"

    def _packing_line(self, statistics: BatchStatistics, speed: Throughput) -> str:
        """What the batches of the interval held, per iteration, and how fast they went by."""
        steps = self._interval.steps
        packs = max(statistics.packs, 1)
        parts = [
            f"segments per pack: {statistics.segments / packs:.1f}",
            f"real tokens: {statistics.real_tokens // steps}",
            f"padded tokens: {statistics.padded_tokens // steps}",
            f"fill: {100.0 * statistics.fill:.2f} %",
            f"supervised tokens: {statistics.supervised_tokens // steps}",
            f"sum of squared lengths: {statistics.sum_squared_lengths // steps}",
            f"tokens/s: {speed.tokens_per_second:.0f}",
            f"model GFLOP/s per rank: {speed.flops_per_rank / 1e9:.1f}",
            f"MFU: {100.0 * speed.mfu:.1f} % of {self.gemm_peak / 1e9:.0f} GFLOP/s",
            f"data time: {100.0 * speed.data_share:.2f} %",
        ]
        return "   packing | " + " | ".join(parts) + " |"

    def _write_interval(
        self,
        iteration: int,
        statistics: BatchStatistics,
        speed: Throughput,
        params_norm: float | None,
    ) -> None:
        values = {
            "tokens-per-second": speed.tokens_per_second,
            "mfu": speed.mfu,
            "data-time": statistics.data_seconds / self._interval.steps,
            "packing/segments-per-pack": statistics.segments / max(statistics.packs, 1),
            "packing/real-tokens": statistics.real_tokens / self._interval.steps,
            "packing/padded-tokens": statistics.padded_tokens / self._interval.steps,
            "packing/fill": statistics.fill,
            "packing/supervised-tokens": statistics.supervised_tokens / self._interval.steps,
        }
        if self.config.logging.log_timers_to_tensorboard:
            values["iteration-time"] = speed.seconds_per_iteration
        if self.config.logging.log_throughput:
            values["throughput"] = speed.flops_per_rank / 1e12
        if params_norm is not None:
            values["params-norm"] = params_norm
        for name, value in values.items():
            self.writers.add_scalar(name, value, iteration)

    def report_evaluation(
        self, result: EvaluationResult, split: str, where: str, iteration: int, samples: int
    ) -> None:
        """Print an evaluation and write it to TensorBoard.

        Args:
            result: the losses.
            split: `validation` or `test`.
            where: what the line calls this point of the run.
            iteration: iterations trained.
            samples: samples trained.
        """
        line = (
            f" {split} loss at {where} | lm loss value: {result.loss:.6E} | "
            f"lm loss PPL: {result.perplexity:.6E} | "
        )
        line += "".join(f"{name} value: {mean:.6E} | " for name, mean in result.others.items())
        print_rank_0("-" * len(line))
        print_rank_0(line)
        print_rank_0("-" * len(line))
        add = self.writers.add_scalar
        add(f"lm loss {split}", result.loss, iteration)
        add(f"lm loss {split} vs samples", result.loss, samples)
        for name, mean in result.others.items():
            add(f"{name} {split}", mean, iteration)
            add(f"{name} {split} vs samples", mean, samples)
        if self.config.logging.log_validation_ppl_to_tensorboard:
            add(f"lm loss {split} ppl", result.perplexity, iteration)
            add(f"lm loss {split} ppl vs samples", result.perplexity, samples)

    def close(self) -> None:
        """Write out what the writers hold back."""
        self.writers.close()
