"""Signals that ask a run to end: the step is finished and saved before it does."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType

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

    @contextlib.contextmanager
    def listening(self) -> Iterator[SignalWatch]:
        """Listen for as long as the context lasts."""
        before = {each: signal.signal(each, self._on_signal) for each in self.signals}
        try:
            yield self
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

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
    """Listen as `--exit-signal-handler` and `--exit-signal` say; None without the former."""
    flags = config.faults
    if not flags.exit_signal_handler:
        yield None
        return
    chosen = {signal.Signals[flags.exit_signal]: None, signal.SIGUSR1: None}
    with SignalWatch(tuple(chosen)).listening() as watch:
        yield watch


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
