"""From blocks to one rank's steps: the part that all plans share.

A plan decides two things: the partition, and which *offsets* an exchange covers. At offset d,
rank r receives from rank r - d what it needs, and sends rank r + d what that one needs:

```
4 ranks           offset 1    offset 2    offset 3
rank 0 gets from  3           2           1
rank 1 gets from  0           3           2             every offset is a permutation of the ranks:
rank 2 gets from  1           0           3             no link carries two messages at once
rank 3 gets from  2           1           0
```

Both ends compute the rows of a message from the boundaries alone, so nothing is negotiated.
Only rows that some task of the receiver sees are in it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron.packed.attention.plans.plan import Receive, Send, Step
from megatron.packed.attention.task_graph import (
    UNBOUNDED,
    Blocks,
    Edges,
    Mask,
    Tiles,
    edges_of_keys,
    edges_of_queries,
    join_full_tiles,
)

Int64 = NDArray[np.int64]


def schedule_steps(
    blocks: Blocks, mask: Mask, rank: int, ring_size: int, exchange_of_offset: Int64
) -> tuple[Step, ...]:
    """Order one rank's tasks and messages.

    Args:
        blocks: blocks of all ranks.
        mask: what a query sees.
        rank: this rank.
        ring_size: ranks that share the steps.
        exchange_of_offset: int64 `[ring_size]`, number of the exchange that covers each offset;
            not falling, and the same on every rank, or ranks would wait for each other in a circle.
            Entry 0 is ignored: offset 0 is the local step.

    Returns:
        The local step, then every exchange that this rank has part in. Peers are numbered as the
        blocks' ranks are.
    """
    mine = np.flatnonzero(blocks.rank == rank)
    steps = [Step(0, (), (), _local_tiles(blocks, mask, rank, mine))]
    if ring_size == 1:
        return tuple(steps)
    receives, tiles = _incoming(blocks, mask, rank, ring_size, mine, exchange_of_offset)
    sends = _outgoing(blocks, mask, rank, ring_size, mine, exchange_of_offset)
    for index in sorted(receives.keys() | sends.keys()):
        steps.append(
            Step(
                index=index,
                sends=tuple(sends.get(index, ())),
                receives=tuple(receives.get(index, ())),
                tiles=Tiles(tiles.get(index, np.zeros((0, 6), np.int64))),
            )
        )
    return tuple(steps)


def _bands(blocks: Blocks, edges: Edges, first_key_row: Int64) -> Int64:
    return np.stack(
        [
            blocks.row[edges.query] + edges.q_skip,
            edges.q_count,
            first_key_row,
            edges.k_count,
            edges.low,
            edges.high,
        ],
        axis=1,
    )


def _local_tiles(blocks: Blocks, mask: Mask, rank: int, mine: Int64) -> Tiles:
    """Tasks between a rank's own rows; each row's own block comes first and covers it."""
    if mask.window is None:
        # Local rows of a segment follow each other in order of position: one task for all.
        segment, at = np.unique(blocks.segment[mine], return_index=True)
        start = blocks.row[mine[at]] if len(mine) else np.zeros(0, np.int64)
        count = np.add.reduceat(blocks.count[mine], at) if len(mine) else start
        low = np.full(len(segment), 0 if mask.kind == "causal" else -UNBOUNDED)
        bands = np.stack([start, count, start, count, low, np.full_like(low, UNBOUNDED)], axis=1)
        return Tiles(bands, fresh=len(bands))
    edges = edges_of_queries(blocks, mask, mine)
    edges = edges.take(blocks.rank[edges.key] == rank)
    bands = _bands(blocks, edges, blocks.row[edges.key] + edges.k_skip)
    own = edges.query == edges.key
    return Tiles(np.concatenate([bands[own], join_full_tiles(bands[~own])]), fresh=int(own.sum()))


def _hulls(edges: Edges, group: Int64) -> tuple[Int64, Int64, Int64]:
    """First row, end row and first edge of the key rows that each group of edges sees.

    Edges of a group share the key block and follow each other. The seen rows of one block are one
    run whatever the mask, so the hull holds no row that nobody needs.
    """
    at = np.flatnonzero(np.append(True, group[1:] != group[:-1])) if len(group) else group
    if len(at) == 0:
        return at, at, at
    first = np.minimum.reduceat(edges.k_skip, at)
    end = np.maximum.reduceat(edges.k_skip + edges.k_count, at)
    return first, end, at


def _incoming(
    blocks: Blocks,
    mask: Mask,
    rank: int,
    ring_size: int,
    mine: Int64,
    exchange_of_offset: Int64,
) -> tuple[dict[int, list[Receive]], dict[int, Int64]]:
    """Messages to this rank and the tasks on them, by exchange."""
    edges = edges_of_queries(blocks, mask, mine)
    edges = edges.take(blocks.rank[edges.key] != rank)
    offset = (rank - blocks.rank[edges.key]) % ring_size
    order = np.lexsort((edges.key, offset))
    edges, offset = edges.take(order), offset[order]
    first, end, at = _hulls(edges, edges.key)
    rows, hull_offset = end - first, offset[at]
    exchange = exchange_of_offset[hull_offset]
    # Where each hull lies in the buffer of its exchange: messages by offset, rows by position.
    total = np.cumsum(rows)
    place = total - rows
    place = place - place[np.searchsorted(exchange, exchange)] if len(place) else place
    hull_of_edge = np.repeat(np.arange(len(at)), np.diff(np.append(at, len(offset))))
    first_key_row = place[hull_of_edge] + edges.k_skip - first[hull_of_edge]
    bands = _bands(blocks, edges, first_key_row)

    receives: dict[int, list[Receive]] = {}
    offsets, start = np.unique(hull_offset, return_index=True)
    counts = np.add.reduceat(rows, start) if len(start) else start
    for d, count in zip(offsets.tolist(), counts.tolist(), strict=True):
        receive = Receive(peer=(rank - d) % ring_size, rows=count)
        receives.setdefault(int(exchange_of_offset[d]), []).append(receive)
    of_edge = exchange_of_offset[offset]
    tiles = {}
    for index in receives:
        low, high = np.searchsorted(of_edge, [index, index + 1])
        tiles[index] = join_full_tiles(bands[low:high])
    return receives, tiles


def _outgoing(
    blocks: Blocks,
    mask: Mask,
    rank: int,
    ring_size: int,
    mine: Int64,
    exchange_of_offset: Int64,
) -> dict[int, list[Send]]:
    """Messages from this rank, by exchange."""
    edges = edges_of_keys(blocks, mask, mine)
    edges = edges.take(blocks.rank[edges.query] != rank)
    offset = (blocks.rank[edges.query] - rank) % ring_size
    order = np.lexsort((edges.key, offset))
    edges, offset = edges.take(order), offset[order]
    first, end, at = _hulls(edges, offset * len(blocks.rank) + edges.key)
    start, hull_offset = blocks.row[edges.key[at]] + first, offset[at]
    count = end - first
    new = np.ones(len(at), dtype=bool)
    new[1:] = (hull_offset[1:] != hull_offset[:-1]) | (start[1:] != (start + count)[:-1])
    run = np.flatnonzero(new)
    starts, run_offset = start[run], hull_offset[run]
    counts = np.add.reduceat(count, run) if len(run) else run

    sends: dict[int, list[Send]] = {}
    offsets, begin = np.unique(run_offset, return_index=True)
    ends = np.append(begin, len(run))[1:]
    for d, low, high in zip(offsets.tolist(), begin.tolist(), ends.tolist(), strict=True):
        send = Send((rank + d) % ring_size, starts[low:high], counts[low:high])
        sends.setdefault(int(exchange_of_offset[d]), []).append(send)
    return sends
