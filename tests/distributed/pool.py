"""Persistent pools of gloo ranks for tests that need real processes.

    def total(value):                                   # module level: it is sent by name
        tensor = torch.tensor([value * dist.get_rank()])
        dist.all_reduce(tensor)
        return tensor.item()

    def test_total(worker_pool):
        assert worker_pool(2).run(total, 3) == [3, 3]   # one result per rank

torch and megatron-core are imported once per session, by a fork server that starts while pytest
still collects; ranks are forks of it. Every call gets a fresh process group, reset megatron-core
state and fixed seeds (`worker.reset_state`), so that tests cannot see each other.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection as mp_connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
DEFAULT_TIMEOUT = 120.0
_START_TIMEOUT = 120.0
_WORKER_MODULE = "tests.distributed.worker"
# How long the other ranks get to answer once one has failed. Usually they wait in a collective
# for the failed one and never will.
_GRACE = 1.0

# What every rank sees whatever the parent's environment says: CPU only, one thread per rank
# (ranks share the cores), gloo on the loopback device so that no host name is resolved, and no
# torch.compile: the CPU facade turns it off as well, but only for modules imported after it, and
# here megatron-core comes first.
FIXED_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
}


class PoolError(RuntimeError):
    """A call that did not end with an answer from every rank."""


class RankDiedError(PoolError):
    """A rank's process ended during a call."""


class RankTimeoutError(PoolError):
    """A call took longer than its timeout."""


class RemoteError(PoolError):
    """An exception in a rank whose own type cannot be sent to the test."""


@dataclass(frozen=True)
class Request:
    """One call, the same for every rank.

    Args:
        payload: pickled (function, args, kwargs).
        store: path of the file that this call's ranks meet at; new for every call.
        timeout: seconds that the caller waits.
        environ: the parent's environment variables at the time of the call.
        sys_path: the parent's import path at the time of the call.
    """

    payload: bytes
    store: str
    timeout: float
    environ: dict[str, str]
    sys_path: list[str]


@dataclass(frozen=True)
class Failure:
    """An exception in a rank.

    Args:
        summary: type and message on one line.
        traceback: the rank's own traceback.
        when: system-wide monotonic time in seconds, to tell the cause from what it caused.
        exception: the pickled exception, None where it does not survive pickling.
    """

    summary: str
    traceback: str
    when: float
    exception: bytes | None


@dataclass(frozen=True)
class Reply:
    """What a rank answers: a pickled result, or the failure."""

    result: bytes | None = None
    failure: Failure | None = None


