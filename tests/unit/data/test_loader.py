from __future__ import annotations

import gc
import multiprocessing
import subprocess
import sys
import warnings

import numpy
import pytest

from megatron.packed.data.bshd import BshdCollator
from megatron.packed.data.loader import build_loader
from megatron.packed.data.samplers import build_sampler
from megatron.packed.errors import DataError


class Numbers:
    """Row i holds the numbers i, i + 1, ..."""

    def __init__(self, count: int, broken: int | None = None) -> None:
        self.count = count
        self.broken = broken

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict:
        if index == self.broken:
            raise DataError(f"row {index} is broken")
        return {"text": numpy.arange(index, index + 5), "length": 5}


def batches(count: int = 10, consumed: int = 0, workers: int = 0, broken: int | None = None):
    sampler = build_sampler(
        "single",
        count,
        seed=0,
        consumed_samples=consumed,
        micro_batch_size=2,
        data_parallel_rank=0,
        data_parallel_size=1,
    )
    return build_loader(Numbers(count, broken), sampler, BshdCollator(99), num_workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_come_in_order(workers: int):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = list(batches(workers=workers, consumed=2))
    assert [batch.sample_indices for batch in got] == [(2, 3), (4, 5), (6, 7), (8, 9)]
    assert got[0].tokens.tolist() == [[2, 3, 4, 5], [3, 4, 5, 6]]
    assert got[0].labels[1].tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_error_in_a_worker_arrives_as_its_message(workers: int):
    iterator = batches(workers=workers, broken=5)
    next(iterator), next(iterator)
    with pytest.raises(DataError) as raised:
        next(iterator)
    assert str(raised.value) == "row 5 is broken"


def refuse(samples: list[dict]) -> None:
    raise DataError("can't collate")


def test_a_data_error_in_collate_arrives_too():
    sampler = build_sampler(
        "single",
        4,
        seed=0,
        consumed_samples=0,
        micro_batch_size=2,
        data_parallel_rank=0,
        data_parallel_size=1,
    )
    with pytest.raises(DataError, match="^can't collate$"):
        next(build_loader(Numbers(4), sampler, refuse))


def test_workers_end_with_their_iterator(monkeypatch: pytest.MonkeyPatch):
    """Also as part of a cycle, whose objects the garbage collector ends in any order."""
    patience = "torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL"
    monkeypatch.setattr(patience, 600.0)  # the workers'
    others = set(multiprocessing.active_children())
    batches = build_loader(Numbers(100), [[i] for i in range(100)], list, num_workers=2)
    next(batches)
    monkeypatch.setattr(patience, 10.0)  # that of who waits for them, and terminates them then
    terminated: list[object] = []
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "terminate", terminated.append)
    workers = set(multiprocessing.active_children()) - others
    assert len(workers) == 2
    batches.itself = batches
    del batches
    gc.collect()
    assert not terminated
    assert [worker.exitcode for worker in workers] == [0, 0]


# What a program does that handles SIGTERM and dies of an error nobody expected, which holds on to
# its batches.
_DIES_WITH_A_WORKER = """
import signal, sys
from megatron.packed.data.loader import build_loader

signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
batches = build_loader([{}] * 100, [[i] for i in range(100)], list, num_workers=2)
next(batches)
raise RuntimeError("unexpected")
"""


def test_a_program_that_dies_takes_its_workers_along():
    """Workers that ignore SIGTERM aren't waited for: the launcher must see the exit at once."""
    run = subprocess.run(
        [sys.executable, "-c", _DIES_WITH_A_WORKER], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 1
    assert run.stderr.endswith("RuntimeError: unexpected\n"), run.stderr
