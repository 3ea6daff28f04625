"""Boundaries, targets and layout of a plan against brute force and known answers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.packed.packing import (
    Alignment,
    PackPlan,
    boundaries_from_document_index,
    build_pack_plan,
    generate_cu_seqlens_and_max_seqlen_batch,
)
from tests.unit.packing.oracle import padded_layout, segments_of_rows

EOD, PAD = 1, 0


def ids(*rows: str) -> np.ndarray:
    """Letters are tokens, E is EOD, _ is padding."""
    return np.array([[{"E": EOD, "_": PAD}.get(c, ord(c)) for c in row] for row in rows])


def text(tokens: np.ndarray) -> str:
    return "".join({EOD: "E", PAD: "_"}.get(int(t), chr(int(t))) for t in tokens)


@st.composite
def batches(draw):
    """Rows rich in EODs and pads, sometimes one id for both, with all optional arguments."""
    num_rows = draw(st.integers(1, 4))
    width = draw(st.integers(1, 12))
    eod = 1
    pad = draw(st.sampled_from([0, 1, 99]))
    token = st.sampled_from([eod, pad, 2, 3, 4, 5])
    text_rows = draw(
        st.lists(
            st.lists(token, min_size=width + 1, max_size=width + 1),
            min_size=num_rows,
            max_size=num_rows,
        )
    )
    with_extra = draw(st.booleans())
    lengths = None
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(0, width + 1), min_size=num_rows, max_size=num_rows))
    return (
        [row[:-1] for row in text_rows],
        [row[-1] for row in text_rows] if with_extra else None,
        lengths,
        eod,
        pad,
    )


@settings(max_examples=300, deadline=None)
@given(batches(), st.integers(1, 8))
def test_plan_equals_brute_force(batch, multiple):
    rows, extra, lengths, eod, pad = batch
    tokens = np.array(rows)
    plan = build_pack_plan(
        tokens, eod, pad, extra_token=extra, row_lengths=lengths, alignment=multiple
    )
    segments = segments_of_rows(rows, eod, pad, extra, lengths)
    expected = padded_layout(segments, multiple)
    if not segments:
        assert plan.cu_seqlens.tolist() == [0, 0]
        assert not plan.valid_mask.any() and plan.total_tokens == multiple
        return
    assert plan.lengths.tolist() == [len(s.tokens) for s in segments]
    assert plan.total_tokens == len(expected)
    assert np.all(np.diff(plan.cu_seqlens_padded) % multiple == 0)
    assert plan.valid_mask.tolist() == [item is not None for item in expected]
    assert plan.gather_tokens(tokens).tolist() == [
        pad if item is None else item[0].tokens[item[1]] for item in expected
    ]
    assert plan.position_ids.tolist() == [0 if item is None else item[1] for item in expected]
    assert plan.document_ids.tolist() == [
        -1 if item is None else segments.index(item[0]) for item in expected
    ]
    whole = tokens if extra is None else np.concatenate([tokens, np.array(extra)[:, None]], 1)
    for depth in range(5):
        targets = [None if item is None else item[0].target(item[1], depth) for item in expected]
        mask = [target is not None for target in targets]
        assert plan.loss_mask(depth).tolist() == mask
        assert plan.supervised_tokens(depth) == sum(mask)
        for source in (tokens, whole):
            labels = plan.gather_labels(source, depth, fill=-7).tolist()
            assert labels == [-7 if target is None else target for target in targets]
    real = sum(len(s.tokens) for s in segments)
    assert plan.statistics.real_tokens == real == plan.valid_tokens_per_row.sum()
    assert plan.statistics.padded_tokens == len(expected) - real
    assert plan.statistics.sum_squared_lengths == sum(len(s.tokens) ** 2 for s in segments)


def test_worked_example():
    rows = ids("abcEdeE_", "fghijE__")
    found = generate_cu_seqlens_and_max_seqlen_batch(rows, EOD, PAD)
    assert found.lengths.tolist() == [4, 3, 6]
    assert found.starts.tolist() == [0, 4, 8]
    assert found.rows.tolist() == [0, 0, 1]
    assert found.valid_tokens_per_row.tolist() == [7, 6]
    assert found.cu_seqlens.tolist() == [0, 4, 7, 13] and found.cu_seqlens.dtype == np.int32
    assert found.max_seqlen == 6 and type(found.max_seqlen) is int

    plan = build_pack_plan(rows, EOD, PAD, alignment=4)
    assert plan.cu_seqlens_padded.tolist() == [0, 4, 8, 16]
    assert plan.max_seqlen_padded == 8
    assert text(plan.gather_tokens(rows)) == "abcEdeE_fghijE__"
    assert text(plan.gather_labels(rows, fill=ord("."))) == "bcE.eE..ghijE..."
    assert plan.statistics.supervised_tokens == 10


def test_extra_token_belongs_to_the_document_of_the_last_position():
    rows = ids("abcde", "fgEhi", "jklEm")
    plan = build_pack_plan(rows[:, :-1], EOD, PAD, extra_token=rows[:, -1])
    assert text(plan.gather_labels(rows, fill=ord("."))) == "bcdegE.iklE."


@pytest.mark.parametrize(
    ("cu_seqlens", "multiple", "padded"),
    [
        ([0, 3, 5, 9], 8, [0, 8, 16, 24]),
        ([0, 2, 5], 4, [0, 4, 8]),
        ([0, 1], 4, [0, 4]),
        ([0, 0, 3], 4, [0, 0, 4]),
        ([0, 4, 8], 4, [0, 4, 8]),
        ([0, 5], 1, [0, 5]),
    ],
)
def test_segment_padding(cu_seqlens, multiple, padded):
    plan = PackPlan.from_documents(np.diff(cu_seqlens), PAD, alignment=multiple)
    assert plan.cu_seqlens.tolist() == cu_seqlens
    assert plan.cu_seqlens_padded.tolist() == padded
    assert (plan.cu_seqlens is plan.cu_seqlens_padded) == (cu_seqlens == padded)


def test_rolling_by_depth_stays_in_the_document():
    tokens = np.array([1, 2, 3, 4, 5])
    plan = PackPlan.from_documents([3, 2], 0)
    assert plan.gather_labels(tokens, 0).tolist() == [2, 3, 0, 5, 0]
    assert plan.gather_labels(tokens, 1).tolist() == [3, 0, 0, 0, 0]


def test_one_id_for_pad_and_eod():
    rows = np.array([[7, 8, 1, 1, 1], [1, 7, 1, 8, 1], [1, 1, 1, 1, 1]])
    found = generate_cu_seqlens_and_max_seqlen_batch(rows, 1, 1)
    assert found.lengths.tolist() == [3, 2, 2]
    exact = generate_cu_seqlens_and_max_seqlen_batch(rows, 1, 1, row_lengths=[4, 6, 0])
    assert exact.lengths.tolist() == [3, 1, 1, 2, 2]
    assert exact.valid_tokens_per_row.tolist() == [4, 5, 0]
    plan = build_pack_plan(rows, 1, 1)
    assert plan.gather_labels(rows, fill=-1).tolist() == [8, 1, -1, 1, -1, 1, -1]


def test_corner_cases_of_rows():
    # The row boundary falls on padding; the next row starts its own segment.
    plan = build_pack_plan(ids("abE_", "cdef"), EOD, PAD, extra_token=ids("_g").ravel())
    assert plan.lengths.tolist() == [3, 4]
    assert text(plan.gather_labels(ids("abE__", "cdefg"), fill=ord("."))) == "bE.defg"
    # A single document fills the row exactly, with and without its EOD.
    for row, labels in (("abcE", "bcE."), ("abcd", "bcdx")):
        plan = build_pack_plan(ids(row), EOD, PAD, extra_token=ids("x").ravel())
        assert text(plan.gather_labels(ids(row), fill=ord("."))) == labels
    # The last document has no EOD and the row is padded: its last token has no target.
    plan = build_pack_plan(ids("aEbc__"), EOD, PAD, extra_token=[PAD])
    assert text(plan.gather_labels(ids("aEbc__"), fill=ord("."))) == "E.c."


def test_a_wrong_valid_count_is_an_error():
    rows = ids("abcE__")
    build_pack_plan(rows, EOD, PAD, valid_tokens_per_row=[4])
    for wrong in (3, 5):
        with pytest.raises(ValueError, match="valid_tokens_per_row: row 0 claims"):
            build_pack_plan(rows, EOD, PAD, valid_tokens_per_row=[wrong])


def test_capacity_pads_the_tail_only():
    rows = ids("abcEdeE_")
    free = build_pack_plan(rows, EOD, PAD, alignment=4)
    fixed = build_pack_plan(rows, EOD, PAD, alignment=4, capacity=16)
    assert fixed.total_tokens == 16 and fixed.cu_seqlens_padded.tolist() == [0, 4, 16]
    assert fixed.cu_seqlens.tolist() == free.cu_seqlens.tolist()
    assert text(fixed.gather_tokens(rows)) == "abcEdeE_" + "_" * 8
    with pytest.raises(ValueError, match="--packed-sequence-capacity"):
        build_pack_plan(rows, EOD, PAD, alignment=4, capacity=4)
    with pytest.raises(ValueError, match="capacity: 10 is no multiple of 4"):
        build_pack_plan(rows, EOD, PAD, alignment=4, capacity=10)


def test_boundaries_from_the_document_index():
    # EOD ids inside documents, none between them.
    rows = np.array([[1, 5, 1, 6, 7], [8, 9, 1, 2, 3]])
    index = boundaries_from_document_index([[3, 2], [2, 3]], 4, closed_at_end=[True, True])
    assert index.lengths.tolist() == [3, 1, 2, 2]
    plan = build_pack_plan(rows[:, :-1], 1, 0, extra_token=rows[:, -1], boundaries=index)
    assert plan.gather_labels(rows, fill=-1).tolist() == [5, 1, -1, 7, 9, -1, 2, 3]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(), (1, 1)),
        (dict(partition="zigzag", cp_size=4), (8, 4)),
        (dict(partition="zigzag", cp_size=2, tp_size=4), (4, 2)),
        (dict(partition="zigzag", cp_size=2, tp_size=4, sequence_parallel=True), (16, 8)),
        (dict(partition="dispatch", cp_size=4), (1, 4)),
        (dict(partition="dispatch", cp_size=4, chunk_size=1024), (1, 4096)),
        (dict(cp_size=2, tp_size=2, sequence_parallel=True, quantisation="fp8"), (1, 64)),
        (dict(cp_size=2, quantisation="mxfp8"), (1, 64)),
        (dict(cp_size=2, quantisation="nvfp4"), (1, 256)),
        (dict(mode="segment", cp_size=2, tp_size=2), (8, 8)),
        (dict(mode="segment", cp_size=2, tp_size=2, quantisation="fp8"), (64, 64)),
        (dict(mode="segment", tp_size=4), (1, 4)),
        (dict(mode="segment", tp_size=4, quantisation="fp8"), (1, 32)),
    ],
)
def test_alignment_rules(options, expected):
    alignment = Alignment.for_layout(**options)
    assert (alignment.segment, alignment.pack_multiple) == (
        expected[0],
        np.lcm(*expected),
    )
