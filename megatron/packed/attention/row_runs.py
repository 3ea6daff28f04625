"""Which rows of one tensor go where in another, as runs: plain integers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron.packed.attention.task_graph import expand

Int64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RowRuns:
    """Rows of a source, and where they go in a target; no target row twice.

    Attributes:
        table: int64 `[r, 3]`: first row in the target, first row in the source, rows.
    """

    table: Int64

    @classmethod
    def all(cls, rows: int) -> RowRuns:
        """Every row to its own place."""
        return cls(np.array([[0, 0, rows]]))

    @classmethod
    def gather(cls, starts: Int64, counts: Int64) -> RowRuns:
        """Runs of a source laid end to end."""
        return cls(np.stack([np.cumsum(counts) - counts, starts, counts], axis=1))

    @classmethod
    def of_index(cls, index: Int64) -> RowRuns:
        """Row `index[i]` of a source goes to row i."""
        if not len(index):
            return cls(np.zeros((0, 3), np.int64))
        first = np.flatnonzero(np.diff(index, prepend=index[0] - 2) != 1)
        return cls.gather(index[first], np.diff(first, append=len(index)))

    @cached_property
    def inverse(self) -> RowRuns:
        """The way back."""
        return RowRuns(np.ascontiguousarray(self.table[:, [1, 0, 2]]))

    @cached_property
    def fills_target(self) -> bool:
        """Whether they lie end to end in the target, from its first row on."""
        to, counts = self.table[:, 0], self.table[:, 2]
        return bool((to == np.cumsum(counts) - counts).all())

    @cached_property
    def rows(self) -> int:
        """How many rows."""
        return int(self.table[:, 2].sum())

    @cached_property
    def index(self) -> tuple[Int64, Int64]:
        """Target rows and source rows one by one: int64 `[rows]` each."""
        to, start, count = self.table.T
        return expand(to, count)[1], expand(start, count)[1]
