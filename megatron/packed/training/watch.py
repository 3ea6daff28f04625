"""A watch on a running job: signs of life, slow ranks, ranks that hang."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megatron.packed.arguments import Config
from megatron.packed.errors import EXIT_HANG, DataError
from megatron.packed.training.environment import print_rank_0

# All ranks that hang print their stacks before the first of them ends: then the launcher ends all.
_TIME_TO_PRINT = 5.0
# Where Python itself is stuck, a timer of the C library prints, this much later.
_C_TIMER = 1.5


@dataclass
class HangWatch:
    """Ends a process that shows no sign of life, after printing the stacks of all its threads.

    Attributes:
        seconds: how long a micro-batch, a save or an exchange may take.
        time_to_print: between printing and ending.
        end: ends the process with an exit code, for tests to replace.
    """

    seconds: float
    time_to_print: float = _TIME_TO_PRINT
    end: Callable[[int], object] = os._exit
    phase: str = "start"
    _last: float = field(default_factory=time.monotonic)
    _armed: float = 0.0
    _done: threading.Event = field(default_factory=threading.Event)

    def beat(self, phase: str) -> None:
        """Show a sign of life.

        Args:
            phase: what begins now, for the message.
        """
        self.phase, self._last = phase, time.monotonic()
        if self._last - self._armed > 0.1 * self.seconds:
            self._armed = self._last
            late = _C_TIMER * self.seconds + 2 * self.time_to_print
            faulthandler.dump_traceback_later(late, exit=True)

    @contextlib.contextmanager
    def watching(self) -> Iterator[HangWatch]:
        """Watch for as long as the context lasts."""
        self._done.clear()
        self.beat(self.phase)
        thread = threading.Thread(target=self._watch, name="hang watch", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._done.set()
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._done.wait(min(self.seconds / 20.0, 5.0)):
            silent = time.monotonic() - self._last
            if silent < self.seconds:
                continue
            rank = os.environ.get("RANK", "0")
            print(
                f"error: rank {rank} on {socket.gethostname()}: no progress for {silent:.0f} s "
                f"in {self.phase} (--distributed-timeout-minutes); stacks of its threads:",
                file=sys.stderr,
                flush=True,
            )
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
            if not self._done.wait(self.time_to_print):
                self.end(EXIT_HANG)
            return


@dataclass
class Heartbeat:
    """A file that tells the world outside that a run lives, and where it is.

    Attributes:
        path: of the file; replaced as a whole.
        interval: seconds between writes, at least.
    """

    path: Path
    interval: float = 1.0
    _last: float = float("-inf")
    _failed: bool = False

    def check(self) -> None:
        """Write once, before training.

        Raises:
            DataError: the file can't be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write({"phase": "start"})
        except OSError as error:
            raise DataError(
                f"--heartbeat-file {self.path}: can't be written ({error.strerror})"
            ) from error

    def beat(self, phase: str, iteration: int, consumed_samples: int) -> None:
        """Write where the run is, unless it was written a moment ago."""
        now = time.monotonic()
        if now - self._last < self.interval:
            return
        self._last = now
        content = {"phase": phase, "iteration": iteration, "consumed_samples": consumed_samples}
        try:
            self._write(content)
            self._failed = False
        except OSError as error:
            if not self._failed:
                print_rank_0(f"WARNING: --heartbeat-file {self.path}: {error.strerror}")
            self._failed = True

    def _write(self, content: dict[str, object]) -> None:
        content |= {"time": time.time(), "host": socket.gethostname(), "pid": os.getpid()}
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        temporary.write_text(json.dumps(content))
        os.replace(temporary, self.path)


@dataclass
class StragglerWatch:
    """Compares the time that each rank works on its own before gradients are reduced.

    Attributes:
        device: where collectives run.
        threshold: a rank that takes this many times the median is a straggler.
        slowest: ranks named at either end.
    """

    device: torch.device
    threshold: float
    slowest: int = 1
    _seconds: float = 0.0
    _steps: int = 0

    def add(self, seconds: float) -> None:
        """Count one step of this rank."""
        self._seconds += seconds
        self._steps += 1

    def report(self) -> list[str]:
        """Lines about the steps since the last report; a collective call."""
        world_size = torch.distributed.get_world_size()
        mine = torch.zeros(world_size, dtype=torch.float64, device=self.device)
        mine[torch.distributed.get_rank()] = self._seconds / max(self._steps, 1)
        torch.distributed.all_reduce(mine)
        self._seconds, self._steps = 0.0, 0
        return straggler_lines(mine.tolist(), self.threshold, self.slowest)


def straggler_lines(seconds: list[float], threshold: float, slowest: int) -> list[str]:
    """What to say about the times of all ranks.

    Args:
        seconds: per step, by rank.
        threshold: see `StragglerWatch`.
        slowest: see `StragglerWatch`.
    """
    order = sorted(range(len(seconds)), key=seconds.__getitem__)
    median = statistics.median_low(seconds)

    def named(ranks: list[int]) -> str:
        return ", ".join(f"{1000 * seconds[rank]:.1f} (rank {rank})" for rank in ranks)

    lines = [
        "   ranks | forward-backward before gradient reduction (ms): "
        f"min {named(order[:slowest])} | median {1000 * median:.1f} | "
        f"max {named(order[::-1][:slowest])} |"
    ]
    for rank in order:
        if seconds[rank] > threshold * median:
            lines.append(
                f"WARNING: straggler: rank {rank} takes {1000 * seconds[rank]:.1f} ms a step "
                f"before gradient reduction, {seconds[rank] / median:.2f} times the median"
            )
    return lines


@dataclass
class RunWatch:
    """All that watches one run.

    Attributes:
        hang: ends it when it hangs.
        heartbeat: on rank 0, with `--heartbeat-file`.
        stragglers: with `--log-straggler`.
    """

    hang: HangWatch
    heartbeat: Heartbeat | None = None
    stragglers: StragglerWatch | None = None

    @classmethod
    def of(cls, config: Config, device: torch.device) -> RunWatch:
        """Watch as the flags say; checks the heartbeat file.

        Raises:
            DataError: the file can't be written.
        """
        flags = config.faults
        heartbeat = None
        if flags.heartbeat_file is not None and config.parallel.rank == 0:
            heartbeat = Heartbeat(Path(flags.heartbeat_file))
            heartbeat.check()
        return cls(
            HangWatch(60.0 * config.parallel.distributed_timeout_minutes),
            heartbeat,
            StragglerWatch(device, flags.straggler_threshold, flags.straggler_minmax_count)
            if flags.log_straggler
            else None,
        )

    def beat(self, phase: str, iteration: int, consumed_samples: int) -> None:
        """Show a sign of life to everyone who watches."""
        self.hang.beat(f"{phase}, iteration {iteration}")
        if self.heartbeat is not None:
            self.heartbeat.beat(phase, iteration, consumed_samples)
