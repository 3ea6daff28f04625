"""Batch sizes over a run, against a loop over its steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.packed.arguments import config_from_flags
from megatron.packed.arguments.batch_sizes import BatchSizes, batch_sizes, parse_steps, ramp_up
from megatron.packed.errors import ConfigurationError

from .flags import MINIMAL


@st.composite
def schedules(draw) -> BatchSizes:
    gaps = draw(st.lists(st.integers(1, 50), max_size=4))
    starts = [0]
    for gap in gaps:
        starts.append(starts[-1] + gap)
    sizes = draw(st.lists(st.integers(1, 20), min_size=len(starts), max_size=len(starts)))
    return BatchSizes(tuple(starts), tuple(sizes))


@given(schedules(), st.integers(0, 400))
def test_steps_and_samples_agree_with_a_loop(sizes: BatchSizes, samples: int) -> None:
    consumed = steps = 0
    while consumed + sizes.at(consumed) <= samples:
        consumed += sizes.at(consumed)
        steps += 1
    assert sizes.iterations(samples) == steps
    assert sizes.samples(steps) == consumed


def test_a_size_holds_from_its_start_on() -> None:
    sizes = BatchSizes((0, 10, 30), (4, 8, 16))
    assert [sizes.at(n) for n in (0, 9, 10, 29, 30, 999)] == [4, 4, 8, 8, 16, 16]


def test_steps_are_written_in_tokens() -> None:
    assert parse_steps("0:384 200B:768 1.5T:1152", 4096) == BatchSizes(
        (0, 200 * 10**9 // 4096, 15 * 10**11 // 4096), (384, 768, 1152)
    )
    assert parse_steps("0:4 1k:8", 100) == BatchSizes((0, 10), (4, 8))


@pytest.mark.parametrize("text", ["", "4", "0:x", "1:4", "0:4 0:8", "0:4 200:8 100:9", "0:0"])
def test_steps_that_are_none(text: str) -> None:
    with pytest.raises(ConfigurationError):
        parse_steps(text, 1)


def test_a_ramp_reaches_the_last_size_with_its_samples() -> None:
    sizes = ramp_up((16, 8, 300), 48)
    assert sizes == BatchSizes((0, 75, 150, 225, 300), (16, 24, 32, 40, 48))
    # As upstream computes it from the consumed samples.
    for consumed in range(400):
        expected = 48 if consumed > 300 else 16 + 8 * int(consumed / (300 / 4))
        assert sizes.at(consumed) == expected


@pytest.mark.parametrize("values", [(16, 8), (16, 8, 0), (16, 7, 100), (64, 8, 100)])
def test_a_ramp_that_leads_elsewhere(values: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError):
        ramp_up(values, 48)


def test_a_run_counted_in_samples() -> None:
    flags = MINIMAL.replace("--train-iters 100", "")
    config = config_from_flags(f"{flags} --train-samples 101 --global-batch-size 4")
    assert config.training.train_iters == 25
    stepped = config_from_flags(
        f"{flags} --train-samples 40 --step-batch-size-schedule '0:4 1024:8'"
    )
    assert batch_sizes(stepped).sizes == (4, 8)
    assert stepped.training.global_batch_size == 8
    assert stepped.training.train_iters == 2 + 4
    assert stepped.sources["train_iters"] == "derived"
