"""PackPlan: boundaries found once, everything else a gather through them.

```
raw rows          a b c E d e E _          f g h i j E _ _        E: EOD, _: pad
segments          [a b c E] [d e E]        [f g h i j E]
cu_seqlens        0 4 7 13
cu_seqlens_padded 0 4 8 16                                        segments aligned to 4
tokens            a b c E d e E _ f g h i j E _ _
labels (depth 0)  b c E . e E . . g h i j E . . .                 . : unsupervised
```

Targets: the target of depth k at a position is the token `1 + k` places on *in the same
document*, if the data holds it; otherwise the position is unsupervised. `extents` says how many
tokens of its document the data holds from a segment's start on: its length, plus the extra label
token where the end of the row cuts the document.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.packed.packing import checks
from megatron.packed.packing.alignment import Alignment
from megatron.packed.packing.native import core
from megatron.packed.packing.plan_fields import PlanFields
from megatron.packed.packing.views import PackStatistics, PackView, PartitionLike

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class PackPlan(PlanFields):
    """A pack, and all that can be asked of it: gathers, shares, chunks, counts.

    What it holds is described in `PlanFields`.
    """

    @cached_property
    def full(self) -> PackView:
        """The whole pack as a view."""
        piece = core.whole_pieces(self.lengths, self.cu_seqlens_padded)
        return PackView(plan=self, pieces=piece, step=1, num_tokens=self.total_tokens)

    @property
    def position_ids(self) -> Int64:
        """Position in the segment, 0 in padding: int64 `[T]`."""
        return self.full.position_ids

    @property
    def document_ids(self) -> Int32:
        """Segment number in the pack, -1 in padding: int32 `[T]`."""
        return self.full.document_ids

    @property
    def valid_mask(self) -> NDArray[np.bool_]:
        """Tokens of a segment, as opposed to padding: bool `[T]`."""
        return self.full.valid_mask

    def loss_mask(self, depth: int = 0) -> NDArray[np.bool_]:
        """Supervised positions of a depth: bool `[T]`. See `PackView.loss_mask`."""
        return self.full.loss_mask(depth)

    def gather_tokens(self, rows: Any, *, fill: int | None = None) -> Int64:
        """Input tokens of the pack: int64 `[T]`. See `PackView.gather_tokens`."""
        return self.full.gather_tokens(rows, fill=fill)

    def gather_labels(self, rows: Any, depth: int = 0, *, fill: int = 0) -> Int64:
        """Targets of a depth: int64 `[T]`. See `PackView.gather_labels`."""
        return self.full.gather_labels(rows, depth, fill=fill)

    def local(self, partition: PartitionLike, rank: int) -> PackView:
        """One context-parallel rank's share, gathered straight from the raw rows.

        Args:
            partition: a `packing.partition.Partition` of this pack.
            rank: context-parallel rank.

        Raises:
            ValueError: for a partition of another number of tokens.
        """
        if partition.total_tokens != self.total_tokens:
            raise ValueError(
                f"partition: made for {partition.total_tokens} tokens, the pack has "
                f"{self.total_tokens}"
            )
        starts, counts, step = partition.runs(rank)
        piece = core.pieces(self.lengths, self.cu_seqlens_padded, starts, counts, step)
        return PackView(plan=self, pieces=piece, step=step, num_tokens=int(counts.sum()))

    def chunk(self, num_chunks: int, *, capacity: int | None = None) -> list[PackPlan]:
        """Cut into plans of whole segments, for schedules that split a micro-batch.

        The chunks read the same raw rows, share no segment and hold them all. Each is a plan of
        its own: align, partition and gather it like any other. `valid_tokens_per_row` and
        `whole_pack_valid_tokens` stay those of the whole pack; all else is the chunk's.

        Args:
            num_chunks: at most the number of segments.
            capacity: pad every chunk to this many tokens.
        """
        edges = chunk_edges(self.cu_seqlens_padded, num_chunks)
        result = []
        for a, b in zip(edges[:-1], edges[1:], strict=True):
            part = assemble(
                rows=self.rows[a:b],
                offsets=self.offsets[a:b],
                lengths=self.lengths[a:b],
                extents=self.extents[a:b],
                valid_tokens_per_row=self.valid_tokens_per_row,
                row_width=self.row_width,
                pad_id=self.pad_id,
                extra_token=self.extra_token,
                alignment=self.alignment,
                capacity=capacity,
            )
            result.append(replace(part, whole_pack_valid_tokens=self.whole_pack_valid_tokens))
        return result

    def segment_targets(self, depth: int = 0, supervised: Any = None) -> Int64:
        """Positions of each segment with a target of this depth: int64 `[n]`.

        Args:
            depth: 0 for the main loss.
            supervised: see `PackView.target_mask`; None where every token is a target.
        """
        if supervised is not None:
            segments = self.document_ids[self.full.target_mask(supervised, depth)]
            return np.bincount(segments, minlength=self.num_segments)
        shift = 1 + checks.integer("depth", depth, 0)
        return np.maximum(np.minimum(self.extents - shift, self.lengths), 0)

    def supervised_tokens(self, depth: int = 0) -> int:
        """Positions with a target of this depth."""
        return int(self.segment_targets(depth).sum())

    @cached_property
    def statistics(self) -> PackStatistics:
        """Counts of this pack."""
        _, _, filled, supervised, squares = core.summary(
            self.lengths, self.extents, self.cu_seqlens_padded
        )
        real = self.cu_seqlens.item(-1)
        return PackStatistics(
            num_segments=filled,
            real_tokens=real,
            padded_tokens=self.total_tokens - real,
            supervised_tokens=supervised,
            sum_squared_lengths=squares,
        )

    @classmethod
    def from_documents(
        cls,
        lengths: Any,
        pad_id: int,
        *,
        lookahead: Any = None,
        alignment: Alignment | int = 1,
        capacity: int | None = None,
    ) -> PackPlan:
        """Plan a pack of given documents, or pieces of them, stored end to end.

        Args:
            lengths: integers `[n]`, tokens of each document; 0 is legal.
            pad_id: token written into padding.
            lookahead: integers `[n]`, tokens stored right after each piece that continue its
                document (1 for all but the last piece of a split one); they serve as targets
                and are no inputs. None for whole documents.
            alignment: see `build_pack_plan`.
            capacity: see `build_pack_plan`.

        Raises:
            ValueError: for negative lengths or a pack over capacity or over 2**31 - 1 tokens.
        """
        size = np.ascontiguousarray(checks.integer_array("lengths", lengths, 1))
        if len(size) and size.min() < 0:
            raise ValueError(f"lengths: must not be negative, got {size.min()}")
        after = np.zeros_like(size)
        if lookahead is not None:
            after = checks.integer_array("lookahead", lookahead, 1)
            if after.shape != size.shape or (len(after) and after.min() < 0):
                raise ValueError(f"lookahead: needs {len(size)} values that are not negative")
        if len(size) and max(int(size.max()), int(after.max())) > 2**31 - 1:
            raise ValueError("lengths: one document exceeds 2**31 - 1 tokens")
        extents = size + after
        return assemble(
            rows=np.zeros_like(size),
            offsets=np.cumsum(extents) - extents,
            lengths=size,
            extents=extents,
            valid_tokens_per_row=np.array([size.sum()], dtype=np.int64),
            row_width=int(extents.sum()),
            pad_id=checks.integer("pad_id", pad_id),
            extra_token=None,
            alignment=as_alignment(alignment),
            capacity=capacity,
        )


def chunk_edges(cu_seqlens_padded: Int32, num_chunks: int) -> list[int]:
    """Segment numbers at which a pack is cut into chunks of about equal padded length."""
    num_segments = len(cu_seqlens_padded) - 1
    num_chunks = checks.integer("num_chunks", num_chunks, 1)
    if num_chunks > num_segments:
        raise ValueError(
            f"num_chunks: {num_chunks} chunks of whole segments, but the pack has {num_segments}"
        )
    edges = [0]
    total = int(cu_seqlens_padded[-1])
    for i in range(1, num_chunks):
        near = int(np.searchsorted(cu_seqlens_padded, total * i / num_chunks))
        # Every chunk gets a segment, whatever their lengths.
        edges.append(min(max(near, edges[-1] + 1), num_segments - (num_chunks - i)))
    return [*edges, num_segments]


def as_alignment(alignment: Alignment | int) -> Alignment:
    if isinstance(alignment, Alignment):
        return alignment
    return _segment_alignment(checks.integer("alignment", alignment, 1))


@lru_cache(maxsize=16)
def _segment_alignment(multiple: int) -> Alignment:
    return Alignment(segment=multiple)


def assemble(
    *,
    rows: Int64,
    offsets: Int64,
    lengths: Int64,
    extents: Int64,
    valid_tokens_per_row: Int64,
    row_width: int,
    pad_id: int,
    extra_token: Int64 | None,
    alignment: Alignment,
    capacity: int | None,
    layout: tuple[Int32, Int32] | None = None,
) -> PackPlan:
    """Lay the segments out and close the pack with its tail padding."""
    if len(lengths) == 0:
        rows = offsets = lengths = extents = np.zeros(1, dtype=np.int64)
        layout = None
    cu_seqlens, cu_padded = core.layout(lengths, alignment.segment) if layout is None else layout
    aligned, real = cu_padded.item(-1), cu_seqlens.item(-1)
    multiple = alignment.pack_multiple
    total = max(aligned + (-aligned) % multiple, multiple)
    if capacity is not None:
        capacity = checks.integer("capacity", capacity, 1)
        if capacity % multiple:
            raise ValueError(
                f"capacity: {capacity} is no multiple of {multiple}, which the layout needs; "
                f"use {capacity + (-capacity) % multiple}"
            )
        if total > capacity:
            raise ValueError(
                f"capacity: the pack needs {total} tokens and the capacity is {capacity}; raise "
                "--packed-sequence-capacity or lower --micro-batch-size"
            )
        total = capacity
    if total > 2**31 - 1:
        raise ValueError(f"tokens: a pack of {total} tokens exceeds 2**31 - 1")
    if total != aligned:
        cu_padded[-1] = total
    if total == real:
        # No segment is shorter than its slot, or the ends would differ.
        cu_padded = cu_seqlens
    max_seqlen, max_seqlen_padded, *_ = core.summary(lengths, extents, cu_padded)
    return PackPlan(
        rows=rows,
        offsets=offsets,
        lengths=lengths,
        extents=extents,
        cu_seqlens=cu_seqlens,
        cu_seqlens_padded=cu_padded,
        total_tokens=total,
        max_seqlen=max_seqlen,
        max_seqlen_padded=max_seqlen_padded,
        valid_tokens_per_row=valid_tokens_per_row,
        row_width=row_width,
        pad_id=pad_id,
        extra_token=extra_token,
        alignment=alignment,
        whole_pack_valid_tokens=real,
    )
