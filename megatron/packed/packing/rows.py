"""Plans of packs made of dataset rows: all rows of a micro-batch become one pack."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.packed.packing import checks
from megatron.packed.packing.alignment import Alignment
from megatron.packed.packing.boundaries import SegmentBoundaries, check_row_lengths
from megatron.packed.packing.native import core
from megatron.packed.packing.plan import PackPlan, as_alignment, assemble

Int64 = NDArray[np.int64]


def build_pack_plan(
    tokens: Any,
    eod_id: int,
    pad_id: int,
    *,
    extra_token: Any = None,
    row_lengths: Any = None,
    alignment: Alignment | int = 1,
    capacity: int | None = None,
    boundaries: SegmentBoundaries | None = None,
    valid_tokens_per_row: Any = None,
) -> PackPlan:
    """Plan one pack from all rows of a micro-batch.

    Args:
        tokens: integers `[B, S]`, raw rows.
        eod_id: end-of-document id.
        pad_id: padding id; may equal `eod_id`.
        extra_token: integers `[B]`, the token after each row, or None. It belongs to the
            document of the row's last position unless that position closes it.
        row_lengths: integers `[B]`, real ids among the `S + 1`; at most S means tail padding
            and no extra token.
        alignment: an `Alignment`, or a multiple for every segment.
        capacity: pad the pack to this many tokens, for static shapes. The tail is padding.
        boundaries: segments found otherwise, such as from the dataset's document index; then
            token values decide nothing.
        valid_tokens_per_row: integers `[B]`, counts the caller believes in; a difference is an
            error, not something to train on.

    Raises:
        ValueError: for a wrong shape, dtype or size (named), for counts that disagree, for a
            pack over its capacity or over 2**31 - 1 tokens.
    """
    source = checks.integer_array("tokens", tokens, 2)
    num_rows, width = source.shape
    eod_id = checks.integer("eod_id", eod_id)
    pad_id = checks.integer("pad_id", pad_id)
    real_ids = check_row_lengths(row_lengths, num_rows, width)
    extra = None
    if extra_token is not None:
        extra = np.ascontiguousarray(checks.integer_array("extra_token", extra_token, 1))
        if len(extra) != num_rows:
            raise ValueError(f"extra_token: {len(extra)} values for {num_rows} rows")

    alignment = as_alignment(alignment)
    if boundaries is None:
        segments, cu_seqlens, cu_padded, valid = core.plan_rows(
            source, extra, eod_id, pad_id, real_ids, alignment.segment
        )
        rows, offsets, lengths, extents = segments
        layout = cu_seqlens, cu_padded
    else:
        if boundaries.row_width != width or len(boundaries.valid_tokens_per_row) != num_rows:
            raise ValueError(
                f"boundaries: made for {len(boundaries.valid_tokens_per_row)} rows of "
                f"{boundaries.row_width} tokens, got {num_rows} of {width}"
            )
        rows, offsets, lengths = boundaries.rows, boundaries.offsets, boundaries.lengths
        valid = boundaries.valid_tokens_per_row
        extents = lengths
        if extra is not None:
            goes_on = (offsets + lengths == width) & ~boundaries.closed
            if real_ids is not None:
                goes_on &= (real_ids == width + 1)[rows]
            extents = lengths + goes_on
        layout = None
    # Laid end to end, the segments end at their sum.
    total = int(lengths.sum()) if layout is None else layout[0].item(-1)
    _check_counts(rows, lengths, total, valid, valid_tokens_per_row)
    return assemble(
        rows=rows,
        offsets=offsets,
        lengths=lengths,
        extents=extents,
        valid_tokens_per_row=valid,
        row_width=width,
        pad_id=pad_id,
        extra_token=extra,
        alignment=alignment,
        capacity=capacity,
        layout=layout,
    )


def _check_counts(rows: Int64, lengths: Int64, total: int, counts: Int64, expected: Any) -> None:
    """Compare per-row counts: segments against the scan, the scan against the caller."""
    if expected is None and sum(counts.tolist()) == total:
        return
    found = np.bincount(rows, lengths, len(counts)) if len(rows) else np.zeros(len(counts))
    claims = [counts]
    if expected is not None:
        claims.append(checks.integer_array("valid_tokens_per_row", expected, 1))
        if len(claims[1]) != len(counts):
            raise ValueError(
                f"valid_tokens_per_row: {len(claims[1])} values for {len(counts)} rows"
            )
    for claim in claims:
        if (claim != found).any():
            row = int(np.argmax(claim != found))
            raise ValueError(
                f"valid_tokens_per_row: row {row} claims {claim[row]} valid tokens, its segments "
                f"hold {int(found[row])}"
            )
