"""docs/flags.md says what the declarations say."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.packed.arguments import all_specs
from megatron.packed.arguments.documentation import documented_core, flags_page

PAGE = Path(__file__).parents[3] / "docs" / "flags.md"


def test_the_page_is_current() -> None:
    written = PAGE.read_text(encoding="utf-8")
    if f"megatron-core {documented_core()} declares" not in written:
        pytest.skip(f"the page lists another megatron-core's settings than {documented_core()}'s")
    assert written == flags_page(), "docs/flags.md is out of date: run `make docs` and commit it"


def test_every_flag_has_one_row_with_its_class() -> None:
    rows = [line for line in flags_page().splitlines() if line.startswith("| `--")]
    flags = [spec for spec in all_specs().values() if spec.names]
    assert len(rows) == len(flags)
    for row, spec in zip(rows, sorted(flags, key=_place(flags)), strict=True):
        assert row.startswith(f"| `{spec.name}`") and row.count("|") - row.count("\\|") == 6
        assert f"| {spec.disposition}" in row


def _place(flags: list):
    sections = list(dict.fromkeys(spec.section for spec in flags))
    return lambda spec: (sections.index(spec.section), flags.index(spec))
