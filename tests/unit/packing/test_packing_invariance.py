"""The layout never changes what is trained: the multiset of (context, target) pairs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.packed.context_parallel import make_partition
from megatron.packed.packing import (
    Alignment,
    PackPlan,
    build_pack_plan,
    generate_cu_seqlens_and_max_seqlen_batch,
)
from megatron.packed.packing.alignment import MODES, PARTITIONS, QUANTISATION_MULTIPLE
from tests.unit.packing.oracle import segments_of_rows

SHARED = Path(__file__).parents[4] / "shared" / "cases" / "packing.json"
DEPTHS = 5


def pairs_of_views(plan, views, rows):
    """(document so far, depth, target) of every supervised position of all ranks' shares."""
    tokens = plan.gather_tokens(rows, fill=-1)
    document_begin = plan.cu_seqlens_padded[:-1]
    found = Counter()
    for view in views:
        own = view.gather_tokens(rows, fill=-1)
        for depth in range(DEPTHS):
            labels, mask = view.gather_labels(rows, depth, fill=-1), view.loss_mask(depth)
            assert not np.any(mask & ~view.valid_mask)
            for at in np.flatnonzero(mask):
                begin = document_begin[view.document_ids[at]]
                context = tokens[begin : begin + view.position_ids[at] + 1]
                assert own[at] == context[-1]
                found[tuple(context.tolist()), depth, int(labels[at])] += 1
    return found


def pairs_of_documents(rows, extra, lengths, pad):
    found = Counter()
    for segment in segments_of_rows(rows, 1, pad, extra, lengths):
        for position in range(len(segment.tokens)):
            for depth in range(DEPTHS):
                target = segment.target(position, depth)
                if target is not None:
                    found[tuple(segment.tokens[: position + 1]), depth, target] += 1
    return found


@st.composite
def layouts(draw):
    partition = draw(st.sampled_from(PARTITIONS))
    cp = draw(st.integers(1, 4))
    modes = [m for m in MODES if not (m == "pack" and partition == "zigzag" and cp > 1)]
    mode = draw(st.sampled_from(modes))
    tp = draw(st.sampled_from([1, 2, 4]))
    alignment = Alignment.for_layout(
        partition=partition,
        cp_size=cp,
        tp_size=tp,
        sequence_parallel=draw(st.booleans()),
        quantisation=draw(st.sampled_from([None, None, *QUANTISATION_MULTIPLE])),
        mode=mode,
    )
    return partition, cp, alignment


@settings(max_examples=200)
@given(
    st.integers(0, 2**32),
    st.integers(1, 5),
    st.integers(1, 14),
    layouts(),
    st.booleans(),
    st.integers(0, 3),
    st.sampled_from([0, 1, 99]),
)
def test_layouts_and_merging_change_nothing(seed, num_rows, width, layout, capped, merge, pad):
    rng = np.random.default_rng(seed)
    text = rng.integers(5, 30, (num_rows, width + 1))
    text[rng.random(text.shape) < 0.2] = 1
    if pad == 0:
        text[rng.random(text.shape) < 0.1] = 0
    lengths = rng.integers(0, width + 2, num_rows) if rng.random() < 0.5 else None
    rows, extra = text[:, :-1], text[:, -1]
    partition, cp, alignment = layout
    expected = pairs_of_documents(
        rows.tolist(), extra.tolist(), None if lengths is None else lengths.tolist(), pad
    )
    found = Counter()
    # Any number of rows makes a pack.
    group = max(num_rows - merge, 1)
    for at in range(0, num_rows, group):
        part_text = text[at : at + group]
        options = dict(
            extra_token=part_text[:, -1],
            row_lengths=None if lengths is None else lengths[at : at + group],
            alignment=alignment,
        )
        plan = build_pack_plan(part_text[:, :-1], 1, pad, **options)
        if capped:
            plan = build_pack_plan(
                part_text[:, :-1],
                1,
                pad,
                capacity=plan.total_tokens + 2 * alignment.pack_multiple,
                **options,
            )
        assert plan.total_tokens % alignment.pack_multiple == 0
        sizes = np.diff(plan.cu_seqlens_padded)
        assert np.all(sizes % alignment.segment == 0)
        aligned = plan.lengths % alignment.segment == 0
        # An aligned segment gets no padding; only the last one takes the pack's tail.
        assert np.array_equal(sizes[:-1][aligned[:-1]], plan.lengths[:-1][aligned[:-1]])
        part = make_partition(partition, plan.cu_seqlens_padded, cp, cu_seqlens=plan.cu_seqlens)
        views = [plan.local(part, rank) for rank in range(cp)]
        assert sum(view.num_valid for view in views) == plan.lengths.sum()
        for depth in range(DEPTHS):
            supervised = sum(int(view.loss_mask(depth).sum()) for view in views)
            assert supervised == plan.supervised_tokens(depth)
        found += pairs_of_views(plan, views, part_text)
    assert found == expected


