"""Which samples this data-parallel rank reads next: a pure function of (seed, consumed samples).

A global batch is a run of consecutive positions of the sample order. It is cut into groups of
`micro_batch_size * data_parallel_size` positions, and rank r takes `[r * mbs, (r + 1) * mbs)` of
each. So the samples of a global batch don't depend on how many ranks share them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy
from torch.utils.data import Sampler

from megatron.packed.errors import ConfigurationError, DataError


class SampleOrder(Protocol):
    """A sequence of sample indices, addressed by position."""

    @property
    def limit(self) -> int | None:
        """Positions there are; None for no end."""

    def indices(self, start: int, stop: int) -> list[int]:
        """Sample indices at positions `[start, stop)`."""


@dataclass(frozen=True)
class SequentialOrder:
    """Every sample once, in order (`--dataloader-type single`).

    Args:
        total_samples: samples of the dataset.
    """

    total_samples: int

    @property
    def limit(self) -> int | None:
        """All samples."""
        return self.total_samples

    def indices(self, start: int, stop: int) -> list[int]:
        """Sample indices at positions `[start, stop)`."""
        return list(range(start, stop))


@dataclass(frozen=True)
class RepeatedOrder:
    """Every sample in order, again and again: what evaluation reads, however often it runs.

    Args:
        total_samples: samples of the dataset.
    """

    total_samples: int

    @property
    def limit(self) -> int | None:
        """No end."""
        return None

    def indices(self, start: int, stop: int) -> list[int]:
        """Sample indices at positions `[start, stop)`."""
        return [place % self.total_samples for place in range(start, stop)]


@dataclass(frozen=True)
class WholeOrder:
    """Every sample once, then -1, no sample, up to a whole number of batches.

    Args:
        total_samples: samples of the dataset.
        batch: samples that are read together.
    """

    total_samples: int
    batch: int

    @property
    def limit(self) -> int | None:
        """Whole batches."""
        return -(-self.total_samples // self.batch) * self.batch

    def indices(self, start: int, stop: int) -> list[int]:
        """Sample indices at positions `[start, stop)`."""
        return [place if place < self.total_samples else -1 for place in range(start, stop)]


class ShuffledOrder:
    """Epoch after epoch without end, each shuffled anew (`--dataloader-type cyclic`).

    Unlike upstream's, the order depends on neither the micro-batch size nor the number of ranks,
    drops no sample at an epoch's end, and follows `--seed`.

    Args:
        total_samples: samples of the dataset.
        seed: `--seed`.
    """

    def __init__(self, total_samples: int, seed: int) -> None:
        self.total_samples = total_samples
        self.seed = seed
        self._epoch = -1
        self._permutation = numpy.empty(0, dtype=numpy.int64)

    @property
    def limit(self) -> int | None:
        """No end."""
        return None

    def indices(self, start: int, stop: int) -> list[int]:
        """Sample indices at positions `[start, stop)`."""
        result: list[int] = []
        while start < stop:
            epoch, offset = divmod(start, self.total_samples)
            taken = min(stop - start, self.total_samples - offset)
            result += self._shuffled(epoch)[offset : offset + taken].tolist()
            start += taken
        return result

    def _shuffled(self, epoch: int) -> numpy.ndarray:
        if epoch != self._epoch:
            # RandomState's streams are frozen by numpy's promise; Generator's are not.
            bits = numpy.random.MT19937(numpy.random.SeedSequence([self.seed, epoch]))
            self._permutation = numpy.random.RandomState(bits).permutation(self.total_samples)
            self._epoch = epoch
        return self._permutation


class MicroBatchSampler(Sampler[list[int]]):
    """Micro-batches of sample indices for one data-parallel rank.

    Args:
        order: the order all ranks share.
        consumed_samples: positions already trained on, over all ranks.
        micro_batch_size: samples of one micro-batch on one rank.
        data_parallel_rank: this rank.
        data_parallel_size: data-parallel ranks.
        drop_last: leave out a last group that can't fill every rank; otherwise each rank gets its
            part of it, which may be short or, at the end of the order, missing.

    Raises:
        ConfigurationError: if a size is below 1 or the rank out of range.
        DataError: if no sample is left.
    """

    def __init__(
        self,
        order: SampleOrder,
        *,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        drop_last: bool = True,
    ) -> None:
        if micro_batch_size < 1 or data_parallel_size < 1:
            raise ConfigurationError(
                f"--micro-batch-size {micro_batch_size} and data-parallel size "
                f"{data_parallel_size} must be at least 1"
            )
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise ConfigurationError(
                f"data-parallel rank {data_parallel_rank} is outside [0, {data_parallel_size})"
            )
        if consumed_samples < 0:
            raise ConfigurationError(f"consumed samples are {consumed_samples}; at least 0 needed")
        if order.limit is not None and consumed_samples >= order.limit:
            raise DataError(
                f"no sample left: {consumed_samples} of {order.limit} are consumed already; "
                "raise --train-iters or use --dataloader-type cyclic"
            )
        self.order = order
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank = data_parallel_rank
        self.group_size = micro_batch_size * data_parallel_size
        self.drop_last = drop_last

    def __len__(self) -> int:
        if self.order.limit is None:
            raise TypeError("a cyclic order has no length")
        left = self.order.limit - self.consumed_samples
        full, rest = divmod(left, self.group_size)
        begins = self.data_parallel_rank * self.micro_batch_size
        return full + int(not self.drop_last and rest > begins)

    def __iter__(self) -> Iterator[list[int]]:
        limit = self.order.limit
        group = self.consumed_samples
        begins = self.data_parallel_rank * self.micro_batch_size
        while limit is None or group + self.group_size <= limit:
            start = group + begins
            yield self.order.indices(start, start + self.micro_batch_size)
            group += self.group_size
        start = group + begins
        if not self.drop_last and start < limit:
            yield self.order.indices(start, min(start + self.micro_batch_size, limit))


def build_sampler(
    dataloader_type: str,
    total_samples: int,
    *,
    seed: int,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    drop_last: bool = True,
    whole_batch: int = 1,
) -> MicroBatchSampler:
    """Build the sampler that `--dataloader-type` names.

    Args:
        dataloader_type: "single" or "cyclic"; for evaluation "repeated" or "whole".
        total_samples: samples of the dataset.
        seed: `--seed`; read by "cyclic" alone, "single" datasets are shuffled when built.
        consumed_samples: positions already trained on, over all ranks.
        micro_batch_size: samples of one micro-batch on one rank.
        data_parallel_rank: this rank.
        data_parallel_size: data-parallel ranks.
        drop_last: see MicroBatchSampler.
        whole_batch: samples that "whole" fills up to a multiple of.

    Returns:
        The sampler.

    Raises:
        ConfigurationError: if the type is unknown or a size is wrong.
        DataError: if the dataset is empty or no sample is left.
    """
    if total_samples < 1:
        raise DataError("the dataset holds no sample; check --data-path and --split")
    order: SampleOrder
    match dataloader_type:
        case "single":
            order = SequentialOrder(total_samples)
        case "repeated":
            order = RepeatedOrder(total_samples)
        case "whole":
            order = WholeOrder(total_samples, whole_batch)
        case "cyclic":
            order = ShuffledOrder(total_samples, seed)
        case _:
            raise ConfigurationError(
                f"--dataloader-type {dataloader_type} must be one of single, cyclic"
            )
    return MicroBatchSampler(
        order,
        consumed_samples=consumed_samples,
        micro_batch_size=micro_batch_size,
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=data_parallel_size,
        drop_last=drop_last,
    )
