"""Steps that are run again: the same to the bit, and a verdict on what was wrong."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.faults.conftest import Reference
from tests.faults.fleet import Fleet, assert_same_run, break_loss, expect_small_losses
from tests.faults.table import FaultTable

RERUN = "--rerun-mode validate_results"


def test_a_step_that_is_run_again_is_the_same_step(
    fault_flags: str, reference: Reference, tmp_path: Path
) -> None:
    """A spike that comes again is no fault: training goes on, with the same dropout and data."""
    flags = f"{fault_flags} {RERUN} --check-for-spiky-loss --num-workers 1"
    fleet = Fleet(2, flags, tmp_path, prepare=expect_small_losses)
    assert fleet.run() == [0, 0], fleet.output()
    assert assert_same_run(fleet, reference(2)) == 0
    text = fleet.output()
    assert text.count("Continuing normal execution because failed validation was not fatal") == 11
    assert "First rerun: unexpected result is reproducible within the tolerance" in text


@pytest.mark.slow
def test_differences_of_steps_run_twice_are_reported(
    fault_flags: str, reference: Reference, tmp_path: Path
) -> None:
    flags = f"{fault_flags} --rerun-mode report_stats --tensor-model-parallel-size 2"
    fleet = Fleet(2, flags, tmp_path)
    assert fleet.run() == [0, 0], fleet.output()
    assert assert_same_run(fleet, reference(2, "--tensor-model-parallel-size 2")) == 0
    lines = [line for line in fleet.output().splitlines() if line.startswith("   rerun | ")]
    assert any("NaN or Inf in a loss" in line for line in lines), fleet.output()
    assert all(line.endswith("samples, all identical |") for line in lines), lines


def test_a_transient_fault_ends_the_run_before_the_step(
    fault_flags: str, reference: Reference, table: FaultTable, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    command = f"{fault_flags} {RERUN} --save {folder} --load {folder}"
    hook = partial(break_loss, iteration=5, times=1, rank=1)
    fleet = Fleet(2, command, tmp_path / "records", prepare=hook)
    assert fleet.run()[0] == 17
    assert "Possible transient error!" in fleet.output(1)
    assert "iteration 5: unexpected result" in fleet.output()
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "4"
    again = Fleet(2, command, tmp_path / "records")
    assert again.run() == [0, 0], again.output()
    assert assert_same_run(again, reference(2)) == 0
    table.add("NaN once, seen by --rerun-mode validate_results")


@pytest.mark.slow
def test_a_persistent_fault_is_examined_elsewhere(
    fault_flags: str, reference: Reference, table: FaultTable, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    command = f"{fault_flags} {RERUN} --save {folder} --load {folder}"
    broken = partial(break_loss, iteration=5, times=1000)

    def run(hook: object) -> Fleet:
        fleet = Fleet(1, command, tmp_path / "records", prepare=hook)  # type: ignore[arg-type]
        codes.append(fleet.run()[0])
        return fleet

    codes: list[int | None] = []
    run(broken)
    run(broken)  # on the same node
    both = run(partial(break_loss, iteration=5, times=1000, elsewhere=True))
    assert "reproducible on a different GPU, therefore it was likely correct" in both.output()
    whole = run(partial(break_loss, iteration=0, times=0, elsewhere=True))
    assert "Possible persistent error!" in whole.output()
    assert codes == [16, 16, 17, 17]
    again = Fleet(1, command.replace(RERUN, ""), tmp_path / "records")
    assert again.run() == [0], again.output()
    assert assert_same_run(again, reference(1)) == 0
    table.add("NaN each time, seen by --rerun-mode validate_results", tries=4)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("transient_error", 17),
        pytest.param("persistent_error", 16, marks=pytest.mark.slow),
    ],
)
def test_pretended_errors(kind: str, code: int, fault_flags: str, tmp_path: Path) -> None:
    flags = f"{fault_flags} {RERUN} --error-injection-rate 1 --error-injection-type {kind}"
    fleet = Fleet(1, f"{flags} --result-rejected-tracker-filename {tmp_path / 'log'}", tmp_path)
    assert fleet.run() == [code]
    assert "Injecting error type" in fleet.output()
    assert len(fleet.steps(0)) == 1  # the first step is never examined
    assert "status=RerunValidationStatus.INITIAL_RUN" in (tmp_path / "log").read_text()
