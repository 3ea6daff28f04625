"""Where the segments of a stream lie, as plain integers, in the shape the kernels want them.

Today's engine computes causal attention inside each segment and nothing across. The kernels see a
stream as ``rows`` equal rows of ``row_length`` token slots (a THD pack is one row of T slots, a
BSHD micro-batch is B rows of S slots) and a list of *runs*: equally long segments at a constant
distance, which one batched kernel call computes.

Source: facts measured for this project (a loop over documents beats one call with a document
mask), `PackedSeqParams` of megatron-core for real and padded boundaries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np


@dataclass(frozen=True)
class Run:
    """``count`` segments of ``length`` tokens, the first at slot ``start``, ``stride`` slots apart.

    Slots are counted in the flattened, row-major stream. A run lies in one row, or has one
    segment in each of ``count`` rows at the same offset (``stride`` is then the row length).
    """

    start: int
    length: int
    count: int
    stride: int


@dataclass(frozen=True)
class SegmentLayout:
    """All segments of one micro-batch.

    Attributes:
        rows: Number of rows in the stream.
        row_length: Token slots in each row.
        starts: First slot of each non-empty segment in the flattened stream, ascending.
        lengths: Real tokens of each non-empty segment.
        runs: The same segments grouped for batched calls, in stream order.
    """

    rows: int
    row_length: int
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    runs: tuple[Run, ...]

    @cached_property
    def table(self) -> np.ndarray:
        """int64 ``[segments, 3]``: row, first slot in the row, length; for compiled kernels."""
        starts = np.array(self.starts, dtype=np.int64)
        rows, offsets = np.divmod(starts, self.row_length)
        return np.stack((rows, offsets, np.array(self.lengths, dtype=np.int64)), axis=1)

    @cached_property
    def is_dense(self) -> bool:
        """Whether every slot belongs to a segment, so that no zero has to be written."""
        return sum(self.lengths) == self.rows * self.row_length


def build_segment_layout(
    starts: Iterable[int], lengths: Iterable[int], *, rows: int, row_length: int
) -> SegmentLayout:
    """Check segments and group them into runs.

    Args:
        starts: First slot of each segment in the flattened stream, ascending.
        lengths: Real tokens of each segment; segments of length 0 are dropped (the flash
            operator divides by the length and kills the process).
        rows: Number of rows.
        row_length: Slots per row.

    Returns:
        The layout.

    Raises:
        ValueError: If segments overlap, cross a row or leave the stream.
    """
    kept = [(int(s), int(n)) for s, n in zip(starts, lengths, strict=True) if n]
    end = 0
    for start, length in kept:
        if length < 0 or start < end:
            raise ValueError(
                f"segment of {length} tokens at slot {start} overlaps the one that ends at slot "
                f"{end}: boundaries must ascend"
            )
        end = start + length
        if end > rows * row_length:
            raise ValueError(
                f"a segment ends at slot {end}, but the stream has {rows} x {row_length} slots"
            )
        if start // row_length != (end - 1) // row_length:
            raise ValueError(
                f"segment of {length} tokens at slot {start} crosses the end of a row of "
                f"{row_length} slots: cut segments at row ends"
            )
    return SegmentLayout(
        rows=rows,
        row_length=row_length,
        starts=tuple(s for s, _ in kept),
        lengths=tuple(n for _, n in kept),
        runs=_group_runs(kept, row_length),
    )


def _group_runs(segments: Sequence[tuple[int, int]], row_length: int) -> tuple[Run, ...]:
    """Group neighbours of equal length at a constant distance that one strided view can express."""
    runs: list[Run] = []
    for start, length in segments:
        last = runs[-1] if runs else None
        if last is not None and last.length == length:
            stride = start - (last.start + (last.count - 1) * last.stride)
            fits = last.count == 1 or stride == last.stride
            same_row = last.start // row_length == start // row_length
            # A stride in slots is a constant stride in memory inside one row, or from row to row.
            if fits and (same_row or stride == row_length):
                runs[-1] = Run(last.start, length, last.count + 1, stride)
                continue
        runs.append(Run(start, length, 1, row_length))
    return tuple(runs)


@lru_cache(maxsize=16)
def packed_layout(
    cu_seqlens: tuple[int, ...], cu_seqlens_padded: tuple[int, ...], total_tokens: int
) -> SegmentLayout:
    """Layout of a THD pack; every layer of a micro-batch asks for the same one.

    Args:
        cu_seqlens: Real boundaries, starting at 0.
        cu_seqlens_padded: Padded boundaries, as many as real ones.
        total_tokens: Slots T of the pack.

    Returns:
        One row of T slots with a segment at each padded boundary.

    Raises:
        ValueError: If real and padded boundaries disagree.
    """
    if len(cu_seqlens) != len(cu_seqlens_padded):
        raise ValueError(
            f"{len(cu_seqlens)} real but {len(cu_seqlens_padded)} padded boundaries: "
            "both describe the same segments"
        )
    lengths = [b - a for a, b in pairwise(cu_seqlens)]
    room = [b - a for a, b in pairwise(cu_seqlens_padded)]
    for index, (length, slots) in enumerate(zip(lengths, room, strict=True)):
        if length > slots:
            raise ValueError(
                f"segment {index} has {length} tokens but {slots} padded slots: real and padded "
                "boundaries are swapped or belong to different packs"
            )
    return build_segment_layout(
        cu_seqlens_padded[:-1], lengths, rows=1, row_length=max(total_tokens, 1)
    )


@lru_cache(maxsize=16)
def row_layout(rows: int, row_length: int, boundaries: tuple[int, ...] | None) -> SegmentLayout:
    """Layout of a BSHD micro-batch.

    Args:
        rows: Batch size B.
        row_length: Sequence length S.
        boundaries: Segment boundaries over the flattened ``[B*S]`` stream, from 0 to B*S, or
            None for one segment per row.

    Returns:
        B rows of S slots.

    Raises:
        ValueError: If boundaries do not cover the stream exactly.
    """
    if boundaries is None:
        starts: Iterable[int] = range(0, rows * row_length, row_length)
        return build_segment_layout(starts, [row_length] * rows, rows=rows, row_length=row_length)
    if not boundaries or boundaries[0] != 0 or boundaries[-1] != rows * row_length:
        raise ValueError(
            f"segment boundaries {list(boundaries[:4])}... must run from 0 to {rows * row_length} "
            f"({rows} rows of {row_length})"
        )
    return build_segment_layout(
        boundaries[:-1],
        [b - a for a, b in pairwise(boundaries)],
        rows=rows,
        row_length=row_length,
    )
