"""Numpy definition of the partition routines; see `reference.py`."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]


def zigzag_runs(cu_seqlens_padded: Int32, cp_size: int, cp_rank: int) -> tuple[Int64, Int64]:
    """Runs of one rank under the per-segment zigzag: chunk r, then chunk `2 * cp - 1 - r`.

    Returns:
        Starts and counts, int64 `[r]`, neighbours joined.
    """
    begin = cu_seqlens_padded[:-1].astype(np.int64)
    length = np.diff(cu_seqlens_padded).astype(np.int64)
    bad = np.flatnonzero((length % (2 * cp_size) != 0) | (length < 0))
    if len(bad):
        raise ValueError(
            f"cu_seqlens_padded: segment {bad[0]} has {length[bad[0]]} tokens, no multiple of "
            f"2 * cp_size = {2 * cp_size}"
        )
    begin, length = begin[length > 0], length[length > 0]
    chunk = length // (2 * cp_size)
    starts = np.stack(
        [begin + cp_rank * chunk, begin + (2 * cp_size - 1 - cp_rank) * chunk], axis=1
    ).reshape(-1)
    counts = np.repeat(chunk, 2)
    if len(starts) == 0:
        return starts, counts
    first = np.ones(len(starts), dtype=bool)
    first[1:] = starts[1:] != starts[:-1] + counts[:-1]
    at = np.flatnonzero(first)
    return starts[at], np.add.reduceat(counts, at)


def expand_runs(starts: Int64, counts: Int64, step: int) -> Int64:
    """Every position of the runs, in order: int64 `[sum(counts)]`."""
    inside = np.arange(int(counts.sum()), dtype=np.int64)
    inside -= np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(starts, counts) + inside * step


def inverse_permutation(permutation: Int64) -> Int64:
    """Place of each value in a permutation of `0 .. n - 1`: int64 `[n]`."""
    size = len(permutation)
    result = np.full(size, -1, dtype=np.int64)
    if size and (permutation.min() < 0 or permutation.max() >= size):
        raise ValueError("permutation: a value is out of range")
    result[permutation] = np.arange(size)
    if np.any(result < 0):
        raise ValueError("permutation: a value is repeated")
    return result


def chunk_areas(begins: Int64, lengths: Int64, edges: Int64) -> Int64:
    """Unmasked causal pairs of every chunk of a pack.

    Args:
        begins: int64 `[n]`, first pack position of each segment, ascending.
        lengths: int64 `[n]`, real tokens of each segment.
        edges: int64 `[c + 1]`, chunk boundaries.

    Returns:
        int64 `[c]`: the sum of (position in the document + 1) over the chunk's real tokens.
    """

    def pairs_before(position: Int64) -> Int64:
        # Pairs of all tokens before a pack position.
        if len(begins) == 0:
            return np.zeros(len(position), dtype=np.int64)
        whole = np.concatenate([[0], np.cumsum(lengths * (lengths + 1) // 2)])
        segment = np.searchsorted(begins, position, side="right") - 1
        inside = np.clip(position - begins[segment], 0, lengths[segment])
        return np.where(segment < 0, 0, whole[segment] + inside * (inside + 1) // 2)

    return np.diff(pairs_before(edges))


def dispatch_ranks(areas: Int64, classes: Int64, cp_size: int) -> Int64:
    """Min-heap dispatch: largest chunk first, to the least loaded rank with room for it.

    Args:
        areas: int64 `[c]`, attention work of each chunk.
        classes: int64 `[c]`, 0 or 1: chunks of two sizes, each divided evenly over the ranks.
        cp_size: ranks.

    Returns:
        int64 `[c]`, the rank of each chunk. Ties go to the lower rank.
    """
    if np.any((classes != 0) & (classes != 1)):
        raise ValueError("classes: must be 0 or 1")
    total = np.bincount(classes, minlength=2)
    if np.any(total % cp_size):
        raise ValueError("areas: chunks don't divide evenly over cp_size ranks")
    room = [list(total // cp_size) for _ in range(cp_size)]
    heap = [(0, rank) for rank in range(cp_size)]
    result = np.empty(len(areas), dtype=np.int64)
    for chunk in np.argsort(areas, kind="stable")[::-1]:
        aside = []
        while True:
            load, rank = heapq.heappop(heap)
            if room[rank][classes[chunk]] > 0:
                break
            aside.append((load, rank))
        room[rank][classes[chunk]] -= 1
        result[chunk] = rank
        if sum(room[rank]) > 0:
            aside.append((load + int(areas[chunk]), rank))
        for entry in aside:
            heapq.heappush(heap, entry)
    return result
