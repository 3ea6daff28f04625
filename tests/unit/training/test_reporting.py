from __future__ import annotations

import math
import re
import sys
import types
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.packed.errors import ConfigurationError, DataError
from megatron.packed.training.batches import BatchStatistics
from megatron.packed.training.evaluation import EvaluationResult
from megatron.packed.training.expert_losses import ExpertLosses
from megatron.packed.training.flops import FlopsCounter
from megatron.packed.training.reporting import Reporter
from megatron.packed.training.step import StepResult
from megatron.packed.training.writers import ScalarWriters, open_writers

from .flags import config

STATISTICS = BatchStatistics(
    packs=8,
    segments=20,
    real_tokens=1000,
    padded_tokens=24,
    supervised_tokens=980,
    sum_squared_lengths=60000,
    data_seconds=0.5,
)
OK = StepResult(10.0, 4.0, 1.25, None, True)
EMPTY = StepResult(0.0, 0.0, None, None, False)
NAN = StepResult(math.nan, 4.0, math.nan, None, True)


class Recorder:
    """A writer that remembers."""

    def __init__(self) -> None:
        self.points: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.points.append((name, value, step))

    def close(self) -> None:
        """Nothing is held back."""

    @property
    def names(self) -> set[str]:
        return {name for name, _, _ in self.points}


def _reporter(flags: str = "", writers: list[Any] | None = None) -> Reporter:
    return Reporter(
        config=config(flags),
        flops=FlopsCounter(per_token=100, per_pair=10),
        gemm_peak=1e9,
        writers=ScalarWriters(writers or []),
        device=torch.device("cpu"),
    )


def _lines(
    capsys: pytest.CaptureFixture[str], steps: list[StepResult], flags: str = "", norm: Any = None
) -> list[str]:
    reporter = _reporter(flags)
    for iteration, step in enumerate(steps, start=1):
        reporter.record(step, iteration, 8 * iteration, 1e-3)
    reporter.report(len(steps), 8 * len(steps), 1e-3, STATISTICS, norm)
    return capsys.readouterr().out.splitlines()


def test_losses_of_experts_are_logged_by_upstreams_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    steps = [
        StepResult(10.0, 4.0, 1.0, None, True, expert_losses=ExpertLosses({"z_loss": values}, 2))
        for values in ((0.0, 1.0, 3.0), (0.0, 2.0, 4.0))
    ]
    line = _lines(capsys, steps)[0]
    assert "lm loss: 2.500000E+00 | z_loss: 2.500000E+00 | loss scale" in line
    recorder = Recorder()
    flags = "--num-experts 2 --moe-per-layer-logging --tensorboard-log-interval 1"
    _reporter(flags, [recorder]).record(steps[0], 1, 8, 1e-3)
    assert ("z_loss", 2.0, 1) in recorder.points
    assert ("moe/z_loss_layer_2", 3.0, 1) in recorder.points
    recorder = Recorder()
    _reporter("--num-experts 2 --tensorboard-log-interval 1", [recorder]).record(
        steps[0], 1, 8, 1e-3
    )
    assert not any(name.startswith("moe/") for name in recorder.names)


