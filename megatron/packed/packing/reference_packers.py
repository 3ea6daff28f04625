"""Plain definition of the packers' bin assignments; see `reference.py`.

Costs are what a document takes in a bin: its length rounded up to the alignment. Bins are
numbered in order of opening.
"""

from __future__ import annotations

import bisect
import heapq
from collections import defaultdict, deque

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]


def _check(costs: Int64, capacity: int) -> None:
    if capacity < 1:
        raise ValueError(f"capacity: must be positive, got {capacity}")
    if len(costs) and (costs.min() < 0 or costs.max() > capacity):
        raise ValueError("costs: a value is not between 0 and the capacity")


def group(bins: Int64, count: int) -> tuple[Int64, Int64]:
    """Order documents by bin, stably.

    Args:
        bins: int64 `[n]`, each in `0 .. count - 1`.
        count: number of bins.

    Returns:
        Document numbers in bin order, int64 `[n]`, and where each bin begins, int64 `[count + 1]`.
    """
    if len(bins) and (bins.min() < 0 or bins.max() >= count):
        raise ValueError("bins: a value is out of range")
    edges = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(np.bincount(bins, minlength=count)[:count], out=edges[1:])
    return np.argsort(bins, kind="stable"), edges


def next_fit(costs: Int64, capacity: int, used: int) -> Int64:
    """Fill one bin, which starts with `used` tokens; open the next when a document doesn't fit.

    Returns:
        int64 `[n]`, bin of each document, the open one being 0.
    """
    _check(costs, capacity)
    if not 0 <= used <= capacity:
        raise ValueError(f"used: must be between 0 and the capacity, got {used}")
    result = np.empty(len(costs), dtype=np.int64)
    current = 0
    for i, cost in enumerate(costs.tolist()):
        if used + cost > capacity:
            current, used = current + 1, 0
        used += cost
        result[i] = current
    return result


def best_fit(costs: Int64, capacity: int, open_rooms: Int64) -> Int64:
    """Put each document, in the given order, into the fullest bin that has room.

    Args:
        costs: int64 `[n]`.
        capacity: of a new bin.
        open_rooms: int64 `[b]`, room left in bins 0 .. b - 1, which are open already.

    Returns:
        int64 `[n]`, bin of each document. Among equally full bins, the one that came to that
        fill first.
    """
    _check(costs, capacity)
    _check(open_rooms, capacity)
    waiting: dict[int, deque[int]] = defaultdict(deque)
    rooms: list[int] = []
    count = 0

    def push(room: int, bin_number: int) -> None:
        if not waiting[room]:
            bisect.insort(rooms, room)
        waiting[room].append(bin_number)

    for room in open_rooms.tolist():
        push(room, count)
        count += 1
    result = np.empty(len(costs), dtype=np.int64)
    for i, cost in enumerate(costs.tolist()):
        at = bisect.bisect_left(rooms, cost)
        if at == len(rooms):
            push(capacity, count)
            count += 1
        room = rooms[at]
        bin_number = waiting[room].popleft()
        if not waiting[room]:
            del rooms[at]
        push(room - cost, bin_number)
        result[i] = bin_number
    return result


def best_fit_decreasing(costs: Int64, capacity: int) -> Int64:
    """Best fit, longest document first, equals in their given order: int64 `[n]`."""
    _check(costs, capacity)
    order = np.argsort(-costs, kind="stable")
    result = np.empty(len(costs), dtype=np.int64)
    result[order] = best_fit(costs[order], capacity, np.zeros(0, dtype=np.int64))
    return result


def greedy_workload(
    costs: Int64, workloads: Int64, capacity: int, rooms: Int64, loads: Int64
) -> Int64:
    """Put each document, in the given order, into the bin of least workload that has room.

    Args:
        costs: int64 `[n]`, tokens that a document takes.
        workloads: int64 `[n]`, compute that it costs.
        capacity: upper bound of costs and rooms.
        rooms: int64 `[b]`, room left in each bin.
        loads: int64 `[b]`, workload of each bin so far.

    Returns:
        int64 `[n]`, bin of each document or -1. Ties go to the lower bin.
    """
    _check(costs, capacity)
    _check(rooms, capacity)
    room = rooms.tolist()
    heap = [(load, number) for number, load in enumerate(loads.tolist())]
    heapq.heapify(heap)
    result = np.full(len(costs), -1, dtype=np.int64)
    for i, cost in enumerate(costs.tolist()):
        aside = []
        while heap:
            load, number = heapq.heappop(heap)
            if room[number] >= cost:
                room[number] -= cost
                result[i] = number
                aside.append((load + int(workloads[i]), number))
                break
            aside.append((load, number))
        for entry in aside:
            heapq.heappush(heap, entry)
    return result