@contextmanager
def _import_environment() -> Iterator[None]:
    """Environment in which the fork server, and so every rank, imports its modules."""
    changes = {
        **FIXED_ENVIRONMENT,
        # megatron-core warns on import about every optional package that is absent.
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join(
            [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    }
    saved = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def start_fork_server() -> None:
    """Start the imports that all pools share, in the background. Returns at once."""
    from multiprocessing import forkserver

    multiprocessing.get_context("forkserver").set_forkserver_preload([_WORKER_MODULE])
    with _import_environment():
        forkserver.ensure_running()


class WorkerPool:
    """A fixed number of ranks that run functions together.

    Processes start with the first call and stay. A call that leaves a rank dead, hanging or
    waiting for a failed one ends all of them; the next call starts new ones.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}; it must be at least 1")
        self.world_size = world_size
        self._processes: list[BaseProcess] = []
        self._connections: list[mp_connection.Connection] = []
        self._directory: Path | None = None
        self._calls = 0
        atexit.register(self.close)

    def run(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        timeout: float = DEFAULT_TIMEOUT,
        **kwargs: Any,
    ) -> list[Any]:
        """Run `function(*args, **kwargs)` on every rank, with torch.distributed initialised.

        Args:
            function: a module-level function; it is sent by name.
            timeout: seconds until the call counts as hanging. Start-up is not counted.

        Returns:
            One result per rank, in rank order.

        Raises:
            TypeError: the function or an argument cannot be pickled.
            RankDiedError: a rank's process ended; the message says how.
            RankTimeoutError: the call hung; the message says where each rank was.
            BaseException: what a rank raised, with a note that holds the rank and its traceback.
                If several raised, the first one in time.
        """
        payload = _pickle_call(function, args, kwargs)
        name = getattr(function, "__qualname__", repr(function))
        try:
            if not self._alive():
                self._start()
            replies = self._exchange(name, payload, timeout)
        except BaseException:  # a timeout of pytest's own, or Ctrl-C, leaves ranks busy as well
            self.close()
            raise
        failures = {rank: reply.failure for rank, reply in replies.items() if reply.failure}
        if failures:
            if len(replies) < self.world_size:
                self.close()
            raise _to_exception(failures, self.world_size)
        return [_result(replies[rank]) for rank in range(self.world_size)]

    @property
    def process_ids(self) -> list[int | None]:
        """Process ids by rank; empty while no process runs."""
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """End all ranks at once, with everything they started."""
        for process in self._processes:
            _end(process)
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join()
            process.close()
        self._processes, self._connections = [], []
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _alive(self) -> bool:
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def _start(self) -> None:
        self.close()
        start_fork_server()
        context = multiprocessing.get_context("forkserver")
        self._directory = Path(tempfile.mkdtemp(prefix="worker-pool-"))
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_run_worker,
                args=(theirs, rank, self.world_size, str(self._stack_path(rank))),
                name=f"rank {rank} of {self.world_size}",
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        deadline = time.monotonic() + _START_TIMEOUT
        for rank, connection in enumerate(self._connections):
            try:
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    raise RankTimeoutError(f"rank {rank} did not start in {_START_TIMEOUT:g} s")
                connection.recv()
            except (EOFError, OSError) as error:
                raise RankDiedError(f"rank {rank} {self._how_it_ended(rank)} at start") from error

    def _exchange(self, name: str, payload: bytes, timeout: float) -> dict[int, Reply]:
        """Send the call and collect replies; fewer than all only when one is a failure."""
        assert self._directory is not None
        self._calls += 1
        store = self._directory / f"store-{self._calls}"
        request = Request(payload, str(store), timeout, dict(os.environ), list(sys.path))
        for rank, connection in enumerate(self._connections):
            try:
                connection.send(request)
            except OSError as error:
                raise self._death(rank, name) from error

        replies: dict[int, Reply] = {}
        started = time.monotonic()
        deadline, failed = started + timeout, False
        while len(replies) < self.world_size:
            waiting = {
                connection: rank
                for rank, connection in enumerate(self._connections)
                if rank not in replies
            }
            ready = mp_connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                if failed:
                    break
                raise self._hang(name, timeout, sorted(waiting.values()))
            for connection, rank in waiting.items():
                if connection not in ready:
                    continue
                try:
                    replies[rank] = connection.recv()
                except (EOFError, OSError) as error:
                    raise self._death(rank, name) from error
                if replies[rank].failure and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + _GRACE)
        return replies

    def _death(self, rank: int, name: str) -> RankDiedError:
        return RankDiedError(
            f"rank {rank} of {self.world_size} {self._how_it_ended(rank)} while it ran {name}; "
            "the pool is restarted for the next call"
        )

    def _how_it_ended(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(5.0)
        code = process.exitcode
        if code is None:
            return "closed its connection"
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    def _hang(self, name: str, timeout: float, ranks: list[int]) -> RankTimeoutError:
        """An error that shows where each rank without an answer is."""
        for rank in ranks:
            process_id = self._processes[rank].pid
            assert process_id is not None
            with suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGUSR1)
        lines = [
            f"{name} did not end in {timeout:g} s on rank {', '.join(map(str, ranks))} of "
            f"{self.world_size}; the pool is restarted for the next call"
        ]
        deadline = time.monotonic() + 2.0
        for rank in ranks:
            stack = ""
            while not stack and time.monotonic() < deadline:
                time.sleep(0.02)
                stack = self._stack_path(rank).read_text()
            lines += [f"--- rank {rank} is at", stack.rstrip() or "(no answer: stuck in C code)"]
        return RankTimeoutError("\n".join(lines))

    def _stack_path(self, rank: int) -> Path:
        assert self._directory is not None
        return self._directory / f"stack-{rank}"


class WorkerPools:
    """One pool per world size, each started when it is first used."""

    def __init__(self) -> None:
        self._pools: dict[int, WorkerPool] = {}

    def __call__(self, world_size: int) -> WorkerPool:
        """The pool of `world_size` ranks."""
        if world_size not in self._pools:
            self._pools[world_size] = WorkerPool(world_size)
        return self._pools[world_size]

    def close(self) -> None:
        """End every pool."""
        for pool in self._pools.values():
            pool.close()


def _pickle_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bytes:
    try:
        return pickle.dumps((function, args, kwargs))
    except Exception as error:
        raise TypeError(
            f"cannot send {getattr(function, '__qualname__', function)} to the ranks ({error}); "
            "use a module-level function and arguments that pickle can send"
        ) from error


def _result(reply: Reply) -> Any:
    assert reply.result is not None
    return pickle.loads(reply.result)


def _to_exception(failures: dict[int, Failure], world_size: int) -> BaseException:
    rank = min(failures, key=lambda rank: failures[rank].when)
    first = failures[rank]
    if first.exception is not None:
        error: BaseException = pickle.loads(first.exception)
    else:
        error = RemoteError(first.summary)
    error.add_note(f"raised on rank {rank} of {world_size}:\n{first.traceback}")
    for other in sorted(failures.keys() - {rank}):
        error.add_note(f"later on rank {other}: {failures[other].summary}")
    return error


def _run_worker(
    connection: mp_connection.Connection, rank: int, world_size: int, stack_path: str
) -> None:
    # Not imported above: worker.py imports torch, which the process of pytest may never need.
    from tests.distributed import worker

    worker.main(connection, rank, world_size, stack_path)


def _end(process: BaseProcess) -> None:
    if process.pid is None:  # never started; and group 0 would be our own
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # ended, or killed before it had a group of its own
        process.kill()