def test_iteration_line_as_upstream_writes_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Field order and formats, with every optional field on."""
    step = StepResult(10.0, 4.0, 1.25, 17.0, True, samples=8)
    line = _lines(capsys, [step, step], "--log-throughput", norm=12.5)[0]
    assert re.fullmatch(
        r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] iteration        2/     100 \| "
        r"consumed samples:           16 \| elapsed time per iteration \(ms\): \d+\.\d \| "
        r"throughput per GPU \(TFLOP/s/GPU\): \d+\.\d{3} \| learning rate: 1\.000000E-03 \| "
        r"global batch size:     8 \| lm loss: 2\.500000E\+00 \| loss scale: 1\.0 \| "
        r"grad norm: 1\.250 \| num zeros: 17 \| params norm: 12\.500 \| "
        r"number of skipped iterations:   0 \| number of nan iterations:   0 \|",
        line,
    )


def test_interval_loss_is_a_mean_over_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    steps = [StepResult(10.0, 4.0, 1.0, None, True), StepResult(90.0, 16.0, 2.0, None, True)]
    line = _lines(capsys, steps)[0]
    assert "lm loss: 5.000000E+00" in line
    assert "grad norm: 2.000" in line  # the last one's
    assert "throughput per GPU" not in line and "zeros" not in line and "params" not in line


def test_skipped_and_nan_iterations_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    line = _lines(capsys, [OK, EMPTY, EMPTY, OK])[0]
    assert "lm loss: 2.500000E+00" in line
    assert "skipped iterations:   2 | number of nan iterations:   0 |" in line
    assert "nan iterations:   1 |" in _lines(capsys, [OK, NAN])[0]
    line = _lines(capsys, [EMPTY])[0]
    assert "lm loss" not in line and "grad norm" not in line


def test_an_interval_starts_anew(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = _reporter()
    for step in (EMPTY, OK):
        reporter.record(step, 1, 8, 1e-3)
        reporter.report(1, 8, 1e-3, STATISTICS, None)
    first, second = (line for line in capsys.readouterr().out.splitlines() if "[" in line)
    assert "skipped iterations:   1" in first and "skipped iterations:   0" in second


def test_packing_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Per iteration, but segments per pack; FLOPs from the sum of squares."""
    line = _lines(capsys, [OK, OK])[1]
    for part in (
        "segments per pack: 2.5",
        "real tokens: 500",
        "padded tokens: 12",
        "fill: 97.66 %",
        "supervised tokens: 490",
        "sum of squared lengths: 30000",
        "of 1 GFLOP/s",
    ):
        assert f"{part} |" in line


