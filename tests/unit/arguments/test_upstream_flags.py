"""Every flag of upstream's own training cases parses, and is of the class that is written down.

`tests/data/upstream_flags.json` holds their names, classes and kinds of values; the list of the
project's shared folder, where it lies beside the checkout, must name the same flags.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from megatron.packed.arguments import FlagSpec, all_specs, config_from_flags, parse_arguments
from megatron.packed.errors import ConfigurationError

from .flags import MINIMAL

REPOSITORY = Path(__file__).parents[3]
KNOWN = json.loads((REPOSITORY / "tests" / "data" / "upstream_flags.json").read_text())
SHARED = REPOSITORY.parent / "shared" / "cases" / "upstream_flags.tsv"
FLAGS = {name: spec for spec in all_specs().values() for name in spec.names}
REFUSED = [name for name, known in KNOWN.items() if known["class"] == "refused"]
REPLACED = [name for name, known in KNOWN.items() if known["class"] == "replaced"]


def value_for(spec: FlagSpec, known: dict) -> str:
    """A value that isn't the default, as on a command line."""
    if not spec.takes_value:
        return ""
    if known.get("value"):
        return known["value"]
    others = [choice for choice in spec.choices if choice != spec.default]
    if others:
        return others[0]
    return {int: "3", float: "0.5", str: "x"}[spec.value_type]


def test_the_list_is_that_of_the_shared_folder() -> None:
    if not SHARED.is_file():
        pytest.skip("the shared folder isn't beside this checkout")
    with SHARED.open(encoding="utf-8") as file:
        names = [row["flag"] for row in csv.DictReader(file, delimiter="\t")]
    assert sorted(names) == sorted(KNOWN)


@pytest.mark.parametrize("name", KNOWN)
def test_the_class_and_the_kind_of_value(name: str) -> None:
    assert name in FLAGS, f"{name} doesn't parse"
    spec, known = FLAGS[name], KNOWN[name]
    assert spec.disposition == known["class"]
    kind = "switch" if not spec.takes_value else spec.value_type.__name__
    assert kind + ("s" if spec.is_list else "") == known["type"]


@pytest.mark.parametrize("name", KNOWN)
def test_it_parses(name: str) -> None:
    spec = FLAGS[name]
    value = value_for(spec, KNOWN[name])
    config = parse_arguments(f"{MINIMAL} {name} {value}".split(), {})
    asked = config.get(spec.dest)
    if not spec.takes_value:
        assert asked is not spec.negative
    elif spec.is_list:
        assert asked == tuple(spec.value_type(word) for word in value.split())
    else:
        assert asked == spec.value_type(value)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_flag_and_a_way_out(name: str) -> None:
    spec = FLAGS[name]
    with pytest.raises(ConfigurationError) as caught:
        config_from_flags(f"{MINIMAL} {name} {value_for(spec, KNOWN[name])}")
    message = str(caught.value)
    assert name in message and f"is refused: {spec.refused}" in message
    assert "train" in message


@pytest.mark.parametrize("name", REPLACED)
def test_a_replacement_is_listed_and_strictness_makes_it_an_error(name: str) -> None:
    spec, known = FLAGS[name], KNOWN[name]
    flags = f"{MINIMAL} {known.get('with', '')} {name} {value_for(spec, known)}"
    config = config_from_flags(flags)
    rows = [row for row in config.replacements if row.flag == spec.name]
    if spec.negative and not rows:  # turns off what isn't there
        return
    (row,) = rows
    assert row.used and row.why and row.asked
    with pytest.raises(ConfigurationError) as caught:
        config_from_flags(f"{flags} --strict-flags")
    assert f"{spec.name} {row.asked}: would be replaced by {row.used}" in str(caught.value)
