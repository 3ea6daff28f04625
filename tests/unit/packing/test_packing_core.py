"""The C++ core against its numpy definition, and against hostile arguments."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.packed.context_parallel import make_partition
from megatron.packed.packing import (
    Alignment,
    PackPlan,
    boundaries_from_document_index,
    build_document_packer,
    build_pack_plan,
    generate_cu_seqlens_and_max_seqlen_batch,
    native,
    reference,
)
from megatron.packed.packing.buffer import BufferLayout

ROOT = Path(__file__).parents[3]
INT64 = np.iinfo(np.int64)
core = native.core

needs_native = pytest.mark.skipif(not native.is_native, reason="the extension is not built")


def same(ours, theirs):
    ours = ours if isinstance(ours, tuple) else (ours,)
    theirs = theirs if isinstance(theirs, tuple) else (theirs,)
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@st.composite
def wide_rows(draw):
    """Rows wide enough for the block scan, from clean to nothing but EODs and pads."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 300))
    text = rng.integers(5, 9, (shape[0], shape[1] + 1))
    text[rng.random(text.shape) < draw(st.sampled_from([0, 0.01, 0.3, 1]))] = 1
    text[rng.random(text.shape) < draw(st.sampled_from([0, 0.01, 0.3, 1]))] = 0
    lengths = None
    if draw(st.booleans()):
        lengths = rng.integers(0, shape[1] + 2, shape[0])
    return text, lengths, draw(st.sampled_from([0, 1, 77, -1]))


@needs_native
@settings(max_examples=300)
@given(wide_rows(), st.integers(1, 70))
def test_scan_and_plan(batch, multiple):
    text, lengths, pad = batch
    tokens = text[:, :-1]
    same(core.scan(tokens, 1, pad, lengths), reference.scan(tokens, 1, pad, lengths))
    for extra in (None, np.ascontiguousarray(text[:, -1])):
        arguments = (tokens, extra, 1, pad, lengths, multiple)
        same(core.plan_rows(*arguments), reference.plan_rows(*arguments))


@needs_native
@settings(max_examples=200)
@given(
    st.lists(st.integers(0, 130), min_size=1, max_size=8),
    st.sampled_from(["contiguous", "zigzag", "zigzag_pack", "striped", "dispatch"]),
    st.integers(1, 4),
    st.integers(0, 4),
)
def test_pieces_and_gathers(lengths, kind, cp, depth):
    alignment = Alignment.for_layout(partition=kind, cp_size=cp)
    lookahead = np.arange(len(lengths)) % 3
    plan = PackPlan.from_documents(lengths, 0, lookahead=lookahead, alignment=alignment)
    tokens = np.arange(plan.row_width)[None] + 7
    part = make_partition(kind, plan.cu_seqlens_padded, cp, cu_seqlens=plan.cu_seqlens)
    for rank in range(cp):
        starts, counts, step = part.runs(rank)
        run = (plan.lengths, plan.cu_seqlens_padded, starts, counts, step)
        same(core.pieces(*run), reference.pieces(*run))
        same(core.expand_runs(starts, counts, step), reference.expand_runs(starts, counts, step))
        piece, size = core.pieces(*run), int(counts.sum())
        segments = (tokens, None, plan.rows, plan.offsets, plan.extents, piece, step)
        for shift in range(depth + 2):
            same(
                core.gather(*segments, shift, size, -5),
                reference.gather(*segments, shift, size, -5),
            )
            for name in ("held_mask", "held_weights"):
                arguments = (plan.extents, piece, step, shift, size)
                same(getattr(core, name)(*arguments), getattr(reference, name)(*arguments))
        same(core.position_ids(piece, step, size), reference.position_ids(piece, step, size))
        same(core.document_ids(piece, size), reference.document_ids(piece, size))
        layout = BufferLayout(size, depth + 1, plan.num_segments, 1)
        buffers = [np.full(layout.num_bytes + 8, 7, dtype=np.uint8) for _ in range(2)]
        bounds = plan.cu_seqlens, plan.cu_seqlens_padded, plan.valid_tokens_per_row
        for module, buffer in zip((core, reference), buffers, strict=True):
            place = size, depth + 1, layout.places[:9], buffer
            module.materialise(*segments, 3, 4, *bounds, *place)
        same(*buffers)
    whole = (plan.lengths, plan.cu_seqlens_padded)
    same(core.whole_pieces(*whole), reference.whole_pieces(*whole))
    every = np.array([0]), np.array([plan.total_tokens]), 1
    same(core.whole_pieces(*whole), reference.pieces(*whole, *every))
    counts = (plan.lengths, plan.extents, plan.cu_seqlens_padded)
    assert core.summary(*counts) == reference.summary(*counts)


