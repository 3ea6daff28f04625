"""Start training runs on this machine and read what became of them.

Ranks are forks of one process that has imported everything, so that a run of four costs no more
imports than a run of one. Each goes through the same `main` as `torchrun pretrain_gpt.py`.
"""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.packed.cases.case import command_line
from megatron.packed.cases.shrink import SmallRun

REFUSED = "is refused: "
_LOSS = re.compile(r"\| lm loss: (\S+) ")
_GRACE = 20.0  # seconds that ranks get to leave once the first has failed


@dataclass(frozen=True)
class Outcome:
    """What became of one run.

    Attributes:
        status: `ok`, `refused` by name, or `failed`.
        reason: Why, in a line; for `ok` the losses.
        losses: Loss of each step that was logged.
        seconds: From start to end.
    """

    status: str
    reason: str
    losses: tuple[float, ...] = ()
    seconds: float = 0.0


@dataclass
class Launched:
    """A run that is on its way."""

    run: SmallRun
    words: list[str]
    folder: Path
    ranks: dict[int, int]
    started: float
    deadline: float
    codes: dict[int, int] = field(default_factory=dict)
    timed_out: bool = False


def start(run: SmallRun, folder: Path, main: Callable[[], None], timeout: float) -> Launched:
    """Fork a run's ranks; their output goes to files in `folder`.

    Args:
        run: Small, with local files.
        folder: For output.
        main: The training program's entry point, which reads sys.argv and the environment.
        timeout: Seconds until it is given up.
    """
    words = [*command_line(run.args), "--accelerator", "cpu", "--threads", "1"]
    port = _free_port()
    sys.stdout.flush()
    sys.stderr.flush()
    ranks = {}
    for rank in range(run.processes):
        pid = os.fork()
        if pid == 0:
            _be_a_rank(rank, run.processes, port, words, folder, main)
        ranks[pid] = rank
    now = time.monotonic()
    return Launched(run, words, folder, ranks, now, now + timeout)


def _be_a_rank(
    rank: int, world: int, port: int, words: Sequence[str], folder: Path, main: Callable[[], None]
) -> None:
    """In the fork: become one process of a run, and end."""
    code = 1
    try:
        os.setsid()  # its data loaders end with it
        for stream, name in ((1, "out"), (2, "err")):
            file = os.open(folder / f"{name}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, stream)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world),
            LOCAL_WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        os.chdir(folder)
        sys.argv = ["pretrain_gpt.py", *words]
        main()
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait_for_one(launched: Sequence[Launched]) -> Iterator[Launched]:
    """Yield the runs that have ended, waiting until there is one.

    Args:
        launched: Runs on their way.
    """
    while True:
        ended = [each for each in launched if _has_ended(each)]
        if ended:
            yield from ended
            return
        time.sleep(0.05)


def _has_ended(launched: Launched) -> bool:
    for pid in list(launched.ranks):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            rank = launched.ranks.pop(pid)
            launched.codes[rank] = os.waitstatus_to_exitcode(status)
            if launched.codes[rank]:
                launched.deadline = min(launched.deadline, time.monotonic() + _GRACE)
    if launched.ranks and (
        time.monotonic() > launched.deadline or launched.codes.get(0)  # rank 0 speaks for all
    ):
        launched.timed_out = not any(launched.codes.values())
        end(launched)
    return not launched.ranks


def end(launched: Launched) -> None:
    """End whatever is left of a run.

    Args:
        launched: A run on its way.
    """
    for pid, rank in list(launched.ranks.items()):
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(pid, signal.SIGKILL)  # before it had a session of its own
        os.waitpid(pid, 0)
        launched.codes.setdefault(rank, -signal.SIGKILL)
        del launched.ranks[pid]


def outcome(launched: Launched, steps: int) -> Outcome:
    """Judge a run that has ended: finite losses that fall, or a refusal by name.

    Args:
        launched: The run.
        steps: Losses that it must have logged.
    """
    seconds = time.monotonic() - launched.started
    output = _read(launched.folder / "out.0")
    losses = tuple(float(text) for text in _LOSS.findall(output))
    if any(launched.codes.values()):
        message = _message(launched)
        refused = REFUSED in message and "Traceback" not in message
        if launched.timed_out:
            message = "timed out"
        return Outcome("refused" if refused else "failed", message, losses, seconds)
    shown = " > ".join(f"{loss:.4f}" for loss in losses)
    if len(losses) != steps:
        problem = f"{len(losses)} losses logged, not {steps}"
    elif not all(map(math.isfinite, losses)):
        problem = f"loss isn't finite: {shown}"
    elif losses[-1] >= losses[0]:
        problem = f"loss doesn't fall: {shown}"
    else:
        return Outcome("ok", shown, losses, seconds)
    return Outcome("failed", problem, losses, seconds)


def _message(launched: Launched) -> str:
    """The error of the first rank that left with one, in a line; tracebacks come first."""
    said = {
        rank: _read(launched.folder / f"err.{rank}").strip()
        for rank, code in sorted(launched.codes.items())
        if code
    }
    for rank, text in said.items():
        if "Traceback" in text:
            return f"rank {rank}: Traceback: {text.splitlines()[-1]}"
    for text in said.values():
        lines = text.splitlines()
        starts = [place for place, line in enumerate(lines) if line.startswith("error: ")]
        if starts:
            whole = " ".join(line.strip() for line in lines[starts[-1] :])
            return whole.removeprefix("error: ")
    last = next((text.splitlines()[-1] for text in said.values() if text), "nothing said")
    return f"exit codes {sorted(set(launched.codes.values()))}: {last}"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])
