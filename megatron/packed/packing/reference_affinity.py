"""Definition of the dispatch that keeps documents together; see `reference.py`.

The min-heap dispatch deals a document's chunks out like cards, and every rank then needs most of
its keys. Here chunks of equal size change places after it, two at a time, while that saves rows
and no rank's work rises above a limit: mean + 1 %, or what the rank had.

```
chunks          a a a a a a b b c c d d        two ranks, equal work
min-heap        0 1 0 1 1 0 1 0 0 1 1 0        everything travels
settled         0 0 1 1 1 0 0 0 1 1 ...        documents lie together where the work allows it
```

Under a causal mask a rank needs a document's rows up to the end of its own last chunk of it. So
only that last chunk counts, and an exchange is judged by the at most four documents that reach
over an edge of its two chunks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class _Document:
    """A document that reaches over a chunk's edge: its chunks, its real tokens in the pack."""

    first: int
    last: int
    begin: int
    end: int


@dataclass
class _Settlement:
    """An assignment of chunks to ranks, and what it costs to change it."""

    ranks: list[int]
    areas: list[int]
    classes: list[int]
    edges: list[int]
    loads: list[int]
    held: list[list[int]]
    documents: list[_Document] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)

    def find_documents(self, begins: list[int], lengths: list[int]) -> None:
        """Number the documents that reach over a chunk's edge."""
        count = len(self.ranks)
        self.left, self.right = [-1] * count, [-1] * count
        for begin, length in zip(begins, lengths, strict=True):
            if length < 1:
                continue
            # Edges are distinct but for chunks without a token, which touch no document.
            first = min(max(bisect_right(self.edges, begin) - 1, 0), count - 1)
            last = max(bisect_left(self.edges, begin + length) - 1, first)
            last = min(last, count - 1)
            if last == first:
                continue
            for chunk in range(first, last):
                self.right[chunk] = self.left[chunk + 1] = len(self.documents)
            self.documents.append(_Document(first, last, begin, begin + length))

    def reach(self, document: _Document, rank: int, gone: int = -1, come: int = -1) -> int:
        """Rows of a document that a rank needs, with one chunk gone from it and one come."""
        held = self.held[rank]
        at = bisect_right(held, document.last)
        if at and held[at - 1] == gone:
            at -= 1
        last = held[at - 1] if at else -1
        if come <= document.last:
            last = max(last, come)
        if last < document.first:
            return 0
        return min(self.edges[last + 1], document.end) - document.begin

    def gain(self, x: int, y: int) -> int:
        """Rows that no longer travel when x and y change places."""
        a, b = self.ranks[x], self.ranks[y]
        saved = 0
        for number in {self.left[x], self.right[x], self.left[y], self.right[y]} - {-1}:
            document = self.documents[number]
            saved += self.reach(document, a) + self.reach(document, b)
            saved -= self.reach(document, a, x, y) + self.reach(document, b, y, x)
        return saved

    def swap(self, x: int, y: int) -> None:
        """Let two chunks change places."""
        a, b = self.ranks[x], self.ranks[y]
        for rank, old, new in ((a, x, y), (b, y, x)):
            self.held[rank].remove(old)
            insort(self.held[rank], new)
            self.loads[rank] += self.areas[new] - self.areas[old]
        self.ranks[x], self.ranks[y] = b, a

    def balance(self, limit: int, budget: int) -> None:
        """Take area from the fullest rank until none is above the limit."""
        while budget > 0:
            most, least = max(self.loads), min(self.loads)
            full, idle = self.loads.index(most), self.loads.index(least)
            if most <= limit:
                return
            best, pair = most, None
            for x in self.held[full]:
                for y in self.held[idle]:
                    moved = self.areas[x] - self.areas[y]
                    after = max(most - moved, least + moved)
                    if self.classes[x] == self.classes[y] and after < best:
                        best, pair = after, (x, y)
            if pair is None:
                return
            budget -= len(self.held[full]) ** 2 + len(self.loads)
            self.swap(*pair)

    def gather(self, limit: int, budget: int) -> None:
        """Bring chunks to ranks that hold a neighbour of the same document."""
        better = True
        while better and budget > 0:
            better = False
            for x, rank in enumerate(self.ranks):
                if budget <= 0:
                    break
                best, best_y = 0, -1
                before = self.ranks[x - 1] if self.left[x] >= 0 else rank
                after = self.ranks[x + 1] if self.right[x] >= 0 else rank
                for to in dict.fromkeys((before, after)):
                    if to == rank:
                        continue
                    for y in self.held[to]:
                        moved = self.areas[x] - self.areas[y]
                        if (
                            self.classes[x] != self.classes[y]
                            or self.loads[to] + moved > max(limit, self.loads[to])
                            or self.loads[rank] - moved > max(limit, self.loads[rank])
                        ):
                            continue
                        budget -= 1
                        saved = self.gain(x, y)
                        if saved > best:
                            best, best_y = saved, y
                if best_y >= 0:
                    self.swap(x, best_y)
                    better = True

    def rows(self) -> int:
        """Rows that ranks need of the documents, their own included."""
        return sum(
            self.reach(document, rank)
            for document in self.documents
            for rank in set(self.ranks[document.first : document.last + 1])
        )


def settle_ranks(
    ranks: Int64,
    areas: Int64,
    classes: Int64,
    begins: Int64,
    lengths: Int64,
    edges: Int64,
    cp_size: int,
) -> tuple[Int64, int]:
    """Exchange chunks between ranks, first for balance, then to keep documents together.

    Args:
        ranks: int64 `[c]`, rank of each chunk to begin with.
        areas: int64 `[c]`, attention work of each chunk.
        classes: int64 `[c]`: chunks change places within their class alone.
        begins: int64 `[n]`, first pack position of each segment, ascending.
        lengths: int64 `[n]`, real tokens of each segment.
        edges: int64 `[c + 1]`, chunk boundaries.
        cp_size: ranks.

    Returns:
        int64 `[c]`, the rank of each chunk; every rank has as many of each class as before. And
        the rows that ranks need of documents that reach over a chunk's edge, own rows included.
    """
    if len(areas) != len(ranks) or len(classes) != len(ranks) or len(edges) != len(ranks) + 1:
        raise ValueError("areas: one per chunk")
    held: list[list[int]] = [[] for _ in range(cp_size)]
    loads = [0] * cp_size
    for chunk, (rank, area) in enumerate(zip(ranks.tolist(), areas.tolist(), strict=True)):
        held[rank].append(chunk)
        loads[rank] += area
    settlement = _Settlement(
        ranks.tolist(), areas.tolist(), classes.tolist(), edges.tolist(), loads, held
    )
    settlement.find_documents(begins.tolist(), lengths.tolist())
    mean = sum(loads) // cp_size
    limit = mean + mean // 100
    # Bounds the time for very many chunks; at 16 a rank the search ends long before.
    budget = min(64 * len(ranks), 250_000)
    settlement.balance(limit, budget)
    settlement.gather(limit, budget)
    return np.array(settlement.ranks, dtype=np.int64), settlement.rows()
