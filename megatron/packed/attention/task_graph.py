"""The Q-KV task graph: blocks of rows, the mask between them, and tiles with exact areas.

Queries and keys are cut into *blocks*: the rows that one rank holds contiguously of one segment.
The mask gives the edges; each edge is a *tile*, an independent task with the result (O, LSE):

```
                 k rows of one block                 a row i sees the keys j of a band:
             0 1 2 3 4 5 6 7                              low <= i - j <= high
q rows   0   x . . . . . . .
of one   1   x x . . . . . .      causal   low = 0        keys after the row are hidden
block    2   x x x . . . . .      window   high = w       keys further left than w are hidden
         3   . x x x . . . .      full     unbounded      (here low = 0, high = 2)
```

The band is counted in rows of the two blocks, so one form serves every partition: blocks are runs
of positions with a common step (1, or CP for the striped layout), and low and high absorb where
they start. Everything is plain integers on the host, vectorised over blocks; a rank sees only its
own edges.

Sources: RingAttention (Liu et al. 2023) and MagiAttention's attention slices for tiles as the unit
of work; Striped Attention (Brandon et al. 2023) for the shifted causal band.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.packed.packing import checks
from megatron.packed.packing.partition import Partition

Int64 = NDArray[np.int64]

UNBOUNDED = 1 << 40
MASKS = ("causal", "full")


@dataclass(frozen=True)
class Mask:
    """What a query sees of its own segment. Other segments are never seen.

    Attributes:
        kind: "causal" or "full".
        window: tokens to the left that stay visible next to the query itself, or None for all.
            `window_size=(window, 0)` of other libraries.
    """

    kind: str = "causal"
    window: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in MASKS:
            raise ValueError(f"mask: {self.kind!r} must be one of {', '.join(MASKS)}")
        if self.window is not None:
            checks.integer("window", self.window, 0)
            if self.kind == "full":
                raise ValueError("window: a sliding window needs the causal mask")

    @property
    def reach(self) -> int:
        """Tokens to the left that are visible."""
        return UNBOUNDED if self.window is None or self.kind == "full" else self.window


@dataclass(frozen=True, eq=False)
class Blocks:
    """All blocks of a pack, ordered by segment, then by first position.

    Attributes:
        segment: int64 `[b]`, segment of each block.
        first: int64 `[b]`, position in the segment of its first row.
        count: int64 `[b]`, its real tokens, at least 1.
        rank: int64 `[b]`, who holds it.
        row: int64 `[b]`, its first row in the holder's local order.
        step: distance of neighbouring rows in positions.
        segment_edges: int64 `[n + 1]`, first block of each segment.
    """

    segment: Int64
    first: Int64
    count: Int64
    rank: Int64
    row: Int64
    step: int
    segment_edges: Int64

    @property
    def last(self) -> Int64:
        """Position in the segment of each block's last row."""
        return self.first + (self.count - 1) * self.step


def expand(starts: Int64, counts: Int64) -> tuple[Int64, Int64]:
    """Pairs (index of the range, value in the range) of ranges `[start, start + count)`."""
    owner = np.repeat(np.arange(len(counts)), counts)
    inside = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return owner, starts[owner] + inside


