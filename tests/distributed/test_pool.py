"""The worker pool itself: answers by rank, errors, lost ranks, isolation between calls."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu
from megatron.core.tensor_parallel import random as tensor_parallel_random

from tests.distributed.pool import (
    REPOSITORY,
    RankDiedError,
    RankTimeoutError,
    RemoteError,
    WorkerPools,
)


class AwkwardError(Exception):
    """Pickles, but does not unpickle: its constructor wants two arguments."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def _identity(*args: object, **kwargs: object) -> tuple[object, ...]:
    return dist.get_rank(), dist.get_world_size(), os.getpid(), args, kwargs


def _all_reduce(value: torch.Tensor) -> torch.Tensor:
    total = value * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return total


def _raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"bad news from {rank}")
    dist.barrier()


def _raise_everywhere(error: type[BaseException], *args: object) -> None:
    raise error(*args)


def _kill_on(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)
    dist.barrier()


def _unsendable() -> object:
    return lambda: None


def _environment(name: str) -> tuple[str | None, str, str, str, int]:
    return (
        os.environ.get(name),
        os.environ["RANK"],
        os.environ["WORLD_SIZE"],
        os.environ["CUDA_VISIBLE_DEVICES"],
        torch.get_num_threads(),
    )


def _leave_a_mess(directory: str) -> None:
    tensor_size = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_size)
    num_microbatches_calculator.init_num_microbatches_calculator(0, None, 8, 2, 1)
    tensor_parallel_random.initialize_rng_tracker()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    os.chdir(directory)
    os.environ["LEFT_BEHIND"] = "1"


def _inspect() -> dict[str, object]:
    calculator = num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    before = {
        "model parallel": parallel_state.model_parallel_is_initialized(),
        "data parallel ranks": parallel_state._DATA_PARALLEL_GLOBAL_RANKS,
        "calculator": calculator,
        "tracker": tensor_parallel_random._CUDA_RNG_STATE_TRACKER_INITIALIZED,
        "dtype": str(torch.get_default_dtype()),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "directory": os.getcwd(),
        "variable": os.environ.get("LEFT_BEHIND"),
    }
    # A different layout than the one that was left behind must be possible.
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    assert parallel_state.get_data_parallel_world_size() == dist.get_world_size()
    return before


def _is_compiled() -> bool:
    return hasattr(bias_swiglu, "_torchdynamo_orig_callable")


def _draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_by_rank(worker_pool: WorkerPools, world_size: int) -> None:
    results = worker_pool(world_size).run(_identity, 5, name="x")
    assert [result[0] for result in results] == list(range(world_size))
    assert all(result[1] == world_size for result in results)
    assert all(result[3:] == ((5,), {"name": "x"}) for result in results)
    assert len({result[2] for result in results} | {os.getpid()}) == world_size + 1


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_reduce_and_tensors_travel(worker_pool: WorkerPools, world_size: int) -> None:
    value = torch.arange(6, dtype=torch.float64).view(2, 3)
    for total in worker_pool(world_size).run(_all_reduce, value):
        torch.testing.assert_close(total, value * sum(range(world_size + 1)), rtol=0, atol=0)


def test_processes_persist(worker_pool: WorkerPools) -> None:
    pool = worker_pool(2)
    first = pool.run(_identity)
    assert worker_pool(2) is pool
    assert [result[2] for result in pool.run(_identity)] == [result[2] for result in first]
    assert pool.process_ids == [result[2] for result in first]


def test_exception_of_one_rank(worker_pool: WorkerPools) -> None:
    started = time.monotonic()
    with pytest.raises(ValueError, match="bad news from 1") as caught:
        worker_pool(2).run(_raise_on, 1)  # rank 0 waits in a barrier that nobody will join
    assert time.monotonic() - started < 30
    note = "\n".join(caught.value.__notes__)
    assert "raised on rank 1 of 2" in note
    assert "in _raise_on" in note
    assert "test_pool.py" in note
    assert [result[0] for result in worker_pool(2).run(_identity)] == [0, 1]


def test_exception_of_all_ranks_keeps_the_pool(worker_pool: WorkerPools) -> None:
    pool = worker_pool(2)
    before = [result[2] for result in pool.run(_identity)]
    with pytest.raises(SystemExit) as caught:
        pool.run(_raise_everywhere, SystemExit, 2)
    assert caught.value.code == 2
    assert sum("later on rank" in note for note in caught.value.__notes__) == 1
    assert [result[2] for result in pool.run(_identity)] == before


def test_exception_that_cannot_travel(worker_pool: WorkerPools) -> None:
    with pytest.raises(RemoteError, match="AwkwardError: 1 and 2"):
        worker_pool(1).run(_raise_everywhere, AwkwardError, 1, 2)


