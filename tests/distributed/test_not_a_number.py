"""A NaN stops the run with a message that says when, where and on which samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.packed.errors import TrainingError
from tests.distributed.harness import assert_bitwise_equal, run, sample
from tests.distributed.pool import WorkerPools

SEQ, BAD_TOKEN = 16, 200
FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --mock-data "
    "--tokenizer-type ByteTokenizer --attention-dropout 0 --hidden-dropout 0 --num-workers 0 "
    "--lr 1e-3 --lr-decay-style constant --eval-iters 0 --log-interval 1 --threads 1 "
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 3 --use-packed-sequence "
    "--untie-embeddings-and-output-weights "
)


def _rows(bad: int) -> list[dict[str, Any]]:
    """Samples of three steps; one holds the token whose embedding is broken."""
    rows = [sample(range(10 + i, 27 + i), SEQ) for i in range(6)]
    rows[bad] = sample([*range(10, 20), BAD_TOKEN, *range(30, 36)], SEQ)
    return rows


def _break_embedding(trainer: Any, value: float = float("nan")) -> None:
    for name, parameter in trainer.step.model[0].named_parameters():
        if name.endswith("embedding.word_embeddings.weight"):
            parameter.data[BAD_TOKEN] = value


def _break_one_gradient(trainer: Any) -> None:
    """Inf in the gradient of the last stage's final norm, on data-parallel rank 0 alone."""
    from megatron.core import parallel_state

    if parallel_state.get_data_parallel_rank() == 0:
        for name, parameter in trainer.step.model[-1].named_parameters():
            if name.endswith("final_layernorm.weight"):
                parameter.register_hook(lambda gradient: gradient * float("inf"))


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(2, ""), (2, "--use-distributed-optimizer"), (2, "--pipeline-model-parallel-size 2"), (1, "")],
    ids=["dp2", "dp2-distributed-optimizer", "pp2", "one-process"],
)
def test_nan_from_the_data(world_size: int, layout: str, worker_pool: WorkerPools) -> None:
    """Sample 3, the second of step 2, is rank 1's with two data-parallel ranks."""
    with pytest.raises(TrainingError) as raised:
        run(
            worker_pool,
            world_size,
            f"{FLAGS} {layout}",
            rows=_rows(bad=3),
            prepare=_break_embedding,
        )
    message = str(raised.value)
    assert "NaN or Inf at iteration 2" in message
    assert "samples 2..3" in message
    assert "--no-check-for-nan-in-loss-and-grad" in message
    if world_size == 2 and "pipeline" not in layout:
        assert "rank 1, data-parallel rank 1" in message and "rank 0," not in message


def test_inf_in_a_gradient_behind_a_finite_loss(worker_pool: WorkerPools) -> None:
    with pytest.raises(TrainingError, match="iteration 1: samples 0..1.*rank 0, data-parallel"):
        run(worker_pool, 2, FLAGS, rows=_rows(bad=3), prepare=_break_one_gradient)


def test_without_the_check_training_goes_on(worker_pool: WorkerPools) -> None:
    """The log counts the NaN iterations."""
    flags = f"{FLAGS} --no-check-for-nan-in-loss-and-grad"
    result = run(worker_pool, 1, flags, rows=_rows(bad=3), prepare=_break_embedding)
    assert len(result.losses) == 3
    assert torch.tensor(result.losses).isnan().tolist() == [False, True, True]
    lines = [line for line in result.log.splitlines() if "consumed samples" in line]
    for line, count in zip(lines, (0, 1, 1), strict=True):
        assert f"number of nan iterations: {count:3d} |" in line


def test_healthy_runs_are_left_alone(worker_pool: WorkerPools) -> None:
    checked = run(worker_pool, 2, FLAGS, rows=_rows(bad=3))
    flags = f"{FLAGS} --no-check-for-nan-in-loss-and-grad"
    unchecked = run(worker_pool, 2, flags, rows=_rows(bad=3))
    assert checked.losses == unchecked.losses
    assert_bitwise_equal(checked.final_weights, unchecked.final_weights)


def _two_bad() -> list[dict[str, Any]]:
    rows = _rows(bad=3)
    rows[5] = rows[3]
    return rows


@pytest.mark.parametrize("layout", ["", "--use-distributed-optimizer"])
def test_a_bad_batch_is_left_out(layout: str, worker_pool: WorkerPools) -> None:
    """As if its samples had not been there: the run of the other steps' samples alone."""
    flags = f"{FLAGS} {layout} --skip-bad-batches 1"
    rows = _rows(bad=3)
    result = run(worker_pool, 2, flags, rows=rows, prepare=_break_embedding)
    assert result.updated == [True, False, True]
    rest = [*rows[:2], *rows[4:]]
    short = FLAGS.replace("--train-iters 3", "--train-iters 2")
    expected = run(worker_pool, 2, f"{short} {layout}", rows=rest, prepare=_break_embedding)
    assert [result.losses[0], result.losses[2]] == expected.losses
    same = [name for name, value in expected.final_weights.items() if value.isfinite().all()]
    assert len(same) == len(expected.final_weights) - 1
    for name in same:
        assert torch.equal(result.final_weights[name], expected.final_weights[name]), name
    assert "iteration 2: NaN or Inf, update skipped (samples 2..3, gradients of rank" in result.log
    assert "bad batch 1 of 1 (--skip-bad-batches)" in result.log
    lines = [line for line in result.log.splitlines() if "consumed samples" in line]
    assert ["number of nan iterations:   1" in line for line in lines] == [False, True, False]
    assert "consumed samples:            6" in lines[2]


def test_one_bad_batch_too_many(worker_pool: WorkerPools) -> None:
    flags = f"{FLAGS} --skip-bad-batches 1"
    with pytest.raises(TrainingError, match="NaN or Inf at iteration 3: samples 4..5"):
        run(worker_pool, 1, flags, rows=_two_bad(), prepare=_break_embedding)
    flags = f"{FLAGS} --skip-bad-batches 2"
    result = run(worker_pool, 1, flags, rows=_two_bad(), prepare=_break_embedding)
    assert result.updated == [True, False, False]
