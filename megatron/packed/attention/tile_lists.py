"""Tiles to lists for variable-length kernels: one list a mask type, however many tiles there are.

A flash kernel takes sequences laid end to end and one window `(left, right)` for all of them,
counted from the *bottom right*: with m rows and n keys, row i sees key j where

    i + n - m - left <= j <= i + n - m + right                      -1: unbounded

Tiles count from the *top left* (`low <= i - j <= high`), and each has its own band. Cut at the rows
where a side of the band begins or ends to matter, every tile is made of four shapes, whose window
is the same whatever their size:

```
x . . . . .   causal (-1, 0)     the left side doesn't bind yet; the last row sees the last key
x x . . . .
. x x . . .   window (w, 0)      both sides bind: w = high - low
. . x x . .
. . . x x x   full (-1, -1)      neither binds (here in the columns that both rows see)
. . . . x x   anti (0, -1)       the right side has run out of keys: first row all, last row one
```

A row of queries occurs once in a list, so that results are merged without a conflict: the full
rectangles over the same rows become one, with their keys laid end to end.

Source: the alignment is that of FlashAttention 2.1 and later, which torch ships.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.packed.attention.task_graph import Tiles, expand

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]

UNBOUNDED_SIDE = -1

# Rows of keys that one list may gather, as a multiple of those that the step has. A chunked layout
# of one long segment would gather every key once for each chunk that sees it.
GATHER_LIMIT = 4


@dataclass(frozen=True, eq=False)
class TileList:
    """Rectangles of one mask type: one call of a variable-length kernel.

    Attributes:
        left, right: the window, counted from the bottom right; -1 for an unbounded side.
        q_rows: int64 `[q]`, rows of queries, none twice.
        k_rows: int64 `[k]`, rows of keys; one may be seen by several rectangles.
        cu_q, cu_k: int32 `[n + 1]`, where the rectangles begin in them; none is empty.
        fresh: no earlier call has touched these query rows.
        device_copies: for the kernel: what it made of the arrays, by device.
    """

    left: int
    right: int
    q_rows: Int64
    k_rows: Int64
    cu_q: Int32
    cu_k: Int32
    fresh: bool
    device_copies: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def max_q(self) -> int:
        """Query rows of the tallest rectangle."""
        return int(np.diff(self.cu_q).max())

    @property
    def max_k(self) -> int:
        """Keys of the widest rectangle."""
        return int(np.diff(self.cu_k).max())

    @property
    def is_causal(self) -> bool:
        """Whether the last row sees all keys, and each one before it one less."""
        return (self.left, self.right) == (UNBOUNDED_SIDE, 0)


def tile_lists(tiles: Tiles, *, is_first: bool) -> tuple[TileList, ...]:
    """Lists that compute tiles exactly.

    Args:
        tiles: tasks of a step.
        is_first: nothing has touched the query rows before.
    """
    if not len(tiles):
        return ()
    q_start, q_count, k_start, k_count = tiles.bands[:, :4].T
    touched = np.zeros(int((q_start + q_count).max()), dtype=bool)
    limit = GATHER_LIMIT * int((k_start + k_count).max())
    lists = []
    for left, right, pieces in _shapes(tiles.bands):
        if (left, right) == (UNBOUNDED_SIDE, UNBOUNDED_SIDE):
            groups = _full_lists(pieces, limit)
        else:
            groups = [_as_list(layer) for layer in _layers(pieces)]
        for q_rows, k_rows, cu_q, cu_k in groups:
            fresh = is_first and not touched[q_rows].any()
            touched[q_rows] = True
            lists.append(TileList(left, right, q_rows, k_rows, cu_q, cu_k, fresh))
    return tuple(lists)


def _shapes(bands: Int64) -> list[tuple[int, int, Int64]]:
    """Left, right and rectangles `[p, 4]` (query row, rows, key row, keys) of each mask type."""
    q, m, k, n, low, high = bands.T
    # Rows from `bound` on are limited on the left; those from `free` on see up to the last key.
    bound = np.clip(high + 1, 0, m)
    free = np.where(low <= 1 - n, 0, np.clip(n + low, 0, m))
    zero = np.zeros_like(m)

    top = np.minimum(bound, free)
    causal = _rectangles(q, k, (zero, top), (zero, top - low))
    windowed = _rectangles(q, k, (bound, free), (bound - high, free - low))
    width = (high - low)[free > bound]
    full = _rectangles(q, k, (free, bound), (zero, n))
    # Below both: a triangle that loses a key a row, and the keys that its last row still sees.
    start = np.maximum(bound, free)
    anti = _rectangles(q, k, (start, m), (start - high, m - high))
    rest = _rectangles(q, k, (start, m), (m - high, n))
    shapes = [(UNBOUNDED_SIDE, 0, causal)]
    shapes += [(int(w), 0, windowed[width == w]) for w in np.unique(width)]
    shapes += [(0, UNBOUNDED_SIDE, anti)]
    shapes += [(UNBOUNDED_SIDE, UNBOUNDED_SIDE, np.concatenate([full, rest]))]
    return [shape for shape in shapes if len(shape[2])]


def _rectangles(q: Int64, k: Int64, rows: tuple[Int64, Int64], keys: tuple[Int64, Int64]) -> Int64:
    """Rectangles `[p, 4]` between rows and keys, both `[first, end)` in the tile; none empty."""
    (first, end), (left, right) = rows, keys
    kept = (end > first) & (right > left)
    return np.stack([q + first, end - first, k + left, right - left], axis=1)[kept]


def _layers(pieces: Int64) -> list[Int64]:
    """Rectangles in as few groups as it takes to have no query row twice in one; mostly one."""
    pieces = pieces[np.argsort(pieces[:, 0], kind="stable")]
    layers: list[Int64] = []
    while len(pieces):
        ends = np.maximum.accumulate(pieces[:, 0] + pieces[:, 1])
        if np.all(pieces[1:, 0] >= ends[:-1]):
            return [*layers, pieces]
        taken, end = np.zeros(len(pieces), dtype=bool), 0
        for index, (start, count) in enumerate(pieces[:, :2].tolist()):
            if start >= end:
                taken[index], end = True, start + count
        layers.append(pieces[taken])
        pieces = pieces[~taken]
    return layers


def _as_list(pieces: Int64) -> tuple[Int64, Int64, Int32, Int32]:
    q_start, q_count, k_start, k_count = pieces.T
    return (
        expand(q_start, q_count)[1],
        expand(k_start, k_count)[1],
        _boundaries(q_count),
        _boundaries(k_count),
    )


def _full_lists(pieces: Int64, limit: int) -> list[tuple[Int64, Int64, Int32, Int32]]:
    """Cut the rows where a rectangle begins or ends; each piece sees all its keys in a row."""
    q_start, q_count, k_start, k_count = pieces.T
    edges = np.unique(np.concatenate([q_start, q_start + q_count]))
    low = np.searchsorted(edges, q_start)
    owner, interval = expand(low, np.searchsorted(edges, q_start + q_count) - low)
    order = np.lexsort((k_start[owner], interval))
    owner, interval = owner[order], interval[order]
    used, at = np.unique(interval, return_index=True)
    keys = np.add.reduceat(k_count[owner], at)
    rows = edges[used + 1] - edges[used]

    lists = []
    ends = np.append(at, len(owner))
    first = 0
    while first < len(used):
        taken = int(np.searchsorted(np.cumsum(keys[first:]), limit, side="right"))
        last = first + max(taken, 1)
        some = owner[ends[first] : ends[last]]
        lists.append(
            (
                expand(edges[used[first:last]], rows[first:last])[1],
                expand(k_start[some], k_count[some])[1],
                _boundaries(rows[first:last]),
                _boundaries(keys[first:last]),
            )
        )
        first = last
    return lists


def _boundaries(counts: Int64) -> Int32:
    return np.append(0, np.cumsum(counts)).astype(np.int32)
