"""Processes that tests have started, ended whatever becomes of the test.

Python waits for them at its own end: one rank that hangs, of a test that has failed, would keep the
whole suite from ending.
"""

from __future__ import annotations

import contextlib
import os
import signal
from multiprocessing.process import BaseProcess

_STARTED: list[BaseProcess] = []


def remember(process: BaseProcess) -> None:
    """Have `end_started` look after a process."""
    _STARTED.append(process)


def end_started() -> list[int]:
    """Kill the processes that still run, with what they started.

    Returns:
        Their process ids.
    """
    ended = []
    for process in _STARTED:
        # One that its test has joined may be closed, and its id another program's.
        with contextlib.suppress(ValueError):
            if process.pid is not None and process.is_alive():
                ended.append(process.pid)
                with contextlib.suppress(ProcessLookupError):  # before it has a group of its own
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.join()
    _STARTED.clear()
    return ended
