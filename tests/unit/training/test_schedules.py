from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from megatron.packed.training.optimization import build_scheduler

from .flags import config

BATCH, MAX, MIN = 8, 1e-3, 1e-4
Rate = Callable[[float], float]


def _run(flags: str, iterations: int) -> list[tuple[float, float]]:
    """(learning rate, weight decay) before the first iteration and after each one."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    scheduler = build_scheduler(config(flags), optimizer)
    group = optimizer.param_groups[0]
    seen = [(group["lr"], group["weight_decay"])]
    for _ in range(iterations):
        scheduler.step(increment=BATCH)
        seen.append((group["lr"], group["weight_decay"]))
    return seen


def _linear(progress: float) -> float:
    return MIN + (MAX - MIN) * (1 - progress)


def _cosine(progress: float) -> float:
    return MIN + (MAX - MIN) * 0.5 * (1 + math.cos(math.pi * progress))


@pytest.mark.parametrize(
    ("style", "rate"),
    [("constant", lambda progress: MAX), ("linear", _linear), ("cosine", _cosine)],
)
@pytest.mark.parametrize("warmup", [0, 10])
def test_decay_after_warm_up(style: str, rate: Rate, warmup: int) -> None:
    flags = f"--lr-decay-style {style} --min-lr {MIN} --lr-decay-iters 50 "
    for iteration, (lr, _) in enumerate(_run(f"{flags} --lr-warmup-iters {warmup}", 70)):
        if warmup and iteration <= warmup:
            expected = MAX * iteration / warmup
        elif iteration <= 50:
            expected = rate((iteration - warmup) / (50 - warmup))
        else:
            expected = MAX if style == "constant" else MIN
        assert lr == pytest.approx(expected, rel=1e-12), iteration


def test_warm_up_by_fraction_and_from_a_start() -> None:
    by_number = _run("--lr-warmup-iters 10 --lr-decay-iters 50", 60)
    by_share = _run("--lr-warmup-fraction 0.2 --lr-decay-iters 50", 60)
    assert by_share == by_number
    rising = _run("--lr-warmup-iters 10 --lr-warmup-init 2e-4", 10)
    assert [lr for lr, _ in rising] == pytest.approx([2e-4 + 8e-5 * i for i in range(11)])


def test_decay_lasts_the_run_by_default() -> None:
    rates = [lr for lr, _ in _run(f"--lr-decay-style linear --min-lr {MIN}", 100)]
    assert rates == pytest.approx([_linear(i / 100) for i in range(101)])


def test_inverse_square_root() -> None:
    flags = "--lr-decay-style inverse-square-root --lr-warmup-iters 10"
    for iteration, (lr, _) in enumerate(_run(f"{flags} --min-lr {MIN}", 100)):
        expected = MAX * iteration / 10 if iteration <= 10 else MAX * math.sqrt(10 / iteration)
        assert lr == pytest.approx(max(expected, MIN if iteration > 10 else 0.0), rel=1e-12)


@pytest.mark.parametrize(
    ("style", "coefficient"),
    [
        ("linear", lambda x: 1 - x),
        ("cosine", lambda x: 0.5 * (1 + math.cos(math.pi * x))),
        ("exponential", lambda x: 2 * 0.5**x - 1),
        ("minus_sqrt", lambda x: 1 - math.sqrt(x)),
    ],
)
def test_warm_up_stable_decay(style: str, coefficient: Rate) -> None:
    flags = (
        f"--lr-decay-style WSD --lr-wsd-decay-style {style} --lr-wsd-decay-iters 20 "
        f"--lr-warmup-iters 5 --min-lr {MIN} --lr-decay-iters 80"
    )
    for iteration, (lr, _) in enumerate(_run(flags, 90)):
        if iteration <= 5:
            expected = MAX * iteration / 5
        elif iteration <= 60:
            expected = MAX
        else:
            expected = MIN + (MAX - MIN) * coefficient(min(1.0, (iteration - 60) / 20))
        assert lr == pytest.approx(expected, rel=1e-12), iteration


@pytest.mark.parametrize(
    ("style", "at"),
    [("linear", lambda x: x), ("cosine", lambda x: 0.5 * (1 - math.cos(math.pi * x)))],
)
def test_weight_decay_grows(style: str, at: Rate) -> None:
    flags = f"--weight-decay-incr-style {style} --start-weight-decay 0.01 --end-weight-decay 0.11"
    decays = [decay for _, decay in _run(flags, 110)]
    assert decays == pytest.approx([0.01 + 0.1 * at(min(1.0, i / 100)) for i in range(111)])


def test_weight_decay_stays() -> None:
    assert {decay for _, decay in _run("--weight-decay 0.07", 20)} == {0.07}
