"""Copies and sums of runs of rows against loops over single rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.packed.accelerator import cpu_ops
from megatron.packed.attention.row_copies import (
    add_rows,
    copy_rows,
    laid_out,
    laid_out_parts,
    new_rows,
)
from megatron.packed.attention.row_runs import RowRuns

HEADS, WIDTH = 3, 8


@st.composite
def some_runs(draw):
    """Disjoint target rows, any source rows, in runs of any length; and the sizes of both."""
    counts = draw(st.lists(st.integers(0, 70), max_size=6))
    gaps = draw(st.lists(st.integers(0, 3), min_size=len(counts), max_size=len(counts)))
    table, at = [], 0
    source_rows = max([*counts, 1]) + draw(st.integers(0, 9))
    for count, gap in zip(counts, gaps, strict=True):
        table.append((at + gap, draw(st.integers(0, source_rows - count)), count))
        at += gap + count
    draw(st.randoms()).shuffle(table)
    return RowRuns(np.array(table, np.int64).reshape(-1, 3)), at + 2, source_rows


def one_by_one(target, source, runs, add):
    result = target.clone()
    for to, start, count in runs.table.tolist():
        for i in range(count):
            result[to + i] = source[start + i] + (result[to + i] if add else 0)
    return result


def in_layout(values, layout):
    """The same values with another order in memory."""
    rows, heads, width = values.shape
    if layout == "heads apart":
        like = torch.empty(heads, rows, width, dtype=values.dtype).transpose(0, 1)
    elif layout == "columns of a longer row":
        like = torch.empty(rows, heads, 2 * width + 1, dtype=values.dtype)[..., 1 : width + 1]
    else:
        like = torch.empty(rows, heads, width, dtype=values.dtype)
    return like.copy_(values)


LAYOUTS = ("heads together", "heads apart", "columns of a longer row")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("add", [False, True])
@given(some_runs(), st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS))
def test_any_runs_between_any_layouts(dtype, add, case, to_layout, from_layout):
    runs, target_rows, source_rows = case
    target = torch.randn(target_rows, HEADS, WIDTH).to(dtype)
    source = torch.randn(source_rows, HEADS, WIDTH).to(dtype)
    result = in_layout(target, to_layout)
    (add_rows if add else copy_rows)(result, in_layout(source, from_layout), runs)
    assert torch.equal(result, one_by_one(target, source, runs, add))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("to_layout", LAYOUTS)
@pytest.mark.parametrize("from_layout", LAYOUTS)
@pytest.mark.parametrize("width", [8, 6])
def test_many_rows_go_past_the_caches(threads, to_layout, from_layout, width, monkeypatch):
    """From half a MB on another instruction writes, if the rows begin where it can."""
    monkeypatch.setattr(cpu_ops, "threads", lambda: threads)
    rows = 9000
    source = torch.randn(rows, HEADS, width)
    runs = RowRuns(np.array([[5000, 0, 4000], [0, 4001, 4999], [4999, 4000, 1]]))
    target = torch.full((rows, HEADS, width), torch.nan)
    result = in_layout(target, to_layout)
    copy_rows(result, in_layout(source, from_layout), runs)
    assert torch.equal(result, torch.cat([source[4001:], source[4000:4001], source[:4000]]))


@given(some_runs())
def test_the_inverse_brings_rows_back(case):
    runs, target_rows, source_rows = case
    to, start = runs.index
    assert runs.rows == len(to) == len(start)
    assert to.tolist() == runs.inverse.index[1].tolist()
    assert start.tolist() == runs.inverse.index[0].tolist()


@given(some_runs())
def test_where_no_index_is_needed(case):
    runs, *_ = case
    to, start = runs.index
    # An empty run somewhere else makes it say no; that costs time alone.
    assert not runs.fills_target or to.tolist() == list(range(len(to)))
    assert not runs.inverse.fills_target or start.tolist() == list(range(len(to)))
    assert RowRuns.gather(runs.table[:, 1], runs.table[:, 2]).fills_target


@given(st.lists(st.integers(0, 40), max_size=40))
def test_runs_of_an_index(index):
    runs = RowRuns.of_index(np.array(index, np.int64))
    to, start = runs.index
    assert to.tolist() == list(range(len(index)))
    assert start.tolist() == index
    # No run could be longer.
    ends = runs.table[:-1, 1] + runs.table[:-1, 2]
    assert not (ends == runs.table[1:, 1]).any()


def test_all_rows():
    assert RowRuns.all(3).table.tolist() == [[0, 0, 3]]
    assert RowRuns.gather(np.array([4, 9]), np.array([2, 3])).table.tolist() == [
        [0, 4, 2],
        [2, 9, 3],
    ]


def test_kernels_find_rows_of_a_head_side_by_side():
    parts = laid_out_parts(torch.arange(5 * 14.0).view(5, 14), [(2, 3), (2, 4)])
    assert [(p.shape, p.stride()) for p in parts] == [
        ((5, 2, 3), (3, 15, 1)),
        ((5, 2, 4), (4, 20, 1)),
    ]
    # Every value once.
    assert sorted(torch.cat([p.flatten() for p in parts]).tolist()) == list(range(70))
    later = laid_out(torch.arange(100.0)[10:], 4, 2, 3, start=5)
    assert later[0, 0, 0] == 15
    assert later[1, 0, 0] == 18
    assert later[0, 1, 0] == 27


@pytest.mark.parametrize("together", [False, True])
def test_new_rows_have_zeros_in_padding(together):
    like = torch.empty(6, 2, 3)
    like.new_empty(6 * 2 * 4).fill_(torch.nan)  # memory that the next may get
    rows = new_rows(like, 4, torch.float64, np.array([1, 5]), together)
    assert rows.shape == (6, 2, 4)
    assert rows.dtype == torch.float64
    assert rows.stride() == ((8, 4, 1) if together else (4, 24, 1))
    assert (rows[[1, 5]] == 0).all()
