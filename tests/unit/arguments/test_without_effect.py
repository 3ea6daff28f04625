"""Flags that nothing here reads: each is listed, or refused by name; none gets through unsaid."""

from __future__ import annotations

import pickle

import pytest

from megatron.packed.arguments import FlagSpec, all_specs, config_from_flags
from megatron.packed.arguments.without_effect import REFUSED, REPLACED
from megatron.packed.errors import ConfigurationError

from .flags import MINIMAL

SPECS = [spec for spec in all_specs().values() if spec.group == "without_effect"]


def other_value(spec: FlagSpec) -> str:
    if not spec.takes_value:
        return ""
    return {int: "7", float: "0.5", str: "x"}[spec.value_type]


def ids(specs: list[FlagSpec]) -> list[str]:
    return [spec.dest for spec in specs]


REFUSALS = [spec for spec in SPECS if spec.refused]
EFFECTLESS = [spec for spec in SPECS if not spec.refused]


def test_the_tables_are_read_whole() -> None:
    assert len(SPECS) == sum(len(text.split()) for text in [*REPLACED.values(), *REFUSED.values()])
    assert {spec.refused for spec in REFUSALS} == {why for _, why in REFUSED}


@pytest.mark.parametrize("spec", EFFECTLESS, ids=ids(EFFECTLESS))
def test_what_has_no_effect_is_listed(spec: FlagSpec) -> None:
    for name in spec.names:
        config = config_from_flags(f"{MINIMAL} {name} {other_value(spec)}")
        rows = [(row.flag, row.used, row.why) for row in config.replacements]
        assert spec.replaced is not None
        listed = [(spec.name, spec.replaced.used, spec.replaced.why)]
        assert rows == ([] if spec.negative else listed)  # which turns off what isn't there
        assert config.get(spec.dest) == spec.default


@pytest.mark.parametrize("spec", REFUSALS, ids=ids(REFUSALS))
def test_what_would_change_the_run_is_refused(spec: FlagSpec) -> None:
    with pytest.raises(ConfigurationError) as caught:
        config_from_flags(f"{MINIMAL} {spec.name} {other_value(spec)}")
    text = str(caught.value)
    assert text.startswith(spec.name) and f"is refused: {spec.refused}" in text
    assert "\n" not in text and ("leave it out" in text or ": give --" in text)


def test_scripts_with_the_values_by_default_are_told_nothing() -> None:
    flags = "--profile-step-start 10 --memory-snapshot-path snapshot.pickle --local-rank 0"
    assert config_from_flags(f"{MINIMAL} {flags} --no-initialization").replacements == ()


def test_the_record_of_a_run_can_be_sent() -> None:
    config = config_from_flags(f"{MINIMAL} --profile")
    assert pickle.loads(pickle.dumps(config)) == config
