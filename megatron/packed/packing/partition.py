"""Who holds which position of a padded pack: a permutation cut in `cp_size` equal parts.

```
one segment of 16 tokens, cp = 2                which rank holds position 0 .. 15
contiguous    0 0 0 0 0 0 0 0 1 1 1 1 1 1 1 1   one block a rank
zigzag        0 0 0 0 1 1 1 1 1 1 1 1 0 0 0 0   2 * cp chunks of every segment, first with last
zigzag_pack   the same over the whole pack, whatever its segments
striped       0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1   round robin
dispatch      0 0 1 1 1 1 0 0 0 0 1 1 1 1 0 0   chunks to ranks by attention work
  affinity    0 0 0 0 1 1 1 1 1 1 1 1 0 0 0 0   the same, keeping documents together
```

A partition is a pure host-side function of the boundaries. What it can't split exactly it
refuses: no token is ever dropped or held twice. Positions are padded pack positions, so RoPE,
masks and losses take theirs from the plan and never guess them from a layout.

Sources: zigzag per segment is TransformerEngine's `thd_get_partitioned_indices` and
ring-flash-attention's zigzag varlen; striped is Brandon et al. 2023 (Striped Attention); dispatch
follows MagiAttention's min-heap solver.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.packed.packing import checks
from megatron.packed.packing.alignment import PARTITIONS
from megatron.packed.packing.native import core

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]

# Fewer chunks per rank leave the heap too little to balance with: up to 1.6x at 8.
DISPATCH_CHUNKS_PER_RANK = 16
# Over all ranks: where the heap's chunks can't be balanced, finer ones may. Bounds the search.
MAX_CHUNKS = 4096


@dataclass(frozen=True, eq=False)
class Partition:
    """One way to share a pack out over context-parallel ranks.

    Attributes:
        kind: one of `PARTITIONS`.
        cp_size: ranks.
        cu_seqlens_padded: int32 `[n + 1]`, aligned boundaries of the pack.
        cu_seqlens: int32 `[n + 1]`, real boundaries; the aligned ones where they weren't given.
        chunk_edges: int64 `[c + 1]`, chunk boundaries (dispatch only).
        chunk_ranks: int64 `[c]`, rank of each chunk (dispatch only).
    """

    kind: str
    cp_size: int
    cu_seqlens_padded: Int32
    cu_seqlens: Int32
    chunk_edges: Int64 | None = None
    chunk_ranks: Int64 | None = None

    @property
    def total_tokens(self) -> int:
        """T, tokens of the padded pack."""
        return int(self.cu_seqlens_padded[-1])

    @property
    def local_tokens(self) -> int:
        """T / CP, tokens that each rank holds."""
        return self.total_tokens // self.cp_size

    def runs(self, cp_rank: int) -> tuple[Int64, Int64, int]:
        """Positions of one rank as ascending runs.

        Args:
            cp_rank: context-parallel rank.

        Returns:
            starts int64 `[r]`, counts int64 `[r]`, and the step inside a run.
        """
        rank = checks.integer("cp_rank", cp_rank, 0)
        if rank >= self.cp_size:
            raise ValueError(f"cp_rank: must be below cp_size = {self.cp_size}, got {rank}")
        share = self.local_tokens
        match self.kind:
            case _ if self.cp_size == 1 or self.kind == "contiguous":
                return np.array([rank * share]), np.array([share]), 1
            case "striped":
                return np.array([rank]), np.array([share]), self.cp_size
            case "zigzag":
                return *core.zigzag_runs(self.cu_seqlens_padded, self.cp_size, rank), 1
            case "zigzag_pack":
                whole = np.array([0, self.total_tokens], dtype=np.int32)
                return *core.zigzag_runs(whole, self.cp_size, rank), 1
        assert self.chunk_edges is not None and self.chunk_ranks is not None  # dispatch
        mine = np.flatnonzero(self.chunk_ranks == rank)
        return self.chunk_edges[mine], self.chunk_edges[mine + 1] - self.chunk_edges[mine], 1

    def indices(self, cp_rank: int) -> Int64:
        """Pack position of each token that a rank holds, in its local order: int64 `[T / CP]`."""
        return core.expand_runs(*self.runs(cp_rank))

    def permutation(self) -> Int64:
        """Pack positions in the order of all ranks' shares laid end to end: int64 `[T]`."""
        return np.concatenate([self.indices(rank) for rank in range(self.cp_size)])

    def inverse(self) -> Int64:
        """Where each pack position lies in all ranks' shares laid end to end: int64 `[T]`."""
        return core.inverse_permutation(self.permutation())

    def real_tokens(self) -> Int64:
        """Real tokens that each rank holds: int64 `[CP]`. Zero is legal."""
        lengths = np.diff(self.cu_seqlens).astype(np.int64)
        return np.array(
            [
                core.pieces(lengths, self.cu_seqlens_padded, *self.runs(rank))[:, 3].sum()
                for rank in range(self.cp_size)
            ],
            dtype=np.int64,
        )


