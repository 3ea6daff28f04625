"""Processes that die at any moment: the run goes on as if they had not."""

from __future__ import annotations

import random
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from tests.faults.conftest import Reference
from tests.faults.crashes import CRASH_POINTS, at_save
from tests.faults.fleet import Fleet, assert_same_run
from tests.faults.table import FaultTable

QUICK = ("mid-write",)  # by default; the others take as long again


def _points() -> list[object]:
    return [
        pytest.param(point, marks=() if point in QUICK else pytest.mark.slow)
        for point in CRASH_POINTS
    ]


@pytest.mark.parametrize("point", _points())
def test_a_kill_inside_a_save(
    point: str, fault_flags: str, reference: Reference, table: FaultTable, tmp_path: Path
) -> None:
    """The save of iteration 6 never ends; the run goes on from 3, or from 6 once it has a name."""
    if point == "between renames":
        pytest.skip("only where a checkpoint is replaced; see the next test")
    folder = tmp_path / "checkpoints"
    # With the restarts of a launcher: --save is where it goes on from, without a flag.
    command = f"{fault_flags} --save {folder} --save-interval 3"
    first = Fleet(
        2, command, tmp_path / "records", prepare=partial(at_save, point=point, iteration=6)
    )
    codes = first.run()
    assert codes[0] == -signal.SIGKILL
    second = Fleet(2, command, tmp_path / "records", restarts=1)
    assert second.run() == [0, 0], second.output()
    lost = assert_same_run(second, reference(2))
    whole = point in ("before tracker", "inside tracker", "after tracker")
    tracked = point == "after tracker"
    assert lost == (0 if tracked else 3), (point, lost)
    assert whole or lost == 3
    assert not [entry for entry in folder.iterdir() if entry.name.endswith((".tmp", ".replaced"))]
    table.add("SIGKILL of a rank at each step of a save", lost=lost)


@pytest.mark.slow
def test_a_kill_while_a_checkpoint_is_replaced(
    fault_flags: str, reference: Reference, table: FaultTable, tmp_path: Path
) -> None:
    """The tracker's checkpoint is written again and is gone for a moment: the one before serves."""
    folder = tmp_path / "checkpoints"
    command = f"{fault_flags} --save {folder} --save-interval 3"
    records = tmp_path / "records"
    assert Fleet(2, f"{command} --exit-interval 6", records).run() == [0, 0]
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    hook = partial(at_save, point="between renames", iteration=6)
    assert Fleet(2, command, records, prepare=hook, restarts=1).run()[0] == -signal.SIGKILL
    second = Fleet(2, command, records, restarts=2)
    assert second.run() == [0, 0], second.output()
    lost = assert_same_run(second, reference(2))
    table.add("SIGKILL of a rank at each step of a save", lost=lost - 3)


def _kill_at_random(
    seed: int, kills: int, flags: str, reference: Fleet, folder: Path
) -> tuple[int, int]:
    """One run that is killed again and again; kills that hit, and steps trained again."""
    generator = random.Random(seed)
    command = f"{flags} --save {folder / 'checkpoints'} --save-interval 2"
    fleet, hits = Fleet(2, command, folder / "records"), 0
    for number in range(kills):
        fleet = Fleet(2, command, folder / "records", restarts=number)
        fleet.start()
        if not fleet.wait_for_lines(len(fleet.steps(0)) + generator.randint(1, 4)):
            assert fleet.join() == [0, 0], fleet.output()
            break
        time.sleep(generator.random() * 0.3)
        fleet.kill(signal.SIGKILL, generator.choice(([0], [1], [0, 1])))
        codes = fleet.join()
        hits += codes != [0, 0]
    else:
        fleet = Fleet(2, command, folder / "records", restarts=kills)
        assert fleet.run() == [0, 0], fleet.output()
    return hits, assert_same_run(fleet, reference)


def test_kills_at_random_moments(
    fault_flags: str, reference: Reference, table: FaultTable, tmp_path: Path
) -> None:
    hits, lost = _kill_at_random(0, 2, f"{fault_flags} --async-save", reference(2), tmp_path)
    table.add("SIGKILL of one rank or all, at a random moment", lost=lost, tries=hits)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("flags", ["", "--async-save --num-workers 1"])
def test_thirty_kills(
    flags: str, fault_flags: str, reference: Reference, table: FaultTable, tmp_path: Path
) -> None:
    total = 0
    for seed in range(20):
        folder = tmp_path / str(seed)
        hits, lost = _kill_at_random(seed, 4, f"{fault_flags} {flags}", reference(2), folder)
        table.add("SIGKILL of one rank or all, at a random moment", lost=lost, tries=hits)
        total += hits
        if total >= 18:
            return
    raise AssertionError(f"only {total} kills hit")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_signals_at_random_moments(
    fault_flags: str, reference: Reference, table: FaultTable, tmp_path: Path
) -> None:
    for seed in range(6):
        generator, folder = random.Random(seed), tmp_path / str(seed)
        save = f"--save {folder / 'c'} --load {folder / 'c'} --exit-signal-handler --async-save"
        fleet = Fleet(2, f"{fault_flags} {save} --save-interval 3", folder / "records").start()
        fleet.wait_for_lines(generator.randint(1, 9))
        time.sleep(generator.random() * 0.3)
        fleet.kill(signal.SIGTERM, generator.choice(([0], [1], [0, 1])))
        assert fleet.join() == [0, 0], fleet.output()
        again = Fleet(2, fleet.flags, folder / "records")
        if again.ended():
            continue
        assert again.run() == [0, 0], again.output()
        assert assert_same_run(again, reference(2)) == 0
        table.add("SIGTERM of one rank or all, at a random moment")
