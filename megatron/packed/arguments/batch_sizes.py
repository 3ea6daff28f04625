"""How many samples each step takes: constant, rising in steps, or ramped up."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from megatron.packed.errors import ConfigurationError

if TYPE_CHECKING:
    from megatron.packed.arguments.config import Config

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_STEP = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<suffix>[KMBT]?):(?P<size>\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class BatchSizes:
    """Global batch sizes over a run.

    Attributes:
        starts: Consumed samples from which on each size holds, ascending from 0.
        sizes: Samples of a step.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def last(self) -> int:
        """The size that holds in the end."""
        return self.sizes[-1]

    def at(self, consumed: int) -> int:
        """Samples of the step that begins after some were consumed.

        Args:
            consumed: Samples of all steps before.
        """
        return self.sizes[bisect_right(self.starts, consumed) - 1]

    def iterations(self, samples: int) -> int:
        """Whole steps that a number of samples is enough for.

        Args:
            samples: Samples of the whole run.
        """
        count = consumed = 0
        for size, steps in self._phases():
            fitting = max(0, samples - consumed) // size
            taken = fitting if steps is None else min(steps, fitting)
            count, consumed = count + taken, consumed + taken * size
            if steps is None or taken < steps:
                break
        return count

    def samples(self, iterations: int) -> int:
        """Samples that a number of steps consumes.

        Args:
            iterations: Steps from the start of the run.
        """
        consumed = 0
        for size, steps in self._phases():
            taken = iterations if steps is None else min(steps, iterations)
            consumed, iterations = consumed + taken * size, iterations - taken
        return consumed

    def _phases(self) -> Iterator[tuple[int, int | None]]:
        """(size, steps of that size) in order; None is for ever. A step begun is finished."""
        consumed = 0
        for (_, end), size in zip(pairwise(self.starts), self.sizes, strict=False):
            steps = -(-max(0, end - consumed) // size)
            consumed += steps * size
            yield size, steps
        yield self.sizes[-1], None


def batch_sizes(config: Config) -> BatchSizes:
    """Return the sizes that a configuration asks for.

    Args:
        config: With its derived fields, or before they are filled in.

    Raises:
        ConfigurationError: The flag that describes them can't be read.
    """
    schedule, training = config.schedule, config.training
    if schedule.step_batch_size_schedule is not None:
        return parse_steps(schedule.step_batch_size_schedule, config.data.seq_length)
    size = training.global_batch_size or training.micro_batch_size * max(
        1, config.parallel.data_parallel_size
    )
    if schedule.rampup_batch_size is not None:
        return ramp_up(schedule.rampup_batch_size, size)
    return BatchSizes((0,), (size,))


def parse_steps(text: str, seq_length: int) -> BatchSizes:
    """Read `--step-batch-size-schedule`.

    Args:
        text: `tokens:size` pairs, as in "0:384 200B:768"; K, M, B and T are powers of 1,000.
        seq_length: Tokens of a sample.

    Raises:
        ConfigurationError: It is something else, or doesn't ascend from 0.
    """
    starts, sizes = [], []
    for word in text.split():
        match = _STEP.fullmatch(word)
        if match is None or int(match["size"]) < 1:
            raise ConfigurationError(
                f"{word!r}: must be tokens:samples, as in 200B:768, with K, M, B or T"
            )
        tokens = float(match["number"]) * _SUFFIXES[match["suffix"].upper()]
        starts.append(int(tokens) // seq_length)
        sizes.append(int(match["size"]))
    if not starts or starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
        raise ConfigurationError("must start with 0:samples, and go on with more and more tokens")
    return BatchSizes(tuple(starts), tuple(sizes))


def ramp_up(values: tuple[int, ...], last: int) -> BatchSizes:
    """Read `--rampup-batch-size`.

    Args:
        values: First size, increment, and samples until the last size is reached.
        last: `--global-batch-size`.

    Raises:
        ConfigurationError: They don't lead to the last size.
    """
    if len(values) != 3 or min(values) < 1:
        raise ConfigurationError("must be three positive numbers: start, increment, samples")
    first, increment, samples = values
    steps, rest = divmod(last - first, increment)
    if steps < 1 or rest:
        raise ConfigurationError(
            f"increments of {increment} must lead from {first} to --global-batch-size {last}"
        )
    starts = tuple(-(-samples * step // steps) for step in range(steps + 1))
    return BatchSizes(starts, tuple(first + increment * step for step in range(steps + 1)))