def make_partition(
    kind: str,
    cu_seqlens_padded: Any,
    cp_size: int,
    *,
    total_tokens: int | None = None,
    cu_seqlens: Any = None,
    chunk_size: int | None = None,
    affinity: bool = False,
) -> Partition:
    """Share a pack out over ranks.

    Args:
        kind: one of `PARTITIONS`.
        cu_seqlens_padded: integers `[n + 1]`, aligned boundaries.
        cp_size: context-parallel ranks.
        total_tokens: tokens of the pack where the caller knows them; must equal the last
            boundary, or tokens would be lost.
        cu_seqlens: integers `[n + 1]`, real boundaries. Dispatch balances real attention work
            with them; the others use them for counts only.
        chunk_size: tokens per dispatched chunk; must divide `T / cp_size`. By default 16 chunks
            a rank (fewer in a short pack), of sizes that differ by one where it has to be.
        affinity: dispatch only: let chunks change places after the min-heap, so that documents
            lie together and less travels; no rank gets more than 1.01 times the mean work by it.
            Where 16 chunks a rank can't be balanced to 1.02 there are more. Without it the
            layout is MagiAttention's.

    Raises:
        ValueError: for boundaries that the partition can't split exactly.
    """
    cp_size = checks.integer("cp_size", cp_size, 1)
    padded = checks.boundary_array("cu_seqlens_padded", cu_seqlens_padded)
    real = padded
    if cu_seqlens is not None and cu_seqlens is not cu_seqlens_padded:
        real = checks.boundary_array("cu_seqlens", cu_seqlens)
        if len(real) != len(padded) or np.any(np.diff(real) > np.diff(padded)):
            raise ValueError("cu_seqlens: must have the padded segments, none of them longer")
    total = int(padded[-1])
    if total_tokens is not None and checks.integer("total_tokens", total_tokens, 0) != total:
        raise ValueError(
            f"cu_seqlens_padded: the last boundary is {total}, but the pack has {total_tokens} "
            "tokens; the rest would be lost"
        )
    if kind not in PARTITIONS:
        raise ValueError(f"kind: {kind!r} must be one of {', '.join(PARTITIONS)}")
    if chunk_size is not None and kind != "dispatch":
        raise ValueError(f"chunk_size: only dispatch cuts chunks, got it with {kind!r}")

    if affinity and kind != "dispatch":
        raise ValueError(f"affinity: only dispatch has it, got it with {kind!r}")

    edges = ranks = None
    match kind:
        case _ if cp_size == 1:
            pass  # Nothing is cut.
        case "zigzag":
            bad = np.flatnonzero(np.diff(padded) % (2 * cp_size))
            if len(bad):
                raise ValueError(
                    f"cu_seqlens_padded: segment {bad[0]} has {np.diff(padded)[bad[0]]} tokens, "
                    f"no multiple of 2 * cp_size = {2 * cp_size}; align segments to it"
                )
        case "zigzag_pack":
            _check_total(total, 2 * cp_size, "2 * cp_size")
        case _:
            _check_total(total, cp_size, "cp_size")
    if kind == "dispatch":
        begins, lengths = padded[:-1].astype(np.int64), np.diff(real).astype(np.int64)
        edges, ranks = _dispatch(begins, lengths, total, cp_size, chunk_size, affinity)
    return Partition(
        kind=kind,
        cp_size=cp_size,
        cu_seqlens_padded=padded,
        cu_seqlens=real,
        chunk_edges=edges,
        chunk_ranks=ranks,
    )


def _check_total(total: int, multiple: int, name: str) -> None:
    if total % multiple:
        raise ValueError(
            f"cu_seqlens_padded: {total} tokens are no multiple of {name} = {multiple}; align the "
            "pack to it"
        )


def _dispatch(
    begins: Int64,
    lengths: Int64,
    total: int,
    cp_size: int,
    chunk_size: int | None,
    affinity: bool,
) -> tuple[Int64, Int64]:
    """Chunk edges, and the rank of each chunk."""
    best: tuple[Int64, Int64] | None = None
    best_load = 0
    per_rank = DISPATCH_CHUNKS_PER_RANK
    while True:
        edges = _chunk_edges(total, cp_size, chunk_size, per_rank)
        size = np.diff(edges)
        classes = size - size.min() if len(size) else size
        areas = core.chunk_areas(begins, lengths, edges)
        ranks = core.dispatch_ranks(areas, classes, cp_size)
        if not affinity:
            return edges, ranks
        mean = int(areas.sum()) // cp_size
        limit = mean + mean // 50
        ranks, load = _settle(ranks, areas, classes, begins, lengths, edges, cp_size, limit)
        if best is None or load < best_load:
            best, best_load = (edges, ranks), load
        # One heavy chunk can outweigh a rank's fair share: cut finer.
        per_rank *= 2
        fine = per_rank * cp_size > MAX_CHUNKS or per_rank > total // cp_size
        if load <= limit or chunk_size is not None or fine:
            return best


