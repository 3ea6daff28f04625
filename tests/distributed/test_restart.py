"""A stream of batches stops anywhere and goes on token by token, on any layout and any workers."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from megatron.packed.errors import DataError
from tests.distributed.pool import WorkerPools
from tests.distributed.recording import Stream, in_order, stream

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --attention-dropout 0 --lr 1e-3 "
    "--threads 1 --seq-length 256 --train-iters 40 --eval-iters 4 --eval-interval 5 "
    "--global-batch-size 8 --use-packed-sequence "
)
STRATEGIES = ("rows", "next_fit", "best_fit_decreasing", "windowed_best_fit", "greedy_workload")
PACKERS = STRATEGIES[1:]
COUNT = 96  # samples; an epoch of the small corpus below has about 87

Read = Callable[..., Stream]


@pytest.fixture(scope="module")
def small_flags(data_flags: str) -> str:
    """The corpus of the other tests, of which training sees an eighth."""
    return data_flags.replace("--split 90,5,5", "--split 3,92,5").replace("--num-workers 0", "")


@pytest.fixture(scope="module")
def read(worker_pool: WorkerPools, small_flags: str) -> Read:
    """Read samples of a split on a number of ranks; batches come in the order of samples."""

    def get(world_size: int, strategy: str, flags: str, samples: int, **options: object) -> Stream:
        micro = 2 if "--micro-batch-size 2" in flags else 1
        command = f"{FLAGS} {small_flags} --packing-strategy {strategy} {flags}"
        replicas = 1 if "parallel-size" in flags else world_size
        count = samples // micro // replicas
        results = worker_pool(world_size).run(stream, command, count, **options)
        batches = in_order([each.batches for each in results], replicas)
        return Stream(batches, results[0].states)

    return get


def _segments(streamed: Stream) -> list[object]:
    return [segment for batch in streamed.batches for segment in batch]


SLOW = ("next_fit", "best_fit_decreasing")


@pytest.mark.parametrize(
    "strategy", [pytest.param(s, marks=pytest.mark.slow if s in SLOW else ()) for s in STRATEGIES]
)
def test_a_stream_goes_on_where_it_stopped(strategy: str, read: Read) -> None:
    """In the middle of an epoch, across its end, with workers that are ahead, and elsewhere."""
    whole = read(1, strategy, "--micro-batch-size 1 --num-workers 0", COUNT, every=4)
    shared = read(2, strategy, "--micro-batch-size 1 --num-workers 2", COUNT, every=4)
    assert shared.batches == whole.batches
    for number in (0, 8, 28, 44):  # micro-batches of two ranks
        state = shared.states[number]
        assert len(state) < 100_000
        left = COUNT - 2 * number
        again = read(2, strategy, "--micro-batch-size 1 --num-workers 1", left, state=state)
        assert again.batches == whole.batches[2 * number :]
    # Fewer ranks, larger micro-batches, tensor parallelism: the same documents in the same order.
    state = shared.states[28]
    flags = "--micro-batch-size 2 --num-workers 0 --tensor-model-parallel-size 2"
    again = read(2, strategy, flags, COUNT - 56, state=state)
    assert _segments(again) == [s for batch in whole.batches[56:] for s in batch]


@pytest.mark.parametrize("strategy", PACKERS)
def test_a_stream_goes_on_without_a_state(strategy: str, read: Read) -> None:
    """The number of consumed samples is enough, it only takes planning again."""
    whole = read(1, strategy, "--micro-batch-size 1 --num-workers 0", COUNT)
    bare = json.dumps({"train": {"consumed_samples": 72, "packing": None}})
    again = read(1, strategy, "--micro-batch-size 1 --num-workers 0", COUNT - 72, state=bare)
    assert again.batches == whole.batches[72:]


@pytest.mark.parametrize("strategy", ["rows", "windowed_best_fit"])
def test_validation_goes_on_too(strategy: str, read: Read) -> None:
    flags = "--micro-batch-size 2 --num-workers 0"
    whole = read(1, strategy, flags, 64, split="valid")
    again = read(1, strategy, flags, 64 - 20, split="valid", state=whole.states[10])
    assert again.batches == whole.batches[10:]


def test_a_seed_is_an_order(read: Read) -> None:
    flags = "--micro-batch-size 1 --num-workers 0"
    one = read(1, "next_fit", flags, 24)
    other = read(1, "next_fit", f"{flags} --seed 5", 24)
    assert one.batches != other.batches


@pytest.mark.parametrize(
    ("strategy", "flags", "message"),
    [
        ("best_fit_decreasing", "", "saved with strategy = windowed_best_fit"),
        ("windowed_best_fit", "--packing-window 9", "saved with --packing-window 4096"),
        ("windowed_best_fit", "--seed 9", "saved with seed = 1234, this run has 9"),
        ("windowed_best_fit", "--overlong-documents drop", "saved with overlong = split"),
        ("windowed_best_fit", "--seq-length 128", "saved with capacity = 256"),
    ],
)
def test_a_state_of_another_run_is_refused(
    strategy: str, flags: str, message: str, read: Read
) -> None:
    common = "--micro-batch-size 1 --num-workers 0"
    state = read(1, "windowed_best_fit", common, 8).states[4]
    with pytest.raises(DataError, match=message):
        read(1, strategy, f"{common} {flags}", 8, state=state)


def test_weights_repeat_the_smaller_corpus(
    worker_pool: WorkerPools, data_flags: str, read: Read
) -> None:
    """A blend of a corpus with itself, three to one, restarts like any other stream."""
    prefix = data_flags.split()[1]
    blend = data_flags.replace(f"--data-path {prefix}", f"--data-path 3 {prefix} 1 {prefix}")
    command = f"{FLAGS} {blend} --packing-strategy windowed_best_fit --micro-batch-size 1"
    (whole,) = worker_pool(1).run(stream, command, 40)
    (again,) = worker_pool(1).run(stream, command, 25, state=whole.states[15])
    assert again.batches == whole.batches[15:]
