"""Batches without a target: one among others weighs nothing, one alone is skipped."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.distributed.harness import RankResult, assert_bitwise_equal, relative_l2, run, sample
from tests.distributed.pool import WorkerPools

EOD, SEQ = 256, 16
FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --mock-data "
    "--tokenizer-type ByteTokenizer --attention-dropout 0 --hidden-dropout 0 --num-workers 0 "
    "--lr 1e-3 --lr-decay-style constant --eval-iters 0 --log-interval 1 --threads 1 "
    "--micro-batch-size 1 --global-batch-size 2 --position-embedding-type rope "
    "--weight-decay 0.1 "
)
PACKED = FLAGS + "--use-packed-sequence "
ROWS = FLAGS + "--reset-position-ids --reset-attention-mask --eod-mask-loss "

TEXT = [sample(range(10, 27), SEQ), sample([*range(60, 65), EOD, *range(80, 91)], SEQ)]
# One-token documents; a row of padding alone; a lone token.
NOTHING = [sample([EOD] * 17, SEQ), sample([], SEQ), sample([5], SEQ)]
LAYOUTS = {
    "one-process": (1, ""),
    "dp2": (2, ""),
    "dp2-distributed-optimizer": (2, "--use-distributed-optimizer"),
    "tp2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
}


def _train(pools: WorkerPools, flags: str, rows: list[Any], layout: str = "") -> RankResult:
    world_size, more = LAYOUTS[layout or "one-process"]
    steps = len(rows) // 2
    return run(pools, world_size, f"{flags} --train-iters {steps} {more}", rows=rows)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_without_targets_is_skipped(layout: str, worker_pool: WorkerPools) -> None:
    empty = [NOTHING[0], NOTHING[1]]
    result = _train(worker_pool, PACKED, empty + TEXT, layout)
    alone = _train(worker_pool, PACKED, TEXT, layout)

    assert result.updated == [False, True]
    assert result.loss_counts == [0, alone.loss_counts[0]]
    assert math.isnan(result.losses[0]) and result.grad_norms[0] is None
    assert not any(gradient.any() for gradient in result.gradient.values())
    assert "iteration 1: no supervised token in the global batch, update skipped" in result.log
    first, second = (line for line in result.log.splitlines() if "consumed samples" in line)
    assert "lm loss" not in first and "grad norm" not in first and "nan iterations:   0" in first
    assert "number of skipped iterations:   1 |" in first
    assert "number of skipped iterations:   0 |" in second

    # No weight, no moment of Adam and no weight decay has moved.
    assert result.losses[1] == alone.losses[0]
    assert_bitwise_equal(result.final_weights, alone.final_weights)


def test_a_run_without_targets_changes_nothing(worker_pool: WorkerPools) -> None:
    result = _train(worker_pool, PACKED, [NOTHING[0], NOTHING[2], NOTHING[1], NOTHING[1]], "dp2")
    assert result.updated == [False, False]
    assert_bitwise_equal(result.final_weights, result.initial_weights)


def test_rows_without_targets_are_skipped(worker_pool: WorkerPools) -> None:
    result = _train(worker_pool, ROWS, [NOTHING[0], NOTHING[0]], "dp2")
    assert result.updated == [False]
    assert_bitwise_equal(result.final_weights, result.initial_weights)


@pytest.fixture(scope="module")
def second_text_alone(worker_pool: WorkerPools) -> RankResult:
    """One step on TEXT[1]."""
    return run(worker_pool, 1, f"{PACKED} --global-batch-size 1 --train-iters 1", rows=TEXT[1:])


@pytest.mark.parametrize(
    ("nothing", "layout"),
    [*((0, layout) for layout in LAYOUTS), (1, "one-process"), (2, "one-process"), (1, "dp2")],
)
def test_a_micro_batch_without_targets_weighs_nothing(
    nothing: int, layout: str, second_text_alone: RankResult, worker_pool: WorkerPools
) -> None:
    """The global batch is worth its other micro-batch, whoever holds it."""
    alone = second_text_alone
    for rows in ([NOTHING[nothing], TEXT[1]], [TEXT[1], NOTHING[nothing]]):
        result = _train(worker_pool, PACKED, rows, layout)
        assert result.updated == [True]
        assert result.loss_counts == alone.loss_counts
        assert result.losses[0] == pytest.approx(alone.losses[0], rel=2e-6)
        if layout == "one-process":
            assert_bitwise_equal(result.gradient, alone.gradient)
        else:
            assert relative_l2(result.gradient, alone.gradient) < 1e-5


def test_evaluation_weighs_tokens_not_batches(worker_pool: WorkerPools) -> None:
    """Few targets on one rank, many on the other, none in a third batch: one global mean."""
    few, many = sample([50, 51, EOD, *[EOD] * 14], SEQ), sample(range(100, 117), SEQ)
    flags = PACKED.replace("--eval-iters 0", "--eval-iters 2 --eval-interval 1")

    def evaluate(world_size: int, rows: list[Any], more: str = "") -> tuple[float, int]:
        command = f"{flags} --train-iters 1 --lr 0 {more}"
        # Validation, then once more at the end of training.
        return run(worker_pool, world_size, command, rows=TEXT, valid_rows=rows + rows).validations[
            0
        ]

    loss, count = evaluate(2, [few, many, NOTHING[0], few])
    few_loss, few_count = evaluate(1, [few] * 4)
    many_loss, many_count = evaluate(1, [many] * 4)
    few_count, many_count = few_count // 4, many_count // 4
    assert (few_count, many_count, count) == (2, 16, 20)
    expected = (2 * few_count * few_loss + many_count * many_loss) / 20
    assert loss == pytest.approx(expected, rel=2e-6)
    assert abs(few_loss - many_loss) > 1e-3
    assert evaluate(1, [few, many, NOTHING[0], few]) == pytest.approx((loss, count), rel=2e-6)
    pipeline = "--pipeline-model-parallel-size 2"
    assert evaluate(2, [few, many, NOTHING[0], few], pipeline) == pytest.approx(
        (loss, count), rel=2e-6
    )


def test_evaluation_without_targets(worker_pool: WorkerPools) -> None:
    flags = PACKED.replace("--eval-iters 0", "--eval-iters 1 --eval-interval 1")
    result = run(worker_pool, 1, f"{flags} --train-iters 1", rows=TEXT, valid_rows=[NOTHING[0]] * 4)
    assert result.validations[0][1] == 0
    assert torch.tensor(result.losses).isfinite().all()
    assert "validation loss at iteration 1" in result.log
