"""Tiles to kernel calls: a band becomes rectangles that a flash operator knows.

```
band of a tile                        calls
x . . . . .     low = 0               causal, aligned at the top left
x x . . . .
x x x . . .

x x x . . .     low = -2              full    x x        causal  x . .
x x x x . .     (aligned at the               x x                x x .
x x x x x .      bottom right)                x x                x x x

x . . . . .     low = 0, high = 2     masked, block of rows after block of rows: equal ones in
x x . . . .                           one batched call
x x x . . .
. x x x . .
. . x x x .
```

The torch operators are called with "causal" and "full" alone wherever the band allows: a mask
tensor costs memory and time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.packed.attention.task_graph import UNBOUNDED, Tiles

# Rows of a block of a windowed tile. Smaller blocks compute fewer hidden pairs in more calls.
WINDOW_BLOCK_ROWS = 128


@dataclass(frozen=True)
class TileCall:
    """One batched call over `repeat` equal rectangles at constant distances.

    Attributes:
        q_start, q_count: query rows of the first rectangle.
        k_start, k_count: its key rows.
        low, high: its band, see `Tiles`.
        repeat: rectangles.
        q_stride, k_stride: rows from one to the next. Their query rows are disjoint; key rows
            overlap where `k_stride < k_count`.
        fresh: no earlier call has touched these query rows.
        fresh_keys: no other call touches these key rows earlier.
    """

    q_start: int
    q_count: int
    k_start: int
    k_count: int
    low: int
    high: int
    fresh: bool
    fresh_keys: bool
    repeat: int = 1
    q_stride: int = 0
    k_stride: int = 0

    @property
    def is_full(self) -> bool:
        """Whether every row sees every key."""
        return self.low <= 1 - self.k_count and self.high >= self.q_count - 1

    @property
    def is_causal(self) -> bool:
        """Whether row i sees exactly the keys up to i."""
        return self.low == 0 and self.high >= self.q_count - 1


def tile_calls(tiles: Tiles, block_rows: int = WINDOW_BLOCK_ROWS) -> tuple[TileCall, ...]:
    """Calls that compute tiles exactly, in order.

    Args:
        tiles: tasks of a step.
        block_rows: rows of a block of a windowed tile.
    """
    calls: list[TileCall] = []
    for index, (q_start, q_count, k_start, k_count, low, high) in enumerate(tiles.bands.tolist()):
        fresh = index < tiles.fresh
        tile = TileCall(q_start, q_count, k_start, k_count, low, high, fresh, fresh)
        for call in _rectangles(tile, block_rows):
            last = calls[-1] if calls else None
            joined = None if last is None else _join(last, call)
            if joined is None:
                calls.append(call)
            else:
                calls[-1] = joined
    return tuple(calls)


def _rectangles(tile: TileCall, block_rows: int) -> list[TileCall]:
    if tile.is_full or tile.is_causal:
        return [tile]
    if tile.high >= tile.q_count - 1:
        # Keys left of the diagonal's start are seen by all rows.
        split = -tile.low
        return [
            replace(tile, k_count=split, low=-UNBOUNDED, high=UNBOUNDED),
            replace(
                tile,
                k_start=tile.k_start + split,
                k_count=tile.k_count - split,
                low=0,
                high=UNBOUNDED,
                fresh=False,
            ),
        ]
    result = []
    for start in range(0, tile.q_count, block_rows):
        end = min(start + block_rows, tile.q_count)
        first = max(start - tile.high, 0)
        last = min(end - 1 - tile.low, tile.k_count - 1)
        shift = first - start
        block = replace(
            tile,
            q_start=tile.q_start + start,
            q_count=end - start,
            k_start=tile.k_start + first,
            k_count=last - first + 1,
            low=tile.low + shift,
            high=tile.high + shift,
            fresh_keys=False,  # blocks of rows share keys
        )
        if block.is_full:
            block = replace(block, low=-UNBOUNDED, high=UNBOUNDED)
        elif block.is_causal:
            block = replace(block, high=UNBOUNDED)
        result.append(block)
    return result


def _join(last: TileCall, call: TileCall) -> TileCall | None:
    """Both in one batched call, if they are equal and lie at the distance of those before."""
    same = (
        last.q_count == call.q_count
        and last.k_count == call.k_count
        and last.low == call.low
        and last.high == call.high
        and last.fresh == call.fresh
        and last.fresh_keys == call.fresh_keys
    )
    if not same:
        return None
    q_stride = call.q_start - last.q_start - (last.repeat - 1) * last.q_stride
    k_stride = call.k_start - last.k_start - (last.repeat - 1) * last.k_stride
    if q_stride < last.q_count or k_stride <= 0:
        return None
    if last.repeat > 1 and (q_stride, k_stride) != (last.q_stride, last.k_stride):
        return None
    return replace(last, repeat=last.repeat + 1, q_stride=q_stride, k_stride=k_stride)
