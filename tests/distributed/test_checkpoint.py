"""Runs that stop and go on are runs that never stopped: bit by bit, or under another layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.harness import (
    RankResult,
    assert_bitwise_equal,
    relative_l2,
    run,
)
from tests.distributed.pool import WorkerPools
from tests.distributed.recording import record, recorded

COMMON = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 4 "
    "--train-iters 10 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2 "
    "--eval-iters 1 --eval-interval 4 --log-interval 5 --threads 1 --use-packed-sequence "
)
STRATEGIES = ("rows", "next_fit", "best_fit_decreasing", "windowed_best_fit", "greedy_workload")
STOP = 6
# The first stage has no expert, and so nothing for the experts' optimizer.
EXPERTS = (
    "--num-experts 4 --moe-layer-freq [0,1] --moe-ffn-hidden-size 32 --moe-aux-loss-coeff 0.01"
)
RECURRENT = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8 "
    "--linear-value-head-dim 8"
)

Train = Callable[..., RankResult]


@pytest.fixture
def train(worker_pool: WorkerPools, data_flags: str) -> Train:
    """Train with the flags of this module and some more."""

    def get(world_size: int, flags: str, **options: object) -> RankResult:
        return run(worker_pool, world_size, f"{COMMON} {data_flags} {flags}", **options)

    return get


def stop_and_go_on(
    train: Train, folder: Path, world_size: int, flags: str, save: str = "", go_on: str = ""
) -> tuple[RankResult, RankResult, RankResult]:
    """An uninterrupted run, one that ends after STOP iterations, and one that goes on from it."""
    whole_packs = "context-parallel" not in flags
    recording = {"prepare": record, "inspect": recorded} if whole_packs else {}
    whole = train(world_size, flags, **recording)
    saving = f"{flags} --save {folder} {save} --exit-interval {STOP}"
    first = train(world_size, saving, **recording)
    second = train(world_size, f"{flags} --load {folder} {go_on}", **recording)
    return whole, first, second


def check_exact(whole: RankResult, first: RankResult, second: RankResult) -> None:
    """The same samples, losses, rates and weights."""
    assert len(second.losses) == 10 - STOP
    assert first.losses + second.losses == whole.losses
    assert first.grad_norms + second.grad_norms == whole.grad_norms
    assert first.learning_rates + second.learning_rates == whole.learning_rates
    assert_bitwise_equal(second.final_weights, whole.final_weights)
    for one, two, all_of_them in zip(first.extra, second.extra, whole.extra, strict=True):
        assert all_of_them is None or one + two == all_of_them


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resume_is_exact_with_every_packer(strategy: str, train: Train, tmp_path: Path) -> None:
    check_exact(*stop_and_go_on(train, tmp_path, 1, f"--packing-strategy {strategy}"))


@pytest.mark.parametrize(
    ("world_size", "flags", "save"),
    [
        (1, "--bf16", ""),
        (1, "--hidden-dropout 0.1", "--async-save"),
        (1, "--num-workers 1", "--async-save"),
        (2, "--use-distributed-optimizer --bf16", "--async-save"),
        (2, "--use-distributed-optimizer", "--no-ckpt-fully-parallel-save"),
        (2, "--tensor-model-parallel-size 2 --sequence-parallel", ""),
        (2, "--pipeline-model-parallel-size 2", "--async-save"),
        (2, "--context-parallel-size 2 --bf16", ""),
        (2, f"{EXPERTS} --pipeline-model-parallel-size 2 --use-distributed-optimizer", ""),
        (2, f"{RECURRENT} --tensor-model-parallel-size 2 --sequence-parallel", ""),
    ],
)
def test_resume_is_exact_under_every_layout(
    world_size: int, flags: str, save: str, train: Train, tmp_path: Path
) -> None:
    check_exact(*stop_and_go_on(train, tmp_path, world_size, flags, save))


LAYOUTS = {
    "one": (1, ""),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "cp2-ring": (2, "--context-parallel-size 2"),
    "cp2-ulysses": (2, "--context-parallel-size 2 --attention-backend flex"),
    "dp2": (2, ""),
    "dp2-distributed-optimizer": (2, "--use-distributed-optimizer"),
    "tp2-cp2": (4, "--tensor-model-parallel-size 2 --context-parallel-size 2"),
    "cp4": (4, "--context-parallel-size 4"),
}
SAVED = ("tp2", "pp2", "cp2-ring", "cp2-ulysses", "dp2", "dp2-distributed-optimizer", "tp2-cp2")
LOADED = ("one", "cp4", "pp2", "tp2", "dp2-distributed-optimizer")


# One of each kind by default; the whole matrix takes a minute more.
QUICK = {
    ("tp2-cp2", "pp2"),
    ("pp2", "cp4"),
    ("dp2-distributed-optimizer", "tp2"),
    ("cp2-ulysses", "one"),
    ("dp2", "dp2-distributed-optimizer"),
}
MATRIX = [
    pytest.param(saved, loaded, marks=() if (saved, loaded) in QUICK else pytest.mark.slow)
    for saved in SAVED
    for loaded in LOADED
]


@pytest.mark.parametrize(("saved", "loaded"), MATRIX)
def test_any_layout_goes_on_from_any_other(
    saved: str,
    loaded: str,
    train: Train,
    reshard_reference: RankResult,
    saved_under: Callable[[str], Path],
) -> None:
    world_size, flags = LAYOUTS[loaded]
    result = train(world_size, f"{flags} --load {saved_under(saved)}")
    assert result.losses == pytest.approx(reshard_reference.losses[STOP:], rel=2e-6)
    assert relative_l2(result.final_weights, reshard_reference.final_weights) < 1e-5


@pytest.fixture(scope="module")
def reshard_reference(worker_pool: WorkerPools, data_flags: str) -> RankResult:
    """One process, never interrupted."""
    return run(worker_pool, 1, f"{COMMON} {data_flags}")


@pytest.fixture(scope="module")
def saved_under(
    worker_pool: WorkerPools, data_flags: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """A folder with a checkpoint of a layout after STOP iterations, made once."""
    known: dict[str, Path] = {}

    def get(layout: str) -> Path:
        if layout not in known:
            world_size, flags = LAYOUTS[layout]
            known[layout] = tmp_path_factory.mktemp(layout)
            saving = f"--save {known[layout]} --exit-interval {STOP}"
            run(worker_pool, world_size, f"{COMMON} {data_flags} {flags} {saving}")
        return known[layout]

    return get


def test_recurrent_layers_go_on_under_another_layout(train: Train, tmp_path: Path) -> None:
    whole, first, second = stop_and_go_on(train, tmp_path, 1, RECURRENT, go_on="--seed 1234")
    check_exact(whole, first, second)
    flags = f"{RECURRENT} --tensor-model-parallel-size 2 --load {tmp_path}"
    result = train(2, flags)
    assert result.losses == pytest.approx(whole.losses[STOP:], rel=2e-6)
    assert relative_l2(result.final_weights, whole.final_weights) < 1e-5


DEEP = "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
ALL_EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 32 --moe-router-topk 2 --moe-router-dtype fp32 "
    "--moe-token-dispatcher-type alltoall"
)
DEPTHS = "--mtp-num-layers 2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "layout", "model", "other_size", "other"),
    [
        (2, "--expert-model-parallel-size 2", ALL_EXPERTS, 1, ""),
        (1, "", ALL_EXPERTS, 2, "--expert-model-parallel-size 2 --use-distributed-optimizer"),
        (2, DEEP, "", 1, "--num-layers 4"),
        (1, "", DEPTHS, 2, "--tensor-model-parallel-size 2"),
        (2, "--pipeline-model-parallel-size 2", DEPTHS, 1, ""),
    ],
    ids=["ep2-one", "one-ep2", "vpp2-one", "mtp-one-tp2", "mtp-pp2-one"],
)
def test_experts_virtual_stages_and_depths_go_on(
    world_size: int,
    layout: str,
    model: str,
    other_size: int,
    other: str,
    train: Train,
    tmp_path: Path,
) -> None:
    """Bit by bit under the same layout, and within rounding under another."""
    whole, first, second = stop_and_go_on(train, tmp_path, world_size, f"{model} {layout}")
    check_exact(whole, first, second)
    result = train(other_size, f"{model} {other} --load {tmp_path}")
    assert result.losses == pytest.approx(whole.losses[STOP:], rel=2e-6)
    assert relative_l2(result.final_weights, whole.final_weights) < 1e-5
