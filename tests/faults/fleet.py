"""Runs of the program in processes that may die: forks of the pool's server, quick to start.

    fleet = Fleet(2, flags, tmp_path / "records")
    fleet.start()
    fleet.wait_for(3)                      # iterations
    fleet.kill(signal.SIGKILL, ranks=[1])
    codes = fleet.join()                   # as a launcher does: one has failed, all are ended

Every rank writes down each step as it finishes it, so that what was trained is known of a rank
that was killed, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection as mp_connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.distributed.pool import FIXED_ENVIRONMENT, start_fork_server
from tests.faults.started import remember

TIMEOUT = 240.0
_STORES: dict[str, Any] = {}
Hook = Callable[[Any], None]

COMMON = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 64 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--attention-dropout 0 --hidden-dropout 0.1 --micro-batch-size 1 --global-batch-size 4 "
    "--train-iters 12 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2 "
    "--eval-iters 1 --eval-interval 5 --log-interval 1 --threads 1 --use-packed-sequence "
    "--packing-strategy windowed_best_fit --use-distributed-optimizer "
)


@dataclass(frozen=True)
class Step:
    """One finished step of one rank, to the bit.

    Attributes:
        iteration: counts from 1.
        loss: as `float.hex`.
        grad_norm: as `float.hex`; None where the update was skipped.
        data: digest of the tokens and targets that the rank read for it.
    """

    iteration: int
    loss: str
    grad_norm: str | None
    data: str


@dataclass
class Fleet:
    """All ranks of one run.

    Attributes:
        world_size: ranks.
        flags: the command line.
        folder: for what the ranks write down; fleets that share it go on from each other.
        prepare: module-level function (or partial of one), called with the trainer.
        restarts: how often a launcher has started it again.
    """

    world_size: int
    flags: str
    folder: Path
    prepare: Hook | None = None
    restarts: int = 0
    processes: list[BaseProcess] = field(default_factory=list)

    def start(self) -> Fleet:
        """Start every rank."""
        start_fork_server()
        self.folder.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("forkserver")
        port = self._store().port
        for rank in range(self.world_size):
            request = _Request(
                rank,
                self.world_size,
                port,
                self.flags,
                self.folder,
                self.prepare,
                self.restarts,
                dict(os.environ),
            )
            process = context.Process(target=_main, args=(request,))
            process.start()
            remember(process)
            self.processes.append(process)
        return self

    def _store(self) -> Any:
        """Where ranks meet: like a launcher's, the same one after a restart."""
        from torch.distributed import TCPStore

        if not self.restarts or str(self.folder) not in _STORES:
            _STORES[str(self.folder)] = TCPStore(
                "127.0.0.1", 0, None, is_master=True, wait_for_workers=False
            )
        return _STORES[str(self.folder)]

    def wait_for(self, iteration: int) -> bool:
        """Wait until rank 0 has finished an iteration; False if the run ended before."""
        return self._wait(lambda: any(s.iteration >= iteration for s in self.steps(0)))

    def wait_for_lines(self, count: int) -> bool:
        """Wait until rank 0 has written down so many steps; False if the run ended before."""
        return self._wait(lambda: len(self.steps(0)) >= count)

    def wait_for_text(self, text: str, rank: int = 0) -> bool:
        """Wait until a rank has printed something; False if the run ended before."""
        return self._wait(lambda: text in self.output(rank))

    def _wait(self, condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            if not all(process.is_alive() for process in self.processes):
                return condition()
            assert time.monotonic() < deadline, self.output(0)
            time.sleep(0.01)
        return True

    def kill(self, number: signal.Signals, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to some ranks, or to all."""
        for rank in range(self.world_size) if ranks is None else ranks:
            process = self.processes[rank]
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, number)

    def join(self) -> list[int | None]:
        """Wait for the end; once a rank has failed the others are ended, as a launcher does."""
        deadline = time.monotonic() + TIMEOUT
        while alive := [p for p in self.processes if p.is_alive()]:
            left = deadline - time.monotonic()
            ended = mp_connection.wait([p.sentinel for p in alive], max(left, 0.0))
            failed = any(p.exitcode not in (None, 0) for p in self.processes)
            if failed or not ended:
                time.sleep(0.2)  # to say what is wrong
                self.kill(signal.SIGKILL)
                for process in self.processes:
                    process.join()
                assert ended, f"the run hangs:\n{self.output(0)}"
        codes = [process.exitcode for process in self.processes]
        self.processes.clear()
        return codes

    def run(self) -> list[int | None]:
        """Start, and wait for the end; exit codes by rank."""
        return self.start().join()

    def steps(self, rank: int) -> list[Step]:
        """What a rank has written down, over all starts; a torn last line is left out."""
        path = self.folder / f"steps-{rank}.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [Step(*json.loads(line)) for line in lines]

    def output(self, rank: int = 0) -> str:
        """What a rank printed, over all starts."""
        path = self.folder / f"output-{rank}.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def ended(self) -> bool:
        """Whether rank 0 came to the end of the run."""
        return (self.folder / "weights-0.txt").exists()

    def weights(self) -> list[str]:
        """Digest of every rank's final weights; of runs that came to their end."""
        return [
            (self.folder / f"weights-{rank}.txt").read_text() for rank in range(self.world_size)
        ]


def assert_same_run(resumed: Fleet, reference: Fleet) -> int:
    """Every step of every start is that of the uninterrupted run, none is missing.

    Returns:
        Steps that were trained again after the faults.
    """
    repeated = 0
    for rank in range(reference.world_size):
        expected = {step.iteration: step for step in reference.steps(rank)}
        steps = resumed.steps(rank)
        for step in steps:
            assert step == expected[step.iteration], (rank, step, expected[step.iteration])
        assert {step.iteration for step in steps} == expected.keys()
        repeated = max(repeated, len(steps) - len(expected))
    assert resumed.weights() == reference.weights()
    return repeated


# --- in the ranks ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Request:
    rank: int
    world_size: int
    port: int
    flags: str
    folder: Path
    prepare: Hook | None
    restarts: int
    environ: dict[str, str]


def _main(request: _Request) -> None:
    rank = request.rank
    os.setsid()
    path = request.folder / f"output-{rank}.txt"
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ.update(
        request.environ | FIXED_ENVIRONMENT,
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(request.world_size),
        LOCAL_WORLD_SIZE=str(request.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(request.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT=str(request.restarts),
    )
    from megatron.packed.cli import user_errors

    with user_errors():
        _train(request)
    sys.stdout.flush()
    os._exit(0)


def _train(request: _Request) -> None:
    """What pretrain_gpt.py does, with every step written down."""
    from unittest import mock

    import torch

    from megatron.packed.arguments import config_from_flags
    from megatron.packed.training import environment, setup
    from megatron.packed.training.signals import watch_of

    torch.set_num_threads(1)
    config = config_from_flags(request.flags, os.environ)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(setup, "measure_gemm_peak", lambda *a, **k: 1e9))
        this_process = environment.start(config)
        signals = stack.enter_context(watch_of(config))
        trainer = setup.build_trainer(config, this_process, signals)
        _write_down(trainer, request.folder / f"steps-{request.rank}.jsonl")
        if request.prepare is not None:
            request.prepare(trainer)
        trainer.train()
        trainer.evaluate_final()
    if trainer.progress.iteration == config.training.train_iters:
        path = request.folder / f"weights-{request.rank}.txt"
        path.write_text(_digest_of(trainer.step.model))
    environment.stop()


def _write_down(trainer: Any, path: Path) -> None:
    from tests.distributed.recording import RecordingSource

    source = RecordingSource(trainer.splits.train.source, [])
    trainer.splits.train.source = source
    record = trainer.reporter.record

    def on_record(step: Any, iteration: int, *rest: Any) -> None:
        record(step, iteration, *rest)
        data = hashlib.sha256(repr(source.batches).encode()).hexdigest()
        source.batches.clear()
        norm = None if step.grad_norm is None else step.grad_norm.hex()
        line = json.dumps([iteration, step.loss.hex(), norm, data[:16]])
        with open(path, "a") as stream:
            stream.write(line + "\n")

    trainer.reporter.record = on_record


def _digest_of(model: Any) -> str:
    state = hashlib.sha256()
    for chunk in model:
        for parameter in chunk.parameters():
            state.update(parameter.detach().float().numpy().tobytes())
    return state.hexdigest()


# --- hooks ----------------------------------------------------------------------------------------


def signal_self(trainer: Any, number: int, iteration: int, rank: int = 0) -> None:
    """Send this process a signal in the middle of an iteration, on one rank."""
    if trainer.environment.rank != rank:
        return

    def act() -> None:
        if trainer.progress.iteration + 1 == iteration:
            os.kill(os.getpid(), number)

    _before_loss(trainer, act)


def slow_down(trainer: Any, seconds: float, rank: int) -> None:
    """Have every micro-batch of one rank take longer."""
    if trainer.environment.rank == rank:
        _before_loss(trainer, lambda: time.sleep(seconds))


def hang(trainer: Any, iteration: int, rank: int, patience: float) -> None:
    """Have one rank stop in an iteration; every rank waits for `patience` seconds."""
    trainer.watch.hang.seconds = patience
    if trainer.environment.rank == rank:

        def stuck_here() -> None:
            if trainer.progress.iteration + 1 == iteration:
                time.sleep(TIMEOUT)

        _before_loss(trainer, stuck_here)


def both(trainer: Any, one: Hook, other: Hook) -> None:
    """Two hooks."""
    one(trainer)
    other(trainer)


def _before_loss(trainer: Any, action: Callable[[], None]) -> None:
    forward = trainer.step.forward.loss.compute_loss

    @functools.wraps(forward)
    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        action()
        return forward(*args, **kwargs)

    object.__setattr__(trainer.step.forward.loss, "compute_loss", compute_loss)


def break_loss(
    trainer: Any,
    iteration: int,
    times: int,
    rank: int = 0,
    factor: float = math.nan,
    elsewhere: bool = False,
) -> None:
    """Spoil the first losses of an iteration on one rank.

    Args:
        trainer: whose.
        iteration: which.
        times: micro-batches spoiled, those of the step when it is run again included.
        rank: where.
        factor: what losses are multiplied by.
        elsewhere: pretend that this process was moved to another node.
    """
    if elsewhere:
        trainer.step.reruns.machine.suspicious_node = "another"
    if trainer.environment.rank != rank:
        return
    helper, left = trainer.step.forward.loss, [times]
    forward = helper.compute_loss

    @functools.wraps(forward)
    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        if trainer.progress.iteration + 1 != iteration or not left[0]:
            return result
        left[0] -= 1
        return dataclasses.replace(result, total=result.total * factor)

    object.__setattr__(helper, "compute_loss", compute_loss)


def expect_small_losses(trainer: Any) -> None:
    """Have the next loss look like a spike."""
    machine = trainer.step.reruns.machine
    machine.large_value_counts["loss"], machine.max_values["loss"] = 100, 1e-3
