"""Batches that grow, runs counted in samples, and timers: in whole runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed.harness import RankResult, assert_bitwise_equal, relative_l2, run
from tests.distributed.pool import WorkerPools

RUN = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --lr 1e-3 --min-lr 1e-4 "
    "--lr-decay-style cosine --eval-iters 0 --log-interval 1 --threads 1 "
    "--position-embedding-type rope --use-packed-sequence "
)
STEPS = "--train-samples 26 --lr-warmup-samples 4 --step-batch-size-schedule 0:2,256:4,768:6"


def train(pools: WorkerPools, world: int, data_flags: str, flags: str) -> RankResult:
    schedule = STEPS.replace(",", " ").replace("0:2 256:4 768:6", "'0:2 256:4 768:6'")
    return run(pools, world, f"{RUN} {data_flags} {flags or schedule}")


def logged(log: str, field: str) -> list[float]:
    return [float(text) for text in re.findall(rf"{field}: +(\S+)", log)]


def test_batches_grow_with_consumed_samples(worker_pool: WorkerPools, data_flags: str) -> None:
    one = train(worker_pool, 1, data_flags, "")
    # 4 and 12 samples are where sizes change: 2 2 | 4 4 | 6 6, and 2 samples are too few.
    assert logged(one.log, "global batch size") == [2, 2, 4, 4, 6, 6]
    assert logged(one.log, "consumed samples") == [2, 4, 8, 12, 18, 24]
    # The rate is one of consumed samples: full after 4, then a cosine to the end at 26.
    assert one.learning_rates[:2] == pytest.approx([5e-4, 1e-3])
    assert one.learning_rates == sorted(one.learning_rates[:2]) + sorted(
        one.learning_rates[2:], reverse=True
    )
    two = train(worker_pool, 2, data_flags, "")
    assert two.losses == pytest.approx(one.losses, rel=2e-6)
    assert relative_l2(two.final_weights, one.final_weights) < 1e-5


def test_samples_or_iterations_are_the_same_run(worker_pool: WorkerPools, data_flags: str) -> None:
    batch = "--global-batch-size 4 "
    samples = train(
        worker_pool,
        1,
        data_flags,
        batch + "--train-samples 17 --lr-decay-samples 16 --lr-warmup-samples 4",
    )
    iterations = train(worker_pool, 1, data_flags, batch + "--train-iters 4 --lr-warmup-iters 1")
    assert samples.losses == iterations.losses
    assert samples.learning_rates == iterations.learning_rates


def test_a_ramp(worker_pool: WorkerPools, data_flags: str) -> None:
    flags = "--global-batch-size 6 --rampup-batch-size 2 2 8 --train-samples 24"
    result = train(worker_pool, 2, data_flags, flags)
    assert logged(result.log, "global batch size") == [2, 2, 4, 6, 6]


@pytest.mark.parametrize("option", ["max", "minmax", "all"])
def test_timers_of_stages(option: str, worker_pool: WorkerPools, data_flags: str) -> None:
    flags = (
        "--global-batch-size 4 --train-iters 2 --pipeline-model-parallel-size 2 "
        f"--timing-log-level 2 --timing-log-option {option}"
    )
    log = train(worker_pool, 2, data_flags, flags).log
    for phase in ("forward-backward", "forward-compute", "all-grads-sync", "optimizer-inner-step"):
        assert log.count(phase) == 2
    silent = train(worker_pool, 1, data_flags, "--global-batch-size 4 --train-iters 2")
    assert "forward-backward" not in silent.log


@pytest.mark.parametrize("stop", [3, 5])
def test_growing_batches_go_on_exactly(
    stop: int, worker_pool: WorkerPools, data_flags: str, tmp_path: Path
) -> None:
    flags = (
        "--global-batch-size 6 --rampup-batch-size 2 2 8 --train-samples 30 "
        "--packing-strategy windowed_best_fit "
    )
    whole = train(worker_pool, 1, data_flags, flags)
    first = train(worker_pool, 1, data_flags, f"{flags} --save {tmp_path} --exit-interval {stop}")
    second = train(worker_pool, 1, data_flags, f"{flags} --load {tmp_path}")
    assert len(second.losses) == len(whole.losses) - stop
    assert first.losses + second.losses == whole.losses
    assert first.learning_rates + second.learning_rates == whole.learning_rates
    assert_bitwise_equal(second.final_weights, whole.final_weights)


def test_time_is_up_at_once(worker_pool: WorkerPools, data_flags: str, tmp_path: Path) -> None:
    flags = f"--train-iters 9 --global-batch-size 2 --exit-duration-in-mins 0 --save {tmp_path}"
    result = train(worker_pool, 2, data_flags, flags)
    assert len(result.losses) == 1
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"


def test_garbage_by_hand_changes_nothing(worker_pool: WorkerPools, data_flags: str) -> None:
    flags = "--train-iters 4 --global-batch-size 2"
    plain = train(worker_pool, 1, data_flags, flags)
    by_hand = train(worker_pool, 1, data_flags, f"{flags} --manual-gc --manual-gc-interval 2")
    assert by_hand.losses == plain.losses