def build_blocks(partition: Partition, starts: Any, lengths: Any, group_size: int = 1) -> Blocks:
    """Cut segments where their holder changes.

    Args:
        partition: who holds which position.
        starts: integers `[n]`, first pack position of each segment, ascending.
        lengths: integers `[n]`, real tokens of each segment.
        group_size: neighbouring ranks that pool their rows, in ascending order of position
            (the head-exchange subgroups of a2a and a2a+p2p); ranks then number the groups.

    Returns:
        The blocks of all ranks.

    Raises:
        ValueError: for a striped partition with more than one pooled group.
    """
    starts, lengths = np.asarray(starts, np.int64), np.asarray(lengths, np.int64)
    ranks = partition.cp_size // group_size
    if partition.kind == "striped" and ranks > 1:
        if group_size > 1:
            raise ValueError(
                "partition: pooled ranks of a striped partition hold no runs; use 'zigzag'"
            )
        # Residue t of a segment is one block; a segment shorter than CP has as many as tokens.
        segment, turn = expand(np.zeros_like(lengths), np.minimum(lengths, ranks))
        position = starts[segment] + turn
        count = -(-(lengths[segment] - turn) // ranks)
        columns = [segment, turn, count, position % ranks, position // ranks]
        step = ranks
    else:
        columns = _contiguous_blocks(partition, starts, lengths, group_size)
        step = 1
    edges = np.searchsorted(columns[0], np.arange(len(lengths) + 1))
    segment, first, count, rank, row = columns
    return Blocks(segment, first, count, rank, row, step, edges)


def _contiguous_blocks(
    partition: Partition, starts: Int64, lengths: Int64, group_size: int
) -> list[Int64]:
    """Segment, first, count, rank and row of every block of a partition into runs."""
    begin, rank = holder_runs(partition)
    rank = rank // group_size
    new = np.ones(len(begin), dtype=bool)
    new[1:] = rank[1:] != rank[:-1]
    begin, rank = begin[new], rank[new]
    count = np.diff(np.append(begin, partition.total_tokens))
    # Rows of a rank ascend with positions, so its runs follow each other in its local order.
    order = np.argsort(rank, kind="stable")
    row = np.empty_like(begin)
    row[order] = np.cumsum(count[order]) - count[order]
    row -= rank * (partition.local_tokens * group_size)

    low = np.searchsorted(begin, starts, side="right") - 1
    high = np.searchsorted(begin, starts + lengths, side="left")
    segment, run = expand(low, np.where(lengths > 0, high - low, 0))
    left = np.maximum(begin[run], starts[segment])
    right = np.minimum(begin[run] + count[run], starts[segment] + lengths[segment])
    return [
        segment,
        left - starts[segment],
        right - left,
        rank[run],
        row[run] + left - begin[run],
    ]


def holder_runs(partition: Partition) -> tuple[Int64, Int64]:
    """Runs of positions with one holder, ascending: first position `[r]` and rank `[r]`."""
    cp, total = partition.cp_size, partition.total_tokens
    match partition.kind:
        case _ if cp == 1 or total == 0:
            return np.zeros(1, np.int64), np.zeros(1, np.int64)
        case "contiguous":
            return np.arange(cp) * partition.local_tokens, np.arange(cp)
        case "striped":
            return np.arange(total), np.arange(total) % cp
        case "zigzag":
            edges = partition.cu_seqlens_padded.astype(np.int64)
        case "zigzag_pack":
            edges = np.array([0, total])
        case _:
            assert partition.chunk_edges is not None and partition.chunk_ranks is not None
            size = np.diff(partition.chunk_edges)
            return partition.chunk_edges[:-1][size > 0], partition.chunk_ranks[size > 0]
    edges = np.unique(edges)
    chunk = np.diff(edges) // (2 * cp)
    turn = np.arange(2 * cp)
    begin = (edges[:-1, None] + turn * chunk[:, None]).reshape(-1)
    return begin, np.tile(np.minimum(turn, 2 * cp - 1 - turn), len(chunk))


@dataclass(frozen=True, eq=False)
class Tiles:
    """Tasks of one step on one rank.

    Attributes:
        bands: int64 `[n, 6]`: first query row, query rows, first key row, key rows, low, high. Row
            `i` of the tile sees key `j` of it where `low <= i - j <= high`. Every row sees a key.
        fresh: how many leading tiles are the first ones to touch their rows, queries and keys.
    """

    bands: Int64
    fresh: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "bands", np.ascontiguousarray(self.bands, dtype=np.int64))

    @property
    def areas(self) -> Int64:
        """Unmasked pairs of each tile: int64 `[n]`."""
        _, q_count, _, k_count, low, high = self.bands.T
        return band_areas(q_count, k_count, low, high)

    @property
    def area(self) -> int:
        """Unmasked pairs of all tiles."""
        return int(self.areas.sum())

    def __len__(self) -> int:
        return len(self.bands)


def band_areas(q_count: Int64, k_count: Int64, low: Int64, high: Int64) -> Int64:
    """How many pairs `0 <= i < q_count`, `0 <= j < k_count` have `low <= i - j <= high`."""

    def ramp(x: Int64) -> Int64:
        # Sum of min(t, q_count) over 0 <= t < x.
        inside = np.clip(x, 0, q_count + 1)
        return inside * (inside - 1) // 2 + np.maximum(x - inside, 0) * q_count

    def up_to(bound: Int64) -> Int64:
        d = np.clip(bound, -k_count - 1, q_count)
        return ramp(np.maximum(d + 1 + k_count, 0)) - ramp(np.maximum(d + 1, 0))

    return np.maximum(up_to(high) - up_to(low - 1), 0)


@dataclass(frozen=True, eq=False)
class Edges:
    """Visible (query block, key block) pairs, trimmed to rows that take part.

    Attributes:
        query: int64 `[e]`, query block.
        key: int64 `[e]`, key block.
        q_skip, q_count: int64 `[e]`, rows of the query block that see something.
        k_skip, k_count: int64 `[e]`, rows of the key block that are seen.
        low, high: int64 `[e]`, the band, counted from the trimmed rows.
    """

    query: Int64
    key: Int64
    q_skip: Int64
    q_count: Int64
    k_skip: Int64
    k_count: Int64
    low: Int64
    high: Int64

    def take(self, index: Any) -> Edges:
        """Some of the edges."""
        return Edges(*(column[index] for column in vars(self).values()))


def edges_of_queries(blocks: Blocks, mask: Mask, which: Int64) -> Edges:
    """Every edge of the given query blocks."""
    low, high = _candidates(blocks, which, mask, forward=False)
    owner, key = expand(low, high - low)
    return _trim(blocks, mask, which[owner], key)


def edges_of_keys(blocks: Blocks, mask: Mask, which: Int64) -> Edges:
    """Every edge of the given key blocks."""
    low, high = _candidates(blocks, which, mask, forward=True)
    owner, query = expand(low, high - low)
    return _trim(blocks, mask, query, which[owner])


def _candidates(blocks: Blocks, which: Int64, mask: Mask, *, forward: bool) -> tuple[Int64, Int64]:
    """Range of blocks that may share an edge with each given one; exact for runs."""
    segment = blocks.segment[which]
    low, high = blocks.segment_edges[segment], blocks.segment_edges[segment + 1]
    if mask.kind == "full":
        return low, high
    width = int(blocks.last.max(initial=0)) + 2
    reach = min(mask.reach, width)
    base = blocks.segment * width
    left = blocks.first[which] - (0 if forward else reach)
    right = blocks.last[which] + (reach if forward else 0)
    here = segment * width
    if blocks.step == 1:
        # Last positions ascend as well, so blocks that end too early form a prefix.
        start = np.searchsorted(base + blocks.last, here + np.maximum(left, 0), side="left")
        low = np.maximum(low, start)
    stop = np.searchsorted(base + blocks.first, here + np.minimum(right, width - 1), side="right")
    return low, np.maximum(low, np.minimum(high, stop))


def _trim(blocks: Blocks, mask: Mask, query: Int64, key: Int64) -> Edges:
    """Bands of block pairs without the rows and keys that have no partner; empty pairs dropped."""
    m, n, step = blocks.count[query], blocks.count[key], blocks.step
    if mask.kind == "full":
        low, high = np.full(len(m), -UNBOUNDED), np.full(len(m), UNBOUNDED)
    else:
        ahead = blocks.first[query] - blocks.first[key]
        low = -(ahead // step)
        high = (min(mask.reach, UNBOUNDED // 2) - ahead) // step
    q_skip = np.maximum(low, 0)
    q_end = np.minimum(m - 1, high + n - 1)
    k_skip = np.maximum(q_skip - high, 0)
    k_end = np.minimum(n - 1, q_end - low)
    kept = (q_skip <= q_end) & (k_skip <= k_end) & (low <= high)
    shift = k_skip - q_skip
    edges = Edges(
        query=query,
        key=key,
        q_skip=q_skip,
        q_count=q_end - q_skip + 1,
        k_skip=k_skip,
        k_count=k_end - k_skip + 1,
        low=np.where(low <= -UNBOUNDED, low, low + shift),
        high=np.where(high >= UNBOUNDED, high, high + shift),
    )
    return edges if kept.all() else edges.take(kept)


def is_full(bands: Int64) -> NDArray[np.bool_]:
    """Tiles whose band hides nothing: bool `[n]`."""
    _, q_count, _, k_count, low, high = bands.T
    return (low <= 1 - k_count) & (high >= q_count - 1)


def join_full_tiles(bands: Int64) -> Int64:
    """Join full tiles that are neighbours in their keys, then those that are in their queries.

    ```
    k blocks   a b        ab          q block 0 of a zigzag rank against two chunks of another
    q  0       # #  ->    #           rank is one task; and so are both its chunks against one
    ```

    Args:
        bands: int64 `[n, 6]`, as in `Tiles`.

    Returns:
        int64 `[m, 6]` with `m <= n`, ordered by first query row, then by first key row.
    """
    if len(bands) == 0:
        return bands
    full = is_full(bands)
    rest = bands[~full]
    tiles = bands[full]
    tiles[:, 4], tiles[:, 5] = -UNBOUNDED, UNBOUNDED
    tiles = _join(tiles, keep=(0, 1), start=2)
    tiles = _join(tiles, keep=(2, 3), start=0)
    result = np.concatenate([rest, tiles])
    return result[np.lexsort((result[:, 2], result[:, 0]))]


def _join(tiles: Int64, keep: Sequence[int], start: int) -> Int64:
    """Join tiles that agree in two columns and follow each other in the interval at `start`."""
    if len(tiles) < 2:
        return tiles
    tiles = tiles[np.lexsort((tiles[:, start], tiles[:, keep[1]], tiles[:, keep[0]]))]
    end = tiles[:, start] + tiles[:, start + 1]
    new = np.ones(len(tiles), dtype=bool)
    new[1:] = (tiles[1:, keep] != tiles[:-1, keep]).any(axis=1) | (tiles[1:, start] != end[:-1])
    at = np.flatnonzero(new)
    result = tiles[at]
    result[:, start + 1] = np.add.reduceat(tiles[:, start + 1], at)
    return result
