"""Every layout trains what one process trains on one document at a time; a quarter by default."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from tests.distributed.documents import NO_TARGET
from tests.distributed.pool import WorkerPools
from tests.functional import parity
from tests.functional.parity_layouts import (
    EOD,
    LAYOUTS,
    MODELS,
    SEQ,
    STEPS,
    Layout,
    pieces_of,
    row_ids,
)
from tests.functional.parity_reference import Reference


@pytest.fixture(scope="module")
def reference(functional_pools: WorkerPools) -> Callable[[str], Reference]:
    """The run of documents of a model, made once."""
    known: dict[str, Reference] = {}

    def get(model: str) -> Reference:
        if model not in known:
            known[model] = parity.reference_of(functional_pools, model)
        return known[model]

    return get


def _parameters() -> list[object]:
    return [
        pytest.param(layout, id=layout.name, marks=() if layout.often else pytest.mark.slow)
        for layout in LAYOUTS
    ]


@pytest.mark.parametrize("layout", _parameters())
def test_layout(
    layout: Layout, functional_pools: WorkerPools, reference: Callable[[str], Reference]
) -> None:
    difference = parity.measure(functional_pools, layout, reference(layout.model))
    assert difference.passed, difference.line()


@pytest.mark.parametrize("model", MODELS)
def test_the_reference_learns(model: str, reference: Callable[[str], Reference]) -> None:
    """From a uniform guess on, on data that is worth packing."""
    run = reference(model)
    assert run.losses[0] == pytest.approx(math.log(257), abs=0.2)
    assert run.losses[-1] < run.losses[0] - 0.5
    assert len(set(run.counts)) > STEPS // 4


def test_the_data_is_awkward() -> None:
    """Short and cut documents, documents of nothing but their end, tails of padding."""
    rows = row_ids()
    pieces = [each for ids in rows for each in pieces_of(ids)]
    assert sum(len(ids) < SEQ for ids in rows) >= 10
    assert sum(each.inputs == (EOD,) for each in pieces) >= 5
    assert any(NO_TARGET not in each.targets for each in pieces)  # goes on in the next row
    assert any(each.inputs[-1] == EOD and len(each.inputs) > 1 for each in pieces)
    for ids in rows:
        assert [i for each in pieces_of(ids) for i in each.inputs] == ids[:SEQ]
    assert {each.name for each in LAYOUTS if each.often} and len(LAYOUTS) >= 40
