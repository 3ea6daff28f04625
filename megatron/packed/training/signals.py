"""Signals that ask a run to end: the step is finished and saved before it does."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from megatron.packed.arguments import Config

# Clusters signal the launcher and every rank of a job, and the launcher passes it on: what
# arrives this soon after the first is the same request.
DUPLICATE_SECONDS = 5.0
_END_NOW = 128  # + number, as shells report a process that a signal ended


@dataclass
class SignalWatch:
    """Remembers that a signal asked this process to end; a later one ends it at once.

    Attributes:
        signals: those listened to.
        received: the first that came; None before.
        clock: seconds, for tests to replace.
        end_now: ends the process with an exit code, for tests to replace.
    """

    signals: tuple[signal.Signals, ...]
    received: signal.Signals | None = None
    clock: Callable[[], float] = time.monotonic
    end_now: Callable[[int], object] = os._exit
    _since: float = field(default=0.0, init=False)
    _before: dict[signal.Signals, Any] = field(default_factory=dict, init=False)

    def listen(self) -> None:
        """Take requests from now on."""
        self._before = {each: signal.signal(each, self._on_signal) for each in self.signals}

    def put_back(self) -> None:
        """Have the signals do what they did before."""
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def ignore(self) -> None:
        """Take no more requests, until the process has ended."""
        for each in self.signals:
            signal.signal(each, signal.SIG_IGN)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._since = signal.Signals(number), self.clock()
        elif self.clock() - self._since > DUPLICATE_SECONDS:
            # Not print: the signal may have interrupted one.
            text = f"second signal ({signal.Signals(number).name}): ending at once, unsaved\n"
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())
            self.end_now(_END_NOW + number)


@contextlib.contextmanager
def watch_of(config: Config) -> Iterator[SignalWatch | None]:
    """Listen as `--exit-signal-handler` and `--exit-signal` say; None without the former.

    For programs: a run that came to its end has nothing left to save, and a request that finds
    it still closing files and connections must not turn its exit code into a failure. So the
    handlers stay after a run that ended well, and once Python takes itself down, which would put
    the deadly defaults back, the signals are ignored.
    """
    flags = config.faults
    if not flags.exit_signal_handler:
        yield None
        return
    chosen = {signal.Signals[flags.exit_signal]: None, signal.SIGUSR1: None}
    watch = SignalWatch(tuple(chosen))
    watch.listen()
    try:
        yield watch
    except BaseException:
        watch.put_back()
        raise
    atexit.register(watch.ignore)


def true_on_any_rank(questions: Mapping[str, bool], device: torch.device) -> dict[str, bool]:
    """Which of several things hold on at least one rank; one small collective call for all.

    Args:
        questions: this rank's answers; every rank asks the same ones. None of them costs nothing.
        device: where collectives run.
    """
    if not questions:
        return {}
    answers = torch.tensor([int(value) for value in questions.values()], device=device)
    torch.distributed.all_reduce(answers, torch.distributed.ReduceOp.MAX)
    return {name: bool(value) for name, value in zip(questions, answers.tolist(), strict=True)}
