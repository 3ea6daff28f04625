"""Where segments begin and end in a batch of raw rows.

Two sources of boundaries: the tokens themselves (an EOD closes a segment, pads break it), or the
dataset's own document index, for data without EOD or with EOD inside documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.packed.packing import checks
from megatron.packed.packing.native import core


@dataclass(frozen=True)
class SegmentBoundaries:
    """The segments of a `[B, S]` batch, in row-major order.

    Attributes:
        lengths: int64 `[n]`, tokens of each segment, EOD included.
        rows: int64 `[n]`, row of each segment.
        offsets: int64 `[n]`, first column of each segment.
        closed: bool `[n]`, the segment's document ends with it.
        valid_tokens_per_row: int64 `[B]`.
        cu_seqlens: int32 `[n + 1]`, real boundaries of the segments laid end to end.
        max_seqlen: longest segment, a Python int.
        row_width: S.
    """

    lengths: NDArray[np.int64]
    rows: NDArray[np.int64]
    offsets: NDArray[np.int64]
    closed: NDArray[np.bool_]
    valid_tokens_per_row: NDArray[np.int64]
    cu_seqlens: NDArray[np.int32]
    max_seqlen: int
    row_width: int

    @property
    def starts(self) -> NDArray[np.int64]:
        """First token of each segment in the flattened raw batch `[B * S]`: int64 `[n]`."""
        return self.rows * self.row_width + self.offsets

    def __len__(self) -> int:
        return len(self.lengths)


def _boundaries(
    rows: NDArray[np.int64],
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    closed: NDArray[np.bool_],
    valid: NDArray[np.int64],
    width: int,
) -> SegmentBoundaries:
    cu_seqlens, _ = core.layout(lengths, 1)
    return SegmentBoundaries(
        lengths=lengths,
        rows=rows,
        offsets=offsets,
        closed=closed,
        valid_tokens_per_row=valid,
        cu_seqlens=cu_seqlens,
        max_seqlen=int(lengths.max()) if len(lengths) else 0,
        row_width=width,
    )


def check_row_lengths(row_lengths: Any, num_rows: int, width: int) -> NDArray[np.int64] | None:
    """Return `row_lengths` as int64 `[B]`, each in `0 .. S + 1`, or None as it came."""
    if row_lengths is None:
        return None
    array = checks.integer_array("row_lengths", row_lengths, 1)
    if len(array) != num_rows:
        raise ValueError(f"row_lengths: {len(array)} values for {num_rows} rows")
    if len(array) and (array.min() < 0 or array.max() > width + 1):
        bad = int(np.argmax((array < 0) | (array > width + 1)))
        raise ValueError(
            f"row_lengths: {array[bad]} in row {bad} is not between 0 and S + 1 = {width + 1}"
        )
    return np.ascontiguousarray(array)


def generate_cu_seqlens_and_max_seqlen_batch(
    input_ids: Any, eod_id: int, pad_id: int, *, row_lengths: Any = None
) -> SegmentBoundaries:
    """Scan a batch of rows for segments.

    An EOD closes a segment and belongs to it. A pad forms no segment and breaks the one it
    interrupts. When both are one id, it is an EOD where it closes an open segment and padding
    elsewhere; `row_lengths` settles it exactly: inside that length every one is an EOD.

    Args:
        input_ids: integers `[B, S]`, raw rows without the extra label token.
        eod_id: end-of-document id.
        pad_id: padding id; may equal `eod_id`, may be negative when the data has no pads.
        row_lengths: integers `[B]`, ids of each row that are not tail padding, counted with the
            extra label token (so `S + 1` for a full row), or None.

    Returns:
        The segments; a row of pads only contributes none.

    Raises:
        ValueError: for a wrong shape or dtype, a negative id, or more than 2**31 - 1 tokens.
    """
    tokens = checks.integer_array("input_ids", input_ids, 2)
    eod_id = checks.integer("eod_id", eod_id)
    pad_id = checks.integer("pad_id", pad_id)
    lengths = check_row_lengths(row_lengths, *tokens.shape)
    rows, offsets, segment_lengths, closed, valid = core.scan(tokens, eod_id, pad_id, lengths)
    return _boundaries(rows, offsets, segment_lengths, closed, valid, tokens.shape[1])


def boundaries_from_document_index(
    document_lengths: Sequence[Any], row_width: int, *, closed_at_end: Any = None
) -> SegmentBoundaries:
    """Take boundaries from the dataset's document index instead of from token values.

    Args:
        document_lengths: for each row, the lengths of the document pieces it is made of, in
            order. They may count the extra label token too: what lies past `row_width` is cut
            off, and the piece that reaches past it is not closed.
        row_width: S, input tokens of a row.
        closed_at_end: bool `[B]`, for rows whose last piece ends exactly at `row_width` or
            before: its document ends there too. None means yes.

    Raises:
        ValueError: for negative lengths or a row of more than `row_width + 1` tokens.
    """
    row_width = checks.integer("row_width", row_width, 0)
    count = len(document_lengths)
    ends_here = np.ones(count, dtype=bool)
    if closed_at_end is not None:
        ends_here = np.asarray(closed_at_end, dtype=bool)
        if ends_here.shape != (count,):
            raise ValueError(f"closed_at_end: shape {ends_here.shape} for {count} rows")
    per_row = [checks.integer_array("document_lengths", row, 1) for row in document_lengths]
    pieces_in_row = np.array([len(row) for row in per_row], dtype=np.int64)
    flat = np.concatenate(per_row) if per_row else np.zeros(0, dtype=np.int64)
    if len(flat) and flat.min() < 0:
        raise ValueError(f"document_lengths: must not be negative, got {flat.min()}")
    rows = np.repeat(np.arange(count, dtype=np.int64), pieces_in_row)
    begin = np.zeros(len(flat), dtype=np.int64)
    totals = np.array([int(row.sum()) for row in per_row], dtype=np.int64)
    if len(totals) and totals.max() > row_width + 1:
        bad = int(totals.argmax())
        raise ValueError(
            f"document_lengths: row {bad} adds up to {totals[bad]} tokens, more than S + 1 = "
            f"{row_width + 1}"
        )
    if len(flat):
        begin = np.cumsum(flat) - flat - np.repeat(np.cumsum(totals) - totals, pieces_in_row)
    length = np.minimum(begin + flat, row_width) - begin
    closed = begin + flat <= row_width
    nonempty = np.flatnonzero(pieces_in_row)
    if len(nonempty):
        last = np.cumsum(pieces_in_row)[nonempty] - 1
        closed[last] &= ends_here[nonempty]
    keep = length > 0
    return _boundaries(
        rows[keep],
        begin[keep],
        length[keep],
        closed[keep],
        np.minimum(totals, row_width),
        row_width,
    )
