"""Attention dropout in whole runs: in training alone, and another stream on every rank's heads."""

from __future__ import annotations

import pytest

from tests.distributed.harness import RankResult, run
from tests.distributed.pool import WorkerPools

# A learning rate of 0 keeps the weights, so that evaluations compare.
RUN = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --hidden-dropout 0 "
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 2 --lr 0 --eval-iters 1 "
    "--log-interval 1 --threads 1 --position-embedding-type rope --init-method-std 0.5 "
)


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (1, "--use-packed-sequence"),
        (2, "--tensor-model-parallel-size 2"),
        (2, "--tensor-model-parallel-size 2 --sequence-parallel --use-packed-sequence"),
        (1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    ],
    ids=["packed", "tp2", "tp2-sp-packed", "recompute"],
)
def test_training_drops_and_evaluation_does_not(
    world: int, layout: str, worker_pool: WorkerPools, data_flags: str
) -> None:
    def train(rate: float, seed: int = 1) -> RankResult:
        flags = f"{RUN} {layout} {data_flags} --attention-dropout {rate} --seed {seed}"
        return run(worker_pool, world, flags)

    exact, dropped = train(0.0), train(0.5)
    assert dropped.validations == exact.validations
    assert dropped.losses != pytest.approx(exact.losses, rel=1e-4)
    assert dropped.losses == train(0.5).losses  # the seed fixes every draw