@needs_native
@settings(max_examples=200)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=12), st.integers(1, 4), st.data())
def test_partition_routines(lengths, cp, data):
    length = np.array(lengths) * 2 * cp
    cu = np.concatenate([[0], np.cumsum(length)]).astype(np.int32)
    for rank in range(cp):
        same(core.zigzag_runs(cu, cp, rank), reference.zigzag_runs(cu, cp, rank))
    real = np.array([data.draw(st.integers(0, n)) for n in length.tolist()], dtype=np.int64)
    inner = data.draw(st.lists(st.integers(0, int(cu[-1])), max_size=10))
    edges = np.array(sorted([0, *inner, int(cu[-1])]), dtype=np.int64)
    begins = cu[:-1].astype(np.int64)
    same(core.chunk_areas(begins, real, edges), reference.chunk_areas(begins, real, edges))
    count = cp * data.draw(st.integers(0, 6))
    more = cp * data.draw(st.integers(0, 6))
    areas = np.array(
        data.draw(st.lists(st.integers(0, 9), min_size=count + more, max_size=count + more)),
        dtype=np.int64,
    )
    classes = np.array(data.draw(st.permutations([0] * count + [1] * more)), dtype=np.int64)
    same(core.dispatch_ranks(areas, classes, cp), reference.dispatch_ranks(areas, classes, cp))
    permutation = np.array(data.draw(st.permutations(range(len(lengths)))), dtype=np.int64)
    same(core.inverse_permutation(permutation), reference.inverse_permutation(permutation))