def test_capacity_boundaries_stay(rng):
    text = rng.integers(5, 30, (2, 33))
    text[:, 10] = 1
    free = build_pack_plan(text[:, :-1], 1, 0, extra_token=text[:, -1])
    fixed = build_pack_plan(text[:, :-1], 1, 0, extra_token=text[:, -1], capacity=128)
    assert np.array_equal(free.cu_seqlens, fixed.cu_seqlens)
    assert fixed.total_tokens == 128 and fixed.statistics.padded_tokens == 64


def test_a_batch_of_pads_only_has_a_shape_and_no_target():
    rows = np.zeros((2, 8), dtype=int)
    for alignment in (1, Alignment(segment=4, pack=6)):
        plan = build_pack_plan(rows, 1, 0, extra_token=[0, 0], alignment=alignment)
        assert plan.cu_seqlens.tolist() == [0, 0] and plan.max_seqlen == 0
        assert plan.total_tokens == plan.alignment.pack_multiple
        assert plan.statistics.supervised_tokens == plan.statistics.num_segments == 0
        assert not plan.valid_mask.any() and not plan.loss_mask().any()


def test_off_by_one_in_row_lengths_against_stated_counts():
    rows = np.array([[5, 6, 7, 1, 0, 0]])
    for stated in (3, 5):
        with pytest.raises(ValueError, match="valid_tokens_per_row: row 0 claims"):
            build_pack_plan(rows, 1, 0, valid_tokens_per_row=[stated])
    index = generate_cu_seqlens_and_max_seqlen_batch(rows, 1, 0)
    index.valid_tokens_per_row[0] += 1
    with pytest.raises(ValueError, match="row 0 claims 5 valid tokens, its segments hold 4"):
        build_pack_plan(rows, 1, 0, boundaries=index)


@pytest.mark.skipif(not SHARED.exists(), reason="the shared cases are not beside this checkout")
def test_shared_cases():
    cases = json.loads(SHARED.read_text())
    to_id = {"E": 1, "_": 0}

    def ids(rows):
        return np.array([[to_id.get(c, ord(c)) for c in row] for row in rows])

    case = cases["worked_example"]
    rows = ids(case["rows"])
    plan = build_pack_plan(rows, 1, 0, alignment=case["alignment"])
    assert plan.lengths.tolist() == case["seqlens"]
    assert plan.cu_seqlens.tolist() == case["cu_seqlens"]
    assert plan.cu_seqlens_padded.tolist() == case["cu_seqlens_padded"]
    assert plan.max_seqlen_padded == case["max_seqlen_padded"]
    assert plan.valid_tokens_per_row.tolist() == case["valid_tokens_per_row"]
    assert plan.gather_tokens(rows).tolist() == ids([case["tokens"]])[0].tolist()
    assert plan.valid_mask.tolist() == [bool(v) for v in case["valid"]]
    labels = [None if label is None else to_id.get(label, ord(label)) for label in case["labels"]]
    assert plan.loss_mask().tolist() == [label is not None for label in labels]
    assert plan.gather_labels(rows, fill=-1).tolist() == [
        -1 if label is None else label for label in labels
    ]
    for valid, position, expected in zip(
        plan.valid_mask, plan.position_ids, case["position_ids_of_valid"], strict=True
    ):
        assert not valid or position == expected
    part = make_partition("zigzag", plan.cu_seqlens_padded, case["cp"])
    for rank in range(case["cp"]):
        expected = case["zigzag"][f"rank{rank}"]
        view = plan.local(part, rank)
        assert part.indices(rank).tolist() == expected["index"]
        assert view.gather_tokens(rows).tolist() == ids([expected["tokens"]])[0].tolist()
        assert view.valid_mask.tolist() == [bool(v) for v in expected["valid"]]
    assert plan.statistics.supervised_tokens == case["supervised_total"]

    case = cases["extra_token"]
    text = ids(case["rows"])
    plan = build_pack_plan(text[:, :-1], 1, 0, extra_token=text[:, -1])
    flat = [label for row in case["labels"] for label in row]
    assert plan.gather_labels(text, fill=-1).tolist() == [
        -1 if label is None else to_id.get(label, ord(label)) for label in flat
    ]
    for case in cases["segment_padding"]:
        plan = PackPlan.from_documents(np.diff(case["cu_seqlens"]), 0, alignment=case["multiple"])
        assert plan.cu_seqlens_padded.tolist() == case["cu_seqlens_padded"]
    case = cases["padding_mask"]
    plan = PackPlan.from_documents(np.diff(case["cu_seqlens"]), 0, alignment=4)
    assert (~plan.valid_mask).astype(int).tolist() == case["is_padding"]
    case = cases["mtp_roll"]
    plan = PackPlan.from_documents(np.diff(case["cu_seqlens"]), 0)
    assert plan.gather_labels(case["tokens"]).tolist() == case["rolled_once"]
