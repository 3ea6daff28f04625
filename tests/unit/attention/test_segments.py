"""Segment layouts: grouping, and refusal of boundaries that can't be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.packed.attention.segments import (
    SegmentLayout,
    build_segment_layout,
    packed_layout,
    row_layout,
)


def expand(layout: SegmentLayout) -> list[tuple[int, int]]:
    """Segments as the runs describe them."""
    return [
        (run.start + i * run.stride, run.length) for run in layout.runs for i in range(run.count)
    ]


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 1, 2, 3, 5]), st.sampled_from([0, 0, 1, 3])), max_size=12
    ),
    st.integers(1, 4),
)
def test_runs_hold_exactly_the_segments(pieces, rows):
    row_length = sum(n + gap for n, gap in pieces) + 1
    starts, lengths = [], []
    for row in range(rows):
        at = row * row_length
        for length, gap in pieces:
            starts.append(at)
            lengths.append(length)
            at += length + gap
    layout = build_segment_layout(starts, lengths, rows=rows, row_length=row_length)
    wanted = [(s, n) for s, n in zip(starts, lengths, strict=True) if n]
    assert sorted(expand(layout)) == wanted
    assert list(zip(layout.starts, layout.lengths, strict=True)) == wanted


def test_equal_neighbours_share_a_call():
    layout = packed_layout((0, 3, 6, 9, 10), (0, 4, 8, 12, 16), 16)
    assert [(run.start, run.length, run.count, run.stride) for run in layout.runs] == [
        (0, 3, 3, 4),
        (12, 1, 1, 16),
    ]
    assert len(row_layout(5, 7, None).runs) == 1
    assert row_layout(5, 7, None).is_dense
    assert not layout.is_dense


def test_segments_never_cross_rows():
    with pytest.raises(ValueError, match="crosses the end of a row"):
        row_layout(2, 4, (0, 5, 8))


def test_row_boundaries_cover_the_stream():
    with pytest.raises(ValueError, match="must run from 0 to 8"):
        row_layout(2, 4, (0, 4))


def test_swapped_boundaries_are_named():
    with pytest.raises(ValueError, match="swapped"):
        packed_layout((0, 4, 8), (0, 3, 6), 8)
    with pytest.raises(ValueError, match="real but 2 padded"):
        packed_layout((0, 4, 8), (0, 8), 8)
    with pytest.raises(ValueError, match="ends at slot 8, but the stream has 1 x 6"):
        packed_layout((0, 4, 8), (0, 4, 8), 6)


def test_overlap_is_refused():
    with pytest.raises(ValueError, match="overlaps"):
        build_segment_layout([0, 2], [3, 3], rows=1, row_length=8)