@needs_native
@settings(max_examples=200)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.integers(1, 5), st.data())
def test_settling(lengths, cp, data):
    length = np.array(lengths, dtype=np.int64)
    length[-1] += -length.sum() % cp
    per_rank = data.draw(st.integers(0, min(8, length.sum() // cp)))
    edges = np.arange(per_rank * cp + 1) * length.sum() // max(per_rank * cp, 1)
    size = np.diff(edges)
    real = np.array([data.draw(st.integers(0, n)) for n in length.tolist()], dtype=np.int64)
    begins = np.cumsum(length) - length
    areas = core.chunk_areas(begins, real, edges)
    start = np.array(data.draw(st.permutations([*range(cp)] * per_rank)), dtype=np.int64)
    arguments = (start, areas, size - size.min(initial=99), begins, real, edges, cp)
    ranks, rows = core.settle_ranks(*arguments)
    same((ranks, rows), reference.settle_ranks(*arguments))
    # Rows of the documents over an edge, up to the end of each rank's last chunk of it.
    needed = 0
    for begin, end in zip(begins.tolist(), (begins + real).tolist(), strict=True):
        touched = [c for c in range(len(size)) if edges[c] < end and edges[c + 1] > begin]
        if len(touched) > 1:
            last = {ranks[c]: min(edges[c + 1], end) for c in touched}
            needed += sum(last.values()) - begin * len(last)
    assert rows == needed
    pairs = sorted(zip(start.tolist(), size.tolist(), strict=True))
    assert sorted(zip(ranks.tolist(), size.tolist(), strict=True)) == pairs


# ---- malformed arguments -----------------------------------------------------------------------

ROWS = np.array([[5, 6, 1, 7], [5, 5, 5, 1]])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tokens", dict(tokens=np.array([[5, -3, 1, 7], [5, 5, 5, 1]]))),
        ("tokens", dict(tokens=ROWS.astype(float))),
        ("tokens", dict(tokens=np.full((2, 4), np.nan))),
        ("tokens", dict(tokens=ROWS[0])),
        ("tokens", dict(tokens=ROWS[None])),
        ("tokens", dict(tokens=[[1, 2], [3]])),
        ("tokens", dict(tokens="text")),
        ("tokens", dict(tokens=np.full((2, 4), 2**64 - 1, dtype=np.uint64))),
        ("eod_id", dict(eod_id=1.5)),
        ("eod_id", dict(eod_id=None)),
        ("pad_id", dict(pad_id=2**63)),
        ("pad_id", dict(pad_id=True)),
        ("extra_token", dict(extra_token=[5])),
        ("extra_token", dict(extra_token=[5, -2], tokens=np.full((2, 4), 5))),
        ("extra_token", dict(extra_token=[0.5, 0.5])),
        ("row_lengths", dict(row_lengths=[4])),
        ("row_lengths", dict(row_lengths=[4, 6])),
        ("row_lengths", dict(row_lengths=[-1, 4])),
        ("row_lengths", dict(row_lengths=[np.nan, 4])),
        ("alignment", dict(alignment=0)),
        ("alignment", dict(alignment=-4)),
        ("alignment", dict(alignment=2.0)),
        ("alignment", dict(alignment=2**31)),
        ("capacity", dict(capacity=0)),
        ("capacity", dict(capacity=4)),
        ("capacity", dict(capacity="8")),
        ("valid_tokens_per_row", dict(valid_tokens_per_row=[4])),
        ("valid_tokens_per_row", dict(valid_tokens_per_row=[3, 4])),
        ("boundaries", dict(boundaries=generate_cu_seqlens_and_max_seqlen_batch(ROWS[:1], 1, 0))),
    ],
)
def test_malformed_rows(name, change):
    arguments = dict(tokens=ROWS, eod_id=1, pad_id=0) | change
    with pytest.raises(ValueError, match=rf"^{name}\b"):
        build_pack_plan(
            arguments.pop("tokens"), arguments.pop("eod_id"), arguments.pop("pad_id"), **arguments
        )


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("lengths", lambda: PackPlan.from_documents([3, -1], 0)),
        ("lengths", lambda: PackPlan.from_documents([2**31], 0)),
        ("lengths", lambda: PackPlan.from_documents([2**30, 2**30], 0)),
        ("lengths", lambda: PackPlan.from_documents([2**62, 2**62, 2**62], 0)),
        ("lengths", lambda: PackPlan.from_documents([2**31 - 1], 0, alignment=4)),
        ("lengths", lambda: PackPlan.from_documents([[3]], 0)),
        ("lookahead", lambda: PackPlan.from_documents([3], 0, lookahead=[1, 1])),
        ("lookahead", lambda: PackPlan.from_documents([3], 0, lookahead=[-1])),
        ("pad_id", lambda: PackPlan.from_documents([3], None)),
        ("document_lengths", lambda: boundaries_from_document_index([[3, -1]], 4)),
        ("document_lengths", lambda: boundaries_from_document_index([[3, 3]], 4)),
        ("rows", lambda: PackPlan.from_documents([3], 0).gather_tokens(np.zeros((1, 9), int))),
        ("rows", lambda: PackPlan.from_documents([3], 0).gather_tokens(np.zeros((2, 3), int))),
        ("rows", lambda: PackPlan.from_documents([3], 0).gather_labels(np.zeros((1, 3)))),
        ("depth", lambda: PackPlan.from_documents([3], 0).loss_mask(-1)),
        ("cu_seqlens_padded", lambda: make_partition("striped", [0, 4, 2], 2)),
        ("cu_seqlens_padded", lambda: make_partition("striped", [1, 4], 2)),
        ("cu_seqlens_padded", lambda: make_partition("striped", [], 2)),
        ("cu_seqlens_padded", lambda: make_partition("striped", [0, 2**31], 2)),
        ("cp_size", lambda: make_partition("striped", [0, 4], 0)),
        ("capacity", lambda: build_document_packer("next_fit", [3], 0)),
        ("capacity", lambda: build_document_packer("next_fit", [3], 6, alignment=4)),
        ("lengths", lambda: build_document_packer("next_fit", [-3], 6)),
        ("lengths", lambda: build_document_packer("next_fit", [0, 0], 6)),
        ("window", lambda: build_document_packer("windowed_best_fit", [3], 6, window=0)),
        ("seed", lambda: build_document_packer("next_fit", [3], 6, seed=-1)),
    ],
)
def test_malformed_others(name, call):
    with pytest.raises(ValueError, match=rf"^{name}\b"):
        call()


