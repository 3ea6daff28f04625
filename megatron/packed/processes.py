"""Ending the processes that this one has started."""

from __future__ import annotations

import multiprocessing
import signal
import threading


def end_workers() -> None:
    """Kill what daemonic workers this process still has; for a process that ends.

    Data-loader workers may ignore the signal that multiprocessing ends them with at exit, which
    would then wait for them for ever; and they hold on to the output for seconds.
    """
    if threading.current_thread() is threading.main_thread():
        # torch raises an error for a worker that was killed, in the middle of whatever runs.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in multiprocessing.active_children():
        if worker.daemon:
            worker.kill()
