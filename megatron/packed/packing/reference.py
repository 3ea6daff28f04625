"""Numpy definition of every integer routine of this room.

`megatron.packed._C` offers the same functions, with the same arguments and results, in C++.
This file is the oracle that the C++ is tested against and the fallback where it isn't built;
read it to learn what a routine means.

Shape legend: B rows, S row length, n segments, m pieces, T output tokens.

A *piece* is a part of a segment that lies contiguously in some output:
`(destination, segment, first_position, count)`, one row of an int64 array `[m, 4]`. Output index
`destination + i` holds position `first_position + i * step` of the segment. Everything that no
piece covers is padding. One list of pieces drives tokens, labels, masks, positions and ids.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.packed.packing.reference_affinity import settle_ranks
from megatron.packed.packing.reference_packers import (
    best_fit,
    best_fit_decreasing,
    greedy_workload,
    group,
    next_fit,
)
from megatron.packed.packing.reference_partition import (
    chunk_areas,
    dispatch_ranks,
    expand_runs,
    inverse_permutation,
    zigzag_runs,
)

__all__ = [
    "best_fit",
    "best_fit_decreasing",
    "chunk_areas",
    "dispatch_ranks",
    "document_ids",
    "expand_runs",
    "gather",
    "greedy_workload",
    "group",
    "held_mask",
    "held_weights",
    "inverse_permutation",
    "layout",
    "materialise",
    "next_fit",
    "pieces",
    "plan_rows",
    "position_ids",
    "scan",
    "settle_ranks",
    "summary",
    "whole_pieces",
    "zigzag_runs",
]

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]

INT32_MAX = 2**31 - 1


def scan(
    tokens: Int64, eod_id: int, pad_id: int, row_lengths: Int64 | None
) -> tuple[Int64, Int64, Int64, NDArray[np.bool_], Int64]:
    """Find the segments of `[B, S]` rows.

    Args:
        tokens: int64 `[B, S]`.
        eod_id: closes a segment and belongs to it.
        pad_id: forms no segment and breaks the one it interrupts; may equal `eod_id`.
        row_lengths: int64 `[B]`, tokens of each row that are not tail padding, or None.

    Returns:
        rows `[n]`, offsets in the row `[n]`, lengths `[n]`, "closed by EOD" `[n]`, valid tokens
        of each row `[B]`.
    """
    num_rows, width = tokens.shape
    is_eod = tokens == eod_id
    if pad_id != eod_id:
        real = tokens != pad_id
    elif row_lengths is None:
        # One id for both: it is an EOD where it closes an open segment and padding elsewhere.
        real = ~is_eod
        real[:, 1:] |= ~is_eod[:, :-1]
    else:
        real = np.ones(tokens.shape, dtype=bool)
    if row_lengths is not None:
        real &= np.arange(width) < row_lengths[:, None]
    if np.any(real & (tokens < 0)):
        raise ValueError("tokens: negative token id in a position that is not padding")

    closes = real & is_eod
    begins = real.copy()
    begins[:, 1:] &= ~real[:, :-1] | closes[:, :-1]
    ends = real.copy()
    ends[:, :-1] &= ~real[:, 1:] | closes[:, :-1]

    first = np.flatnonzero(begins)
    last = np.flatnonzero(ends)
    rows = first // max(width, 1)
    return (
        rows.astype(np.int64),
        (first - rows * width).astype(np.int64),
        (last - first + 1).astype(np.int64),
        closes.reshape(-1)[last],
        real.sum(axis=1, dtype=np.int64),
    )


def layout(lengths: Int64, segment_multiple: int) -> tuple[Int32, Int32]:
    """Real and aligned boundaries of segments laid end to end: two int32 `[n + 1]`."""
    real = np.zeros(len(lengths) + 1, dtype=np.int64)
    padded = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=real[1:])
    np.cumsum(lengths + (-lengths) % segment_multiple, out=padded[1:])
    if padded[-1] > INT32_MAX:
        raise ValueError(f"lengths: {padded[-1]} tokens in one pack exceed 2**31 - 1")
    return real.astype(np.int32), padded.astype(np.int32)


def plan_rows(
    tokens: Int64,
    extra_token: Int64 | None,
    eod_id: int,
    pad_id: int,
    row_lengths: Int64 | None,
    segment_multiple: int,
) -> tuple[Int64, Int32, Int32, Int64]:
    """Scan, extents and layout of a batch of rows.

    Returns:
        int64 `[4, n]` (source row, offset, length, extent of each segment), real and aligned
        boundaries int32 `[n + 1]`, valid tokens of each row int64 `[B]`.
    """
    width = tokens.shape[1]
    rows, offsets, lengths, closed, valid = scan(tokens, eod_id, pad_id, row_lengths)
    extents = lengths
    if extra_token is not None:
        held = np.ones(len(tokens), dtype=bool)
        if row_lengths is not None:
            held &= row_lengths == width + 1
        if pad_id != eod_id:
            held &= extra_token != pad_id
        goes_on = (offsets + lengths == width) & ~closed & held[rows]
        if np.any(extra_token[rows[goes_on]] < 0):
            raise ValueError("extra_token: negative token id in a row that is not padded")
        extents = lengths + goes_on
    real, padded = layout(lengths, segment_multiple)
    return np.stack([rows, offsets, lengths, extents]), real, padded, valid


def summary(
    lengths: Int64, extents: Int64, cu_seqlens_padded: Int32
) -> tuple[int, int, int, int, int]:
    """Sizes and counts of a pack.

    Returns:
        Longest segment, longest padded segment, segments with a token, positions with a depth-0
        target, sum of squared lengths.
    """
    return (
        int(lengths.max(initial=0)),
        int(np.diff(cu_seqlens_padded).max(initial=0)),
        int(np.count_nonzero(lengths)),
        int(np.maximum(np.minimum(extents - 1, lengths), 0).sum()),
        int(np.dot(lengths, lengths)),
    )


def whole_pieces(lengths: Int64, cu_seqlens_padded: Int32) -> Int64:
    """`pieces` of the whole pack: one for every segment with a token, int64 `[m, 4]`."""
    segment = np.flatnonzero(lengths > 0)
    begin = cu_seqlens_padded[segment].astype(np.int64)
    return np.stack([begin, segment, np.zeros_like(segment), lengths[segment]], axis=1)


def pieces(
    lengths: Int64, cu_seqlens_padded: Int32, starts: Int64, counts: Int64, step: int
) -> Int64:
    """Cut runs of global positions at segment ends and at the start of padding.

    Args:
        lengths: int64 `[n]`, real tokens of each segment.
        cu_seqlens_padded: int32 `[n + 1]`.
        starts: int64 `[r]`, first global position of each run, runs ascending and disjoint.
        counts: int64 `[r]`, tokens in each run.
        step: distance between neighbouring positions of a run.

    Returns:
        pieces, int64 `[m, 4]`, in output order.
    """
    total = int(counts.sum())
    empty = np.zeros((0, 4), dtype=np.int64)
    if total == 0 or len(lengths) == 0:
        return empty
    destination = np.arange(total, dtype=np.int64)
    run_begin = np.cumsum(counts) - counts
    position = np.repeat(starts, counts) + (destination - np.repeat(run_begin, counts)) * step
    padded = cu_seqlens_padded.astype(np.int64)
    segment = np.searchsorted(padded, position, side="right") - 1
    segment = np.minimum(segment, len(lengths) - 1)
    inside = position - padded[segment]
    real = inside < lengths[segment]
    destination, segment, inside = destination[real], segment[real], inside[real]
    if len(destination) == 0:
        return empty
    new = np.ones(len(destination), dtype=bool)
    new[1:] = (
        (segment[1:] != segment[:-1])
        | (inside[1:] != inside[:-1] + step)
        | (destination[1:] != destination[:-1] + 1)
    )
    first = np.flatnonzero(new)
    size = np.diff(np.append(first, len(destination)))
    return np.stack([destination[first], segment[first], inside[first], size], axis=1)


def _output(out: Any, size: int, dtype: type, fill: int) -> Any:
    """The caller's buffer, or a new one, filled."""
    if out is None:
        return np.full(size, fill, dtype=dtype)
    if out.dtype != dtype or out.shape != (size,):
        raise ValueError(f"out: needs {np.dtype(dtype)} of {size} values")
    out[:] = fill
    return out


