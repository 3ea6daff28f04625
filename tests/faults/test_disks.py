"""Disks that refuse, and data that goes away: a message, and nothing half-written."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import Reference
from tests.faults.crashes import at_save, deny, refuse
from tests.faults.fleet import Fleet, assert_same_run
from tests.faults.table import FaultTable


def _names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


WHOLE = ["iter_0000003", "latest_checkpointed_iteration.txt"]


@pytest.mark.parametrize(
    ("action", "point", "text", "flags"),
    [
        pytest.param(refuse, "mid-write", "No space left", "--async-save", marks=pytest.mark.slow),
        pytest.param(refuse, "before manifest", "No space left", "", marks=pytest.mark.slow),
        pytest.param(refuse, "inside tracker", "No space left", "", marks=pytest.mark.slow),
        pytest.param(deny, "after prepare", "Read-only file system", "", marks=pytest.mark.slow),
        pytest.param(deny, "before rename", "Read-only file system", "", marks=pytest.mark.slow),
    ],
)
def test_a_disk_that_refuses_ends_the_run(
    action: Callable[[], None],
    point: str,
    text: str,
    flags: str,
    fault_flags: str,
    reference: Reference,
    table: FaultTable,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "checkpoints"
    command = f"{fault_flags} --save {folder} --load {folder} --save-interval 3 {flags}"
    fails = partial(at_save, point=point, iteration=6, action=action)
    first = Fleet(2, command, tmp_path / "records", prepare=fails)
    assert first.run()[0] == 1
    assert "checkpoint of iteration 6 could not be written: " in first.output()
    assert text in first.output() and "--on-save-failure continue would have" in first.output()
    assert "Traceback" not in first.output()
    if point != "inside tracker":  # there the checkpoint itself is whole
        assert _names(folder) == WHOLE
    assert (folder / WHOLE[1]).read_text() == "3"
    second = Fleet(2, command, tmp_path / "records")
    assert second.run() == [0, 0], second.output()
    table.add(f"disk: {text}", lost=assert_same_run(second, reference(2)))


def test_training_goes_on_without_the_checkpoint(
    fault_flags: str, reference: Reference, table: FaultTable, tmp_path: Path
) -> None:
    """Iterations 6 and 9 are not saved, 12 is."""
    folder = tmp_path / "checkpoints"
    flags = f"--save {folder} --save-interval 3 --async-save --on-save-failure continue"
    fails = partial(at_save, point="mid-write", iteration=6, last=9, action=refuse, rank=1)
    fleet = Fleet(2, f"{fault_flags} {flags}", tmp_path / "records", prepare=fails)
    assert fleet.run() == [0, 0], fleet.output()
    assert assert_same_run(fleet, reference(2)) == 0
    for iteration in (6, 9):
        message = f"WARNING: checkpoint of iteration {iteration} could not be written: rank 1: "
        assert message in fleet.output()
    assert _names(folder) == ["iter_0000003", "iter_0000012", WHOLE[1]]
    assert (folder / WHOLE[1]).read_text() == "12"
    table.add("disk: full, --on-save-failure continue", tries=2)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte: room for one checkpoint and a half."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk takes root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
def test_a_disk_that_is_full(
    small_disk: Path, fault_flags: str, reference: Reference, table: FaultTable, tmp_path: Path
) -> None:
    folder = small_disk / "checkpoints"
    command = f"{fault_flags} --save {folder} --load {folder} --save-interval 3"
    first = Fleet(1, command, tmp_path / "records")
    assert first.run() == [1], first.output()
    assert "could not be written" in first.output() and "No space left" in first.output()
    assert all(not name.startswith(".") for name in _names(folder))
    second = Fleet(1, command.replace(f"--save {folder}", ""), tmp_path / "records")
    assert second.run() == [0], second.output()
    table.add("disk: full, a real one", lost=assert_same_run(second, reference(1)))


def _hurt_data(trainer: Any, prefix: str, iteration: int, cut: bool) -> None:
    """Take the file of tokens away, or cut it, in the middle of a run."""
    optimize = trainer.step.optimizer.step

    def then_hurt() -> Any:
        if trainer.progress.iteration + 1 == iteration:
            if cut:
                os.truncate(f"{prefix}.bin", 0)
            else:
                os.rename(f"{prefix}.bin", f"{prefix}.gone")
        return optimize()

    trainer.step.optimizer.step = then_hurt


@pytest.mark.slow
@pytest.mark.parametrize("cut", [True, False])
def test_data_that_goes_away(
    cut: bool, fault_flags: str, reference: Reference, table: FaultTable, tmp_path: Path
) -> None:
    """A file that is cut takes the process with it, one that is renamed is still open."""
    old = fault_flags.split("--data-path ")[1].split()[0]
    prefix = str(tmp_path / "text")
    for suffix in (".bin", ".idx"):
        shutil.copy(old + suffix, prefix + suffix)
    whole = Path(f"{prefix}.bin").read_bytes()
    folder = tmp_path / "checkpoints"
    flags = fault_flags.replace(f"--data-path {old}", f"--data-path {prefix}")
    command = f"{flags} --save {folder} --load {folder} --save-interval 3"
    hook = partial(_hurt_data, prefix=prefix, iteration=5, cut=cut)
    records = tmp_path / "records"
    first = Fleet(1, f"{command} --exit-interval 8", records, prepare=hook)
    (code,) = first.run()
    assert code == (-signal.SIGBUS if cut else 0), first.output()
    refused = Fleet(1, command, records)
    assert refused.run() == [1]
    assert f"{prefix}.bin" in refused.output() and "Traceback" not in refused.output()
    Path(f"{prefix}.bin").write_bytes(whole)
    second = Fleet(1, command, records)
    assert second.run() == [0], second.output()
    table.add("data file cut or taken away", lost=assert_same_run(second, reference(1)))
