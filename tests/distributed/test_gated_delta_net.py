"""Gated DeltaNet layers: the same training in packs, in rows with resets, and over every layout."""

from __future__ import annotations

import pytest

from tests.distributed.harness import RankResult, assert_bitwise_equal, relative_l2, run
from tests.distributed.pool import WorkerPools

RUN = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 "
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 4 "
    "--train-iters 4 --lr 1e-3 --eval-iters 1 --log-interval 2 --threads 1 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8 "
    "--linear-value-head-dim 8 "
)
PACKED = "--use-packed-sequence "
RESETS = "--reset-position-ids --reset-attention-mask --eod-mask-loss --calculate-per-token-loss "


@pytest.fixture(scope="module")
def packed(worker_pool: WorkerPools, data_flags: str) -> RankResult:
    return run(worker_pool, 1, f"{RUN} {PACKED} {data_flags}")


def check(result: RankResult, reference: RankResult) -> None:
    assert_bitwise_equal(result.initial_weights, reference.initial_weights)
    assert relative_l2(result.gradient, reference.gradient) < 1e-5
    assert result.losses == pytest.approx(reference.losses, rel=2e-6)
    assert relative_l2(result.final_weights, reference.final_weights) < 1e-5


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, "--tensor-model-parallel-size 2"),
        (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
        (2, "--pipeline-model-parallel-size 2"),
        (2, "--use-distributed-optimizer"),
    ],
    ids=["tp2", "tp2-sp", "pp2", "dp2"],
)
def test_layout_equals_one_process(
    world: int, layout: str, worker_pool: WorkerPools, data_flags: str, packed: RankResult
) -> None:
    check(run(worker_pool, world, f"{RUN} {PACKED} {layout} {data_flags}"), packed)


def test_packs_equal_rows_with_resets(
    worker_pool: WorkerPools, data_flags: str, packed: RankResult
) -> None:
    """No state crosses the end of a document, in whichever shape documents come."""
    check(run(worker_pool, 1, f"{RUN} {RESETS} --micro-batch-size 2 {data_flags}"), packed)


def test_heads_are_normalised_by_layer_norm_where_layers_are(
    worker_pool: WorkerPools, data_flags: str, packed: RankResult
) -> None:
    flags = f"{RUN} {PACKED} --normalization LayerNorm {data_flags}"
    one = run(worker_pool, 1, flags)
    check(run(worker_pool, 2, flags + " --tensor-model-parallel-size 2"), one)
    assert one.losses != pytest.approx(packed.losses, rel=1e-5)
    assert any("norm_bias" in name for name in one.gradient)


def test_the_recurrent_layers_are_there_and_learn(packed: RankResult) -> None:
    names = {name for name in packed.gradient if "A_log" in name}
    assert {int(name.split(".")[2]) for name in names} == {0, 2}
    for part in ("A_log", "dt_bias", "conv_weight", "norm_weight", "in_proj", "out_proj"):
        assert all(g.abs().max() > 0 for n, g in packed.gradient.items() if part in n), part
    decay = packed.initial_weights["decoder.layers.0.self_attention.A_log"].exp()
    assert decay.min() >= 1 and decay.max() <= 16 and decay.unique().numel() == 4
    assert packed.losses[-1] < packed.losses[0] - 0.1