HOSTILE = st.one_of(
    st.integers(-3, 12),
    st.sampled_from([INT64.max, INT64.min, 2**31, 2**31 - 1, -(2**31), 2**40]),
)
ARRAY = st.lists(HOSTILE, max_size=5).map(lambda x: np.array(x, dtype=np.int64))
ARRAY32 = st.lists(st.integers(-3, 12), max_size=5).map(lambda x: np.array(x, dtype=np.int32))
SMALL = st.lists(st.integers(0, 2), max_size=4).map(lambda x: np.array(x, dtype=np.int64))
PIECES = st.lists(st.lists(HOSTILE, min_size=4, max_size=4), max_size=4).map(
    lambda x: np.array(x, dtype=np.int64).reshape(-1, 4)
)


@needs_native
@settings(max_examples=600)
@given(st.data())
def test_the_extension_never_leaves_its_buffers(data):
    """Arbitrary arguments end in a result or a ValueError; run under `make asan` to be sure."""

    def draw(strategy):
        return data.draw(strategy)

    rows = np.arange(12).reshape(3, 4)
    size = draw(st.integers(0, 9))
    calls = {
        "scan": lambda: core.scan(
            draw(
                st.lists(HOSTILE, min_size=6, max_size=6).map(
                    lambda x: np.array(x, dtype=np.int64).reshape(2, 3)
                )
            ),
            draw(HOSTILE),
            draw(HOSTILE),
            draw(st.none() | ARRAY),
        ),
        "layout": lambda: core.layout(draw(ARRAY), draw(HOSTILE)),
        "pieces": lambda: core.pieces(
            draw(ARRAY), draw(ARRAY32), draw(ARRAY), draw(ARRAY), draw(HOSTILE)
        ),
        "gather": lambda: core.gather(
            rows,
            draw(st.none() | ARRAY),
            draw(ARRAY),
            draw(ARRAY),
            draw(ARRAY),
            draw(PIECES),
            draw(HOSTILE),
            draw(HOSTILE),
            size,
            0,
        ),
        "materialise": lambda: core.materialise(
            rows,
            draw(st.none() | ARRAY),
            draw(ARRAY),
            draw(ARRAY),
            draw(ARRAY),
            draw(PIECES),
            draw(HOSTILE),
            0,
            0,
            draw(ARRAY32),
            draw(ARRAY32),
            draw(ARRAY),
            draw(st.integers(-1, size) | HOSTILE),
            draw(st.integers(-1, 3) | HOSTILE),
            tuple(draw(st.integers(-8, 64) | HOSTILE) for _ in range(draw(st.integers(8, 10)))),
            np.zeros(draw(st.integers(0, 4000)), np.uint8),
        ),
        "summary": lambda: core.summary(draw(ARRAY), draw(ARRAY), draw(ARRAY32)),
        "whole_pieces": lambda: core.whole_pieces(draw(ARRAY), draw(ARRAY32)),
        "held_mask": lambda: core.held_mask(
            draw(ARRAY), draw(PIECES), draw(HOSTILE), draw(HOSTILE), size
        ),
        "position_ids": lambda: core.position_ids(draw(PIECES), draw(HOSTILE), size),
        "document_ids": lambda: core.document_ids(draw(PIECES), size),
        "zigzag_runs": lambda: core.zigzag_runs(draw(ARRAY32), draw(HOSTILE), draw(HOSTILE)),
        "inverse_permutation": lambda: core.inverse_permutation(draw(ARRAY)),
        "chunk_areas": lambda: core.chunk_areas(draw(ARRAY), draw(ARRAY), draw(ARRAY)),
        "dispatch_ranks": lambda: core.dispatch_ranks(
            draw(ARRAY), draw(ARRAY), draw(st.integers(-1, 4))
        ),
        "settle_ranks": lambda: core.settle_ranks(
            draw(SMALL),
            draw(ARRAY),
            draw(SMALL),
            draw(ARRAY),
            draw(ARRAY),
            draw(ARRAY),
            draw(st.integers(-1, 4)),
        ),
        "settle_ranks of a pack": lambda: core.settle_ranks(
            *(np.array(draw(st.lists(st.integers(0, 2), min_size=4, max_size=4))) for _ in "rak"),
            draw(SMALL),
            draw(SMALL),
            np.cumsum([0] + draw(st.lists(st.integers(0, 3), min_size=4, max_size=4))),
            3,
        ),
        "next_fit": lambda: core.next_fit(draw(ARRAY), draw(st.integers(-1, 99)), draw(HOSTILE)),
        "best_fit": lambda: core.best_fit(draw(ARRAY), draw(st.integers(-1, 99)), draw(ARRAY)),
        "best_fit_decreasing": lambda: core.best_fit_decreasing(
            draw(ARRAY), draw(st.integers(-1, 99))
        ),
        "greedy_workload": lambda: core.greedy_workload(
            draw(ARRAY), draw(ARRAY), draw(st.integers(-1, 99)), draw(ARRAY), draw(ARRAY)
        ),
        "group": lambda: core.group(draw(ARRAY), draw(st.integers(-1, 9))),
    }
    with contextlib.suppress(ValueError):
        calls[draw(st.sampled_from(sorted(calls)))]()