@pytest.mark.parametrize(
    ("how", "reason"), [("kill", "was ended by SIGKILL"), ("exit", "exited with code 7")]
)
def test_lost_rank(worker_pool: WorkerPools, how: str, reason: str) -> None:
    with pytest.raises(RankDiedError, match=f"rank 1 of 2 {reason} while it ran _kill_on"):
        worker_pool(2).run(_kill_on, 1, how)
    assert [result[0] for result in worker_pool(2).run(_identity)] == [0, 1]


def test_rank_lost_between_calls(worker_pool: WorkerPools) -> None:
    pool = worker_pool(2)
    pool.run(_identity)
    process_id = pool.process_ids[1]
    assert process_id is not None
    os.kill(process_id, signal.SIGKILL)
    pool._processes[1].join()
    assert [result[0] for result in pool.run(_identity)] == [0, 1]


def test_hang_says_where(worker_pool: WorkerPools) -> None:
    pool = worker_pool(2)
    pool.run(_identity)
    with pytest.raises(RankTimeoutError, match=r"_hang_on did not end in 1 s") as caught:
        pool.run(_hang_on, 1, timeout=1)
    message = str(caught.value)
    for part in ("rank 0 is at", "barrier", "rank 1 is at", "in _hang_on"):
        assert part in message
    assert pool.process_ids == []
    assert [result[0] for result in pool.run(_identity)] == [0, 1]


def test_unsendable_function_and_result(worker_pool: WorkerPools) -> None:
    pool = worker_pool(1)
    with pytest.raises(TypeError, match="module-level function"):
        pool.run(lambda: None)
    with pytest.raises(TypeError, match="_unsendable returned a function"):
        pool.run(_unsendable)
    with pytest.raises(ValueError, match="world_size is 0"):
        worker_pool(0)


def test_state_is_reset_between_calls(worker_pool: WorkerPools, tmp_path: Path) -> None:
    pool = worker_pool(2)
    pool.run(_leave_a_mess, str(tmp_path))
    for state in pool.run(_inspect):
        assert state.pop("directory") != str(tmp_path)
        assert state == {
            "model parallel": False,
            "data parallel ranks": None,
            "calculator": None,
            "tracker": False,
            "dtype": "torch.float32",
            "threads": 1,
            "grad": True,
            "deterministic": False,
            "variable": None,
        }


def test_seeds_are_fixed(worker_pool: WorkerPools) -> None:
    draws = worker_pool(2).run(_draw) + worker_pool(2).run(_draw) + worker_pool(1).run(_draw)
    assert len(set(draws)) == 1


def test_environment_follows_the_test(
    worker_pool: WorkerPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POOL_PROBE", "seen")
    assert worker_pool(2).run(_environment, "POOL_PROBE") == [
        ("seen", str(rank), "2", "", 1) for rank in range(2)
    ]
    monkeypatch.delenv("POOL_PROBE")
    assert worker_pool(2).run(_environment, "POOL_PROBE")[0][0] is None


def test_nothing_is_compiled(worker_pool: WorkerPools) -> None:
    assert worker_pool(1).run(_is_compiled) == [False]


def test_many_calls_leak_nothing(worker_pool: WorkerPools) -> None:
    pool = worker_pool(2)
    pool.run(_leave_groups)
    before = pool.run(_count_resources)
    for _ in range(5):
        pool.run(_leave_groups)
    after = pool.run(_count_resources)
    for (threads, files), (threads_after, files_after) in zip(before, after, strict=True):
        assert threads_after <= threads + 1
        assert files_after <= files + 2


def _leave_groups() -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    dist.all_reduce(torch.ones(1), group=parallel_state.get_tensor_model_parallel_group())


def _count_resources() -> tuple[int, int]:
    process = Path("/proc/self")
    if not process.exists():
        pytest.skip("counts threads and files through /proc")
    return len(list((process / "task").iterdir())), len(list((process / "fd").iterdir()))


_ORPHAN_SCRIPT = """
import time
from tests.distributed.pool import WorkerPool

if __name__ == "__main__":
    pool = WorkerPool(2)
    pool.run(dir)
    print(*pool.process_ids, flush=True)
    pool.run(time.sleep, 600)
"""


def test_ranks_die_with_the_parent(tmp_path: Path) -> None:
    script = tmp_path / "orphan.py"
    script.write_text(_ORPHAN_SCRIPT)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])}
    with subprocess.Popen(
        [sys.executable, str(script)], env=environ, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        ranks = [int(word) for word in parent.stdout.readline().split()]
        time.sleep(0.5)  # into the call that hangs
        parent.kill()
    assert len(ranks) == 2
    deadline = time.monotonic() + 20
    while any(_is_running(rank) for rank in ranks):
        assert time.monotonic() < deadline, f"ranks {ranks} outlived their parent"
        time.sleep(0.05)


def _is_running(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True