def _settle(
    heap: Int64,
    areas: Int64,
    classes: Int64,
    begins: Int64,
    lengths: Int64,
    edges: Int64,
    cp_size: int,
    limit: int,
) -> tuple[Int64, int]:
    """Ranks of the chunks that keep documents together, and the work of the fullest rank.

    Of two beginnings the one that ends with less traffic: the heap's, and a zigzag over the whole
    pack, from which single exchanges lead to good layouts of one giant document.
    """
    found = []
    for start in (heap, _zigzag_chunks(classes, cp_size)):
        ranks, rows = core.settle_ranks(start, areas, classes, begins, lengths, edges, cp_size)
        loads = np.zeros(cp_size, dtype=np.int64)
        np.add.at(loads, ranks, areas)
        load = int(loads.max())
        found.append((max(load, limit), rows, load, ranks))
    *_, load, ranks = min(found, key=lambda each: each[:3])
    return ranks, load


def _zigzag_chunks(classes: Int64, cp_size: int) -> Int64:
    """Chunks of each class dealt in 2 * cp blocks, first with last: int64 `[c]`."""
    ranks = np.zeros_like(classes)
    for kind in (0, 1):
        chunks = np.flatnonzero(classes == kind)
        # An odd count a rank gives blocks of two sizes; first and last make up for each other.
        block = np.arange(len(chunks)) * 2 * cp_size // max(len(chunks), 1)
        ranks[chunks] = np.minimum(block, 2 * cp_size - 1 - block)
    return ranks


def _chunk_edges(total: int, cp_size: int, chunk_size: int | None, per_rank: int) -> Int64:
    share = total // cp_size
    if chunk_size is not None:
        chunk_size = checks.integer("chunk_size", chunk_size, 1)
        if share % chunk_size:
            raise ValueError(
                f"chunk_size: {chunk_size} does not divide the {share} tokens of a rank; use a "
                "divisor, or align the pack to chunk_size * cp_size"
            )
        return np.arange(0, total + 1, chunk_size, dtype=np.int64)
    # A share of 16 q + r tokens gives r chunks of q + 1 and 16 - r of q tokens to each rank.
    count = min(per_rank, max(share, 1)) * cp_size
    return np.arange(count + 1, dtype=np.int64) * total // count


def partition_indices(
    kind: str, cu_seqlens_padded: Any, cp_size: int, cp_rank: int, **options: Any
) -> Int64:
    """Pack position of each token that a rank holds: int64 `[T / CP]`.

    Args:
        kind: one of `PARTITIONS`.
        cu_seqlens_padded: integers `[n + 1]`, aligned boundaries.
        cp_size: context-parallel ranks.
        cp_rank: this rank.
        **options: those of `make_partition`.
    """
    return make_partition(kind, cu_seqlens_padded, cp_size, **options).indices(cp_rank)


def inverse_permutation(kind: str, cu_seqlens_padded: Any, cp_size: int, **options: Any) -> Int64:
    """Where each pack position lies when all ranks' shares are laid end to end: int64 `[T]`.

    `gathered[inverse_permutation(...)]` is in pack order. Arguments as in `partition_indices`.
    """
    return make_partition(kind, cu_seqlens_padded, cp_size, **options).inverse()


def real_cu_seqlens_per_rank(
    cu_seqlens: Any, cu_seqlens_padded: Any, cp_size: int, *, half: str = "both"
) -> Int32:
    """Boundaries of the real tokens that each rank holds under the per-segment zigzag.

    Args:
        cu_seqlens: integers `[n + 1]`, real boundaries.
        cu_seqlens_padded: integers `[n + 1]`, aligned boundaries.
        cp_size: context-parallel ranks.
        half: "both" chunks of a rank, its "first" chunk of each segment, or its "second".

    Returns:
        int32 `[CP, n + 1]`.
    """
    partition = make_partition("zigzag", cu_seqlens_padded, cp_size, cu_seqlens=cu_seqlens)
    length = np.diff(partition.cu_seqlens).astype(np.int64)
    chunk = np.diff(partition.cu_seqlens_padded).astype(np.int64) // (2 * cp_size)
    rank = np.arange(cp_size)[:, None]
    first = np.clip(length - rank * chunk, 0, chunk)
    second = np.clip(length - (2 * cp_size - 1 - rank) * chunk, 0, chunk)
    counts = {"both": first + second, "first": first, "second": second}
    if half not in counts:
        raise ValueError(f"half: {half!r} must be one of {', '.join(counts)}")
    result = np.zeros((cp_size, len(length) + 1), dtype=np.int32)
    np.cumsum(counts[half], axis=1, out=result[:, 1:])
    return result