# ---- which core is used ------------------------------------------------------------------------


def test_both_cores_offer_the_same_functions():
    assert native.is_native == (native.core is not reference)
    if native.is_native:
        assert set(reference.__all__) == {n for n in dir(core) if not n.startswith("_")}


def test_without_the_extension_there_is_one_warning_and_the_same_plan(tmp_path):
    program = """
import json, sys, warnings
sys.modules["megatron.packed._C"] = None
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from megatron.packed.packing import build_pack_plan, native
    import megatron.packed.context_parallel
plan = build_pack_plan([[5, 6, 1, 7]], 1, 0, alignment=4)
texts = [str(w.message) for w in caught if "packing core" in str(w.message)]
print(json.dumps([native.is_native, texts, plan.cu_seqlens_padded.tolist()]))
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MEGATRON_PACKED_")}
    environment.pop("LD_PRELOAD", None)
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=environment | {"PYTHONPATH": str(ROOT)},
    )
    is_native, texts, padded = json.loads(done.stdout)
    assert not is_native and padded == [0, 4, 8]
    assert len(texts) == 1 and "build_ext --inplace" in texts[0]


def test_an_extension_of_older_sources_is_not_used(monkeypatch):
    old = types.ModuleType("megatron.packed._C")
    for name in set(reference.__all__) - {"summary"}:
        setattr(old, name, None)
    monkeypatch.setitem(sys.modules, "megatron.packed._C", old)
    monkeypatch.delenv("MEGATRON_PACKED_EXTENSION_DIR", raising=False)
    monkeypatch.delenv("MEGATRON_PACKED_NATIVE", raising=False)
    with pytest.warns(RuntimeWarning, match="older sources and lacks summary.*build_ext"):
        assert native._load() is reference


def test_the_environment_chooses_the_core(monkeypatch):
    monkeypatch.setenv("MEGATRON_PACKED_NATIVE", "0")
    assert native._load() is reference
    monkeypatch.setenv("MEGATRON_PACKED_NATIVE", "1")
    monkeypatch.setenv("MEGATRON_PACKED_EXTENSION_DIR", "/nowhere")
    with pytest.raises(ImportError, match="MEGATRON_PACKED_EXTENSION_DIR"):
        native._load()


def test_planning_does_not_import_torch():
    program = "import sys, megatron.packed.packing as p; print(p.PackPlan, 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ) | {"PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.split()[-1] == "False"
