"""Attention dropout in whole runs: in training alone, and another stream on every rank's heads."""

from __future__ import annotations

import os

import pytest
import torch

from tests.distributed.harness import RankResult, run
from tests.distributed.pool import WorkerPools


def attend(flags: str) -> torch.Tensor:
    """Attention over the same heads on every rank, as in training."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.transformer.enums import AttnMaskType

    from megatron.packed.arguments import config_from_flags
    from megatron.packed.attention.core_attention import PackedCoreAttention
    from megatron.packed.model.transformer_config import build_transformer_config
    from megatron.packed.training import environment

    config = config_from_flags(flags, os.environ)
    environment.start(config)
    module = PackedCoreAttention(
        build_transformer_config(config), layer_number=1, attn_mask_type=AttnMaskType.causal
    )
    query = torch.randn(16, 1, 2, 8, generator=torch.Generator().manual_seed(1))
    if config.parallel.sequence_parallel:  # layers are inside this stream then
        with get_cuda_rng_tracker().fork():
            return module(query, query, query)
    return module(query, query, query)


@pytest.mark.parametrize("sequence_parallel", ["", "--sequence-parallel"])
def test_heads_of_other_ranks_draw_differently(
    sequence_parallel: str, worker_pool: WorkerPools, data_flags: str
) -> None:
    layout = f"--tensor-model-parallel-size 2 {sequence_parallel} --attention-dropout 0.5"
    first, second = worker_pool(2).run(attend, f"{RUN} {data_flags} {layout}")
    assert not torch.equal(first, second)
    exact = f"--tensor-model-parallel-size 2 {sequence_parallel} --attention-dropout 0"
    first, second = worker_pool(2).run(attend, f"{RUN} {data_flags} {exact}")
    assert torch.equal(first, second)


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
