"""A suite ends, whatever its tests leave behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

from tests.faults.started import end_started, remember


def _stubborn(ready: object) -> None:
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    child = os.fork()
    if child:
        ready.send(child)  # type: ignore[attr-defined]
    time.sleep(600)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_processes_are_ended_with_what_they_started() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_stubborn, args=(theirs,))
    process.start()
    remember(process)
    child = ours.recv()
    assert _runs(child)
    assert end_started() == [process.pid]
    assert not process.is_alive()
    deadline = time.monotonic() + 10
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(child)
    assert end_started() == []