def _expand(piece: Int64, step: int) -> tuple[Int64, Int64, Int64]:
    """Destination, segment and position in the segment of every real output token."""
    count = piece[:, 3]
    local = np.arange(int(count.sum()), dtype=np.int64) - np.repeat(np.cumsum(count) - count, count)
    return (
        np.repeat(piece[:, 0], count) + local,
        np.repeat(piece[:, 1], count),
        np.repeat(piece[:, 2], count) + local * step,
    )


def gather(
    source: Int64,
    extra: Int64 | None,
    rows: Int64,
    offsets: Int64,
    extents: Int64,
    piece: Int64,
    step: int,
    shift: int,
    size: int,
    fill: int,
    out: Int64 | None = None,
) -> Int64:
    """Gather the token `shift` places after each position of its own segment.

    Args:
        source: int64 `[B, W]` raw rows.
        extra: int64 `[B]`, the token after column `W - 1`, or None.
        rows: int64 `[n]`, source row of each segment.
        offsets: int64 `[n]`, first column of each segment.
        extents: int64 `[n]`, tokens that the data holds from the segment's start on.
        piece: int64 `[m, 4]`.
        step: position step inside a piece.
        shift: 0 for the tokens themselves, `1 + k` for targets of depth k.
        size: output length T.
        fill: value where the segment has no such token, and in padding.
        out: int64 `[T]` to write into, or None for a new array.

    Returns:
        int64 `[T]`.
    """
    out = _output(out, size, np.int64, fill)
    destination, segment, position = _expand(piece, step)
    held = position + shift < extents[segment]
    destination, segment, position = destination[held], segment[held], position[held]
    column = offsets[segment] + position + shift
    row = rows[segment]
    if extra is None:
        out[destination] = source[row, column]
    else:
        beyond = column == source.shape[1]
        out[destination] = np.where(beyond, extra[row], source[row, np.where(beyond, 0, column)])
    return out


