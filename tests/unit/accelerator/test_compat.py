"""Both generations of megatron-core are read alike, whichever is installed."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

from megatron.packed.accelerator import compat


@dataclasses.dataclass
class Spec:
    """As megatron-core's ModuleSpec."""

    module: Any
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    submodules: Any = None


class Old:
    """What a part is made by."""


class New(Old):
    """What stands in for it."""


@pytest.fixture
def version(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`version(0, 16)` pretends that one is installed."""

    def pretend(*found: int) -> None:
        monkeypatch.setattr(compat, "core_version", lambda: found)

    return pretend


@pytest.mark.parametrize("part", [Spec(Old, {"a": 1}, "parts"), Spec(Old)])
def test_a_part_by_specification(part: Spec) -> None:
    assert compat.builder_of(part) is Old
    assert compat.submodules_of(part) == part.submodules
    other = compat.made_by(part, New)
    assert (other.module, other.params, other.submodules) == (New, part.params, part.submodules)
    assert part.module is Old


def test_a_part_by_partial_function() -> None:
    part = functools.partial(dict, submodules="parts", a=1)
    assert compat.builder_of(part) is dict
    assert compat.submodules_of(part) == "parts"
    assert compat.submodules_of(functools.partial(dict)) is None
    other = compat.made_by(part, functools.partial(dict, b=2))
    assert other(c=3) == {"submodules": "parts", "a": 1, "b": 2, "c": 3}
    assert part() == {"submodules": "parts", "a": 1}


def test_a_part_that_is_a_class() -> None:
    assert compat.builder_of(Old) is Old
    assert compat.submodules_of(Old) is None


def test_each_generation_is_told_what_it_reads(version: Any) -> None:
    units = {"deepep": 20, "hybridep": 16}
    version(0, 16)
    both = {"moe_deepep_num_sms": 20, "moe_hybridep_num_sms": 16}
    assert compat.dispatcher_settings("hybridep", units) == both
    assert compat.predicting_layer_name() == "transformer_layer"
    version(0, 19)
    assert compat.dispatcher_settings("hybridep", units) == {"moe_hybridep_num_sms": 16}
    assert compat.predicting_layer_name() == "mtp_model_layer"


def test_the_parts_of_a_row_come_first() -> None:
    assert compat.row_and_documents(("tokens", "documents")) == ("tokens", "documents")
    assert compat.row_and_documents(("tokens", "documents", "lengths")) == ("tokens", "documents")


def test_what_a_function_does_not_know_is_left_out() -> None:
    def older(a: int, b: int = 2) -> None: ...

    assert compat.accepted_by(older, {"b": 1, "c": 3}) == {"b": 1}


def test_predictions_are_detached_where_the_configuration_says_so() -> None:
    older, newer = Spec(Old), Spec(Old)
    newer.mtp_detach_heads = True  # type: ignore[attr-defined]
    assert [compat.detaches_predictions(config) for config in (older, newer)] == [False, True]
