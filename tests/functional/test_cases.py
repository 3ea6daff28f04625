"""Upstream's own training cases, shrunk and trained here, or refused for a mathematical reason.

The cases are those of the project's shared folder where it lies beside the checkout, else the
project's own equivalents. A quarter runs by default, all in the full suite.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.packed.cases.case import read_cases

REPOSITORY = Path(__file__).resolve().parents[2]
SHARED = REPOSITORY.parent / "shared" / "cases" / "upstream_cases.jsonl"
OWN = REPOSITORY / "tests" / "data" / "cases.jsonl"
FILE = SHARED if SHARED.is_file() else OWN
CASES = [case.name for case in read_cases(FILE)]
QUARTER = CASES[::4]
MOST_REFUSALS = 6

# What changes the mathematics and isn't there.
REFUSABLE = (
    "--fp8-format",
    "--export-kd-cfg",
    "--experimental-attention-variant dsa",
)

Reports = Callable[..., dict[str, dict]]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """Outcomes of every n-th case by name; each share of them is tried once."""
    known: dict[tuple[int, str], dict[str, dict]] = {}

    def get(every: int, only: str = "*") -> dict[str, dict]:
        if (every, only) not in known:
            file = FILE if only == "*" else OWN
            report = tmp_path_factory.mktemp("cases") / "report.json"
            tool = REPOSITORY / "tools" / "try_case.py"
            options = ["--every", str(every), "--jobs", "2", "--report", str(report)]
            options += ["--only", only]
            result = subprocess.run(
                [sys.executable, str(tool), str(file), *options],
                capture_output=True,
                text=True,
                timeout=1700,
            )
            assert report.is_file(), result.stderr
            results = json.loads(report.read_text())
            known[every, only] = {entry["case"]: entry for entry in results}
            failed = [entry for entry in results if entry["status"] == "failed"]
            assert result.returncode == (1 if failed else 0)
            lines = result.stdout.splitlines()
            assert len(lines) == len(results) + 1, result.stdout + result.stderr
        return known[every, only]

    return get


def check(entry: dict) -> None:
    if entry["status"] == "refused":
        assert any(flag in entry["reason"] for flag in REFUSABLE), entry["reason"]
        return
    assert entry["status"] == "ok", entry["reason"]
    losses = entry["losses"]
    assert len(losses) == 3 and all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    assert entry["processes"] <= 4


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", QUARTER)
def test_a_quarter_of_the_cases(name: str, reports: Reports) -> None:
    check(reports(4)[name])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CASES)
def test_every_case(name: str, reports: Reports) -> None:
    check(reports(1)[name])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_few_are_refused(reports: Reports) -> None:
    refused = [name for name, entry in reports(1).items() if entry["status"] == "refused"]
    assert len(refused) <= MOST_REFUSALS, refused


@pytest.mark.slow
def test_layers_that_differ(reports: Reports) -> None:
    """Upstream's cases have none."""
    name = "llama/layers_that_differ"
    check(reports(1, name)[name])
