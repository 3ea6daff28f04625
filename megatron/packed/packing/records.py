"""Where the segments of a pack come from: what the loss and its logs know of documents.

Host arrays, one entry a segment, that travel in the buffer of the micro-batch. A pack made
without them carries `SegmentRecords.unknown`: everything but losses of documents works.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

UNKNOWN = -1
INTEGER_FIELDS = ("datasets", "documents", "offsets", "targets")


@dataclass(frozen=True, eq=False)
class SegmentRecords:
    """One entry for each segment of a pack, in the order of its boundaries.

    Attributes:
        datasets: int64 `[n]`, number of the dataset in its blend; -1 where unknown.
        documents: int64 `[n]`, number of the document in that dataset; -1 where unknown.
        offsets: int64 `[n]`, where in its document the segment begins; -1 where unknown.
        targets: int64 `[n]`, positions of the whole stored document that are ever supervised, over
            all rows and packs it is spread over; -1 where unknown.
        weights: float64 `[n]`, the document's weight in the objective, at least 0.
    """

    datasets: Int64
    documents: Int64
    offsets: Int64
    targets: Int64
    weights: Float64

    def __post_init__(self) -> None:
        count = len(self.weights)
        for name in INTEGER_FIELDS:
            if getattr(self, name).shape != (count,):
                raise ValueError(f"{name}: needs one entry for each of {count} segments")
        if not np.all(np.isfinite(self.weights)) or np.any(self.weights < 0):
            raise ValueError("weights: must be finite and not negative")

    def __len__(self) -> int:
        return len(self.weights)

    @classmethod
    def from_arrays(cls, integers: Sequence[Int64] | Int64, weights: Float64) -> SegmentRecords:
        """Records of the arrays named in `INTEGER_FIELDS`, in that order, and of weights."""
        datasets, documents, offsets, targets = integers
        return cls(datasets, documents, offsets, targets, weights)

    @property
    def integers(self) -> list[Int64]:
        """The arrays named in `INTEGER_FIELDS`, in that order."""
        return [getattr(self, name) for name in INTEGER_FIELDS]

    @classmethod
    def unknown(cls, count: int) -> SegmentRecords:
        """Records of segments of which nothing is known; each weighs 1."""
        integers = np.full((len(INTEGER_FIELDS), count), UNKNOWN, dtype=np.int64)
        return cls.from_arrays(integers, np.ones(count))

    @classmethod
    def concatenate(cls, parts: Sequence[SegmentRecords]) -> SegmentRecords:
        """Records of packs laid end to end."""
        if not parts:
            return cls.unknown(0)
        columns = zip(*(part.integers for part in parts), strict=True)
        weights = np.concatenate([part.weights for part in parts])
        return cls.from_arrays([np.concatenate(column) for column in columns], weights)

    def __getitem__(self, place: slice | Int64) -> SegmentRecords:
        """Records of some of the segments."""
        return self.from_arrays([x[place] for x in self.integers], self.weights[place])


@lru_cache(maxsize=256)
def unknown_segments(count: int) -> SegmentRecords:
    """`SegmentRecords.unknown`, one object for all packs of so many segments: read-only."""
    records = SegmentRecords.unknown(count)
    for array in (*records.integers, records.weights):
        array.flags.writeable = False
    return records
