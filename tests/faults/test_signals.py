"""A request to end: the step is finished, saved, and the run goes on from there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from megatron.packed.training.signals import SignalWatch
from tests.faults.conftest import Reference
from tests.faults.fleet import Fleet, assert_same_run, signal_self


@pytest.mark.parametrize(
    ("number", "flags"),
    [
        (signal.SIGTERM, "--async-save --save-interval 2 --num-workers 1"),
        pytest.param(signal.SIGUSR1, "", marks=pytest.mark.slow),
    ],
)
def test_a_signal_on_one_rank_ends_all_after_a_save(
    number: signal.Signals, flags: str, fault_flags: str, reference: Reference, tmp_path: Path
) -> None:
    """At iteration 5, where an evaluation is due: it is made up for after the restart."""
    folder = tmp_path / "checkpoints"
    command = f"{fault_flags} --exit-signal-handler --save {folder} --load {folder} {flags}"
    ask = partial(signal_self, number=number, iteration=5, rank=1)
    first = Fleet(2, command, tmp_path / "records", prepare=ask)
    assert first.run() == [0, 0], first.output()
    assert "a signal on another rank: ending after iteration 5, saving" in first.output()
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "5"
    assert "validation loss" not in first.output()
    second = Fleet(2, command, tmp_path / "records")
    assert second.run() == [0, 0], second.output()
    assert assert_same_run(second, reference(2)) == 0
    expected = [line for line in reference(2).output().splitlines() if " loss at " in line]
    assert [line for line in second.output().splitlines() if " loss at " in line] == expected


def test_without_a_folder_it_ends_and_says_so(fault_flags: str, tmp_path: Path) -> None:
    ask = partial(signal_self, number=signal.SIGTERM, iteration=2)
    fleet = Fleet(1, f"{fault_flags} --exit-signal-handler", tmp_path, prepare=ask)
    assert fleet.run() == [0]
    assert "SIGTERM: ending after iteration 2, without --save, nothing is saved" in fleet.output()
    assert len(fleet.steps(0)) == 2


def test_without_the_flag_a_signal_ends_at_once(fault_flags: str, tmp_path: Path) -> None:
    ask = partial(signal_self, number=signal.SIGTERM, iteration=2)
    fleet = Fleet(1, fault_flags, tmp_path, prepare=ask)
    assert fleet.run() == [-signal.SIGTERM]
    assert len(fleet.steps(0)) == 1


def test_duplicates_are_one_request_and_a_second_ends_at_once() -> None:
    now, codes = [100.0], []
    watch = SignalWatch((signal.SIGUSR1,), clock=lambda: now[0], end_now=codes.append)
    before = signal.getsignal(signal.SIGUSR1)
    watch.listen()
    try:
        assert watch.received is None
        for _ in range(2):  # by the cluster, and by the launcher that passes it on
            os.kill(os.getpid(), signal.SIGUSR1)
            now[0] += 2.0
        assert watch.received is signal.SIGUSR1 and codes == []
        now[0] += 4.0
        os.kill(os.getpid(), signal.SIGUSR1)
        assert codes == [128 + signal.SIGUSR1]
    finally:
        watch.put_back()
    assert signal.getsignal(signal.SIGUSR1) is before


_LATE = """
import os, signal, sys
from megatron.packed.arguments import config_from_flags
from megatron.packed.training.signals import watch_of

class Late:  # deleted with its module, after Python has put its own handlers away
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)

late = Late()
config = config_from_flags(sys.argv[1], {})
try:
    with watch_of(config):
        if sys.argv[2] == "failed":
            raise RuntimeError
except RuntimeError:
    print("failed", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("ended", flush=True)
"""


@pytest.mark.parametrize("how", ["well", "failed"])
def test_a_signal_after_the_end_of_a_run(how: str, fault_flags: str) -> None:
    """It neither spoils the exit code of a run that ended well nor waits for one that failed."""
    command = [sys.executable, "-c", _LATE, f"{fault_flags} --exit-signal-handler", how]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if how == "well":
        assert (process.returncode, process.stdout) == (0, "ended\n"), process.stderr
    else:
        assert (process.returncode, process.stdout) == (-signal.SIGTERM, "failed\n")