def test_throughput(monkeypatch: pytest.MonkeyPatch) -> None:
    reporter = _reporter()
    reporter.record(OK, 1, 8, 1e-3)
    reporter.record(OK, 2, 16, 1e-3)
    reporter._since = 10.0
    monkeypatch.setattr("time.perf_counter", lambda: 14.0)
    speed = reporter._throughput(STATISTICS)
    assert speed.seconds_per_iteration == 2.0
    assert speed.tokens_per_second == 250.0
    assert speed.flops_per_rank == (1000 * 100 + (60000 + 1000) // 2 * 10) / 4.0
    assert speed.mfu == speed.flops_per_rank / 1e9
    assert speed.data_share == 0.125


def test_what_is_kept_of_steps_does_not_grow_with_them() -> None:
    """A run whose log interval never ends would hold every step for ever."""
    reporter = _reporter()
    steps = [StepResult(1.0, 4.0, 1.25, None, True, reports={"mtp": (1.0, 2.0)}) for _ in range(64)]
    for iteration, step in enumerate(steps, start=1):
        reporter.record(step, iteration, 8 * iteration, 1e-3)
    held = [weakref.ref(step) for step in steps]
    steps.clear()
    del step
    assert sum(each() is not None for each in held) == 1  # the last one


def test_the_clock_leaves_evaluations_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    reporter = _reporter()
    reporter.restart_clock()
    now[0] = 2.0
    measured = reporter.pause_clock()
    now[0] = 50.0
    reporter.resume_clock(measured)
    now[0] = 51.0
    reporter.record(OK, 1, 8, 1e-3)
    assert reporter._throughput(STATISTICS).seconds_per_iteration == 3.0


def test_tensorboard_names(capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder()
    flags = (
        "--log-throughput --log-timers-to-tensorboard --log-validation-ppl-to-tensorboard "
        "--log-num-zeros-in-grad --log-params-norm"
    )
    reporter = _reporter(flags, [recorder])
    reporter.record(StepResult(10.0, 4.0, 1.25, 17.0, True, samples=8), 3, 24, 5e-4)
    reporter.report(3, 24, 5e-4, STATISTICS, 12.5)
    reporter.report_evaluation(EvaluationResult(2.0, 64), "validation", "iteration 3", 3, 24)
    points = {name: (value, step) for name, value, step in recorder.points}
    for name, value, step in (
        ("lm loss", 2.5, 3),
        ("lm loss vs samples", 2.5, 24),
        ("grad-norm", 1.25, 3),
        ("grad-norm vs samples", 1.25, 24),
        ("learning-rate", 5e-4, 3),
        ("learning-rate vs samples", 5e-4, 24),
        ("batch-size", 8, 3),
        ("num-zeros", 17.0, 3),
        ("params-norm", 12.5, 3),
        ("lm loss validation", 2.0, 3),
        ("lm loss validation vs samples", 2.0, 24),
        ("lm loss validation ppl", math.exp(2.0), 3),
    ):
        assert points[name] == (pytest.approx(value), step), name
    assert {"iteration-time", "throughput"} <= recorder.names
    assert points["data-time"] == (0.5, 3) and points["packing/fill"] == (1000 / 1024, 3)
    assert "validation loss at iteration 3 | lm loss value: 2.000000E+00" in capsys.readouterr().out


def test_tensorboard_leaves_out_what_there_is_not() -> None:
    recorder = Recorder()
    reporter = _reporter("--tensorboard-log-interval 2", [recorder])
    reporter.record(OK, 1, 8, 1e-3)
    assert not recorder.points
    reporter.record(EMPTY, 2, 16, 1e-3)
    assert recorder.names == {"learning-rate", "learning-rate vs samples", "batch-size"}


def test_tensorboard_files(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "deep" / "tensorboard"
    writers = open_writers(config(f"--tensorboard-dir {folder}"), rank=0)
    writers.add_scalar("lm loss", 2.5, 7)
    writers.close()
    events = EventAccumulator(str(folder)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("lm loss")] == [(7, 2.5)]
    assert not open_writers(config(f"--tensorboard-dir {folder}"), rank=1)


def test_tensorboard_folder_that_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "taken"
    path.write_text("")
    with pytest.raises(DataError, match=r"--tensorboard-dir .*taken.*another folder"):
        open_writers(config(f"--tensorboard-dir {path}"), rank=0)


def test_wandb_steps_never_fall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights & Biases drops points whose step is below the last one: iterations alone go there."""
    logged: list[tuple[dict[str, float], int]] = []
    run = types.SimpleNamespace(
        log=lambda values, step: logged.append((values, step)), finish=lambda: None
    )
    module = types.ModuleType("wandb")
    module.init = lambda **settings: run  # type: ignore[attr-defined]
    module.__spec__ = types.SimpleNamespace(name="wandb")  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "wandb", module)
    writers = open_writers(config("--wandb-project p --wandb-exp-name e"), rank=0)
    reporter = _reporter(writers=writers.writers)
    for iteration in (1, 2):
        reporter.record(OK, iteration, 8 * iteration, 1e-3)
        reporter.report_evaluation(EvaluationResult(2.0, 64), "validation", "x", iteration, 64)
    steps = [step for _, step in logged]
    assert steps == sorted(steps) and set(steps) == {1, 2}
    assert {"lm loss", "lm loss validation"} <= {name for values, _ in logged for name in values}


def test_wandb_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="--wandb-project p.*isn't installed"):
        open_writers(config("--wandb-project p --wandb-exp-name e"), rank=0)


def test_perplexity() -> None:
    assert EvaluationResult(2.0, 10).perplexity == pytest.approx(math.exp(2.0))
    assert EvaluationResult(500.0, 10).perplexity == pytest.approx(math.exp(20.0))
    assert math.isnan(EvaluationResult(math.nan, 0).perplexity)


def test_statistics_add_up() -> None:
    total = BatchStatistics()
    total.add(STATISTICS)
    total.add(BatchStatistics(1, 2, 3, 4, 5, 6))
    assert total == BatchStatistics(9, 22, 1003, 28, 985, 60006)
    assert total.data_seconds == 0.5