def held_mask(
    extents: Int64, piece: Int64, step: int, shift: int, size: int, out: Any = None
) -> NDArray[np.bool_]:
    """Positions whose segment holds the token `shift` places on: bool `[T]`."""
    out = _output(out, size, np.bool_, 0)
    destination, segment, position = _expand(piece, step)
    out[destination] = position + shift < extents[segment]
    return out


def held_weights(
    extents: Int64, piece: Int64, step: int, shift: int, size: int, out: Any = None
) -> NDArray[np.float32]:
    """`held_mask` as 0.0 and 1.0: float32 `[T]`."""
    out = _output(out, size, np.float32, 0)
    out[:] = held_mask(extents, piece, step, shift, size)
    return out


def position_ids(piece: Int64, step: int, size: int, out: Any = None) -> Int64:
    """Position of each token in its segment, 0 in padding: int64 `[T]`."""
    out = _output(out, size, np.int64, 0)
    destination, _, position = _expand(piece, step)
    out[destination] = position
    return out


def document_ids(piece: Int64, size: int, out: Any = None) -> Int32:
    """Segment number of each token, -1 in padding: int32 `[T]`."""
    out = _output(out, size, np.int32, -1)
    destination, segment, _ = _expand(piece, 1)
    out[destination] = segment
    return out


def materialise(
    source: Int64,
    extra: Int64 | None,
    rows: Int64,
    offsets: Int64,
    extents: Int64,
    piece: Int64,
    step: int,
    token_fill: int,
    label_fill: int,
    cu_seqlens: Int32,
    cu_seqlens_padded: Int32,
    valid_tokens_per_row: Int64,
    size: int,
    depths: int,
    places: tuple[int, ...],
    buffer: NDArray[np.uint8],
) -> None:
    """Write all that a step reads into one buffer.

    Args:
        source, extra, rows, offsets, extents, piece, step: as in `gather`.
        token_fill: token of padding.
        label_fill: label of unsupervised positions.
        cu_seqlens, cu_seqlens_padded: int32 `[n + 1]`, copied.
        valid_tokens_per_row: int64 `[B]`, copied.
        size: T.
        depths: D, target depths.
        places: first byte of tokens int64 `[T]`, positions int64 `[T]`, labels int64 `[D, T]`,
            weights float32 `[D, T]` (1.0 where supervised), document ids int32 `[T]`, valid mask
            bool `[T]`, then of the three copies.
        buffer: uint8, holds them all.
    """

    def array(place: int, dtype: type, *shape: int) -> Any:
        return np.ndarray(shape, dtype, buffer, place)

    tokens, positions = array(places[0], np.int64, size), array(places[1], np.int64, size)
    labels = array(places[2], np.int64, depths, size)
    weights = array(places[3], np.float32, depths, size)
    documents, valid = array(places[4], np.int32, size), array(places[5], np.bool_, size)
    segments = (source, extra, rows, offsets, extents, piece, step)
    gather(*segments, 0, size, token_fill, tokens)
    position_ids(piece, step, size, positions)
    document_ids(piece, size, documents)
    np.greater_equal(documents, 0, out=valid)
    for depth in range(depths):
        gather(*segments, 1 + depth, size, label_fill, labels[depth])
        held_weights(extents, piece, step, 1 + depth, size, weights[depth])
    array(places[6], np.int32, len(cu_seqlens))[:] = cu_seqlens
    array(places[7], np.int32, len(cu_seqlens))[:] = cu_seqlens_padded
    array(places[8], np.int64, len(valid_tokens_per_row))[:] = valid_tokens_per_row
