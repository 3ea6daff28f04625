"""Experts in packs and padded rows are experts on documents, one at a time."""

from __future__ import annotations

import pytest

from tests.distributed.documents import DocumentResult, run_documents
from tests.distributed.harness import RankResult, Weights, relative_l2, run
from tests.distributed.pool import WorkerPools
from tests.distributed.test_packed_documents import COMMON, MODELS, PIECES, SAMPLES

EXPERTS = (
    f"{COMMON} {MODELS['rope']} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 "
    "--moe-token-dispatcher-type alltoall --moe-z-loss-coeff 0.05 "
)
DOCUMENT_LOSS = "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.5 "
ROWS = "--reset-position-ids --reset-attention-mask --eod-mask-loss --calculate-per-token-loss "
WAYS = {
    "one-pack": "--micro-batch-size 6",
    "three-packs": "--micro-batch-size 2",
    "padded": "--micro-batch-size 6 --packed-sequence-capacity 256",
    "recomputed": "--micro-batch-size 3 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    "recomputed-experts": "--micro-batch-size 3 --recompute-granularity selective "
    "--moe-layer-recompute",
}
DISTRIBUTED = {
    "cp2": (2, "--micro-batch-size 3 --context-parallel-size 2"),
    "cp2-ep2": (2, "--micro-batch-size 3 --context-parallel-size 2 --expert-model-parallel-size 2"),
    "tp2": (2, "--micro-batch-size 3 --tensor-model-parallel-size 2 --sequence-parallel"),
    "dp2": (2, "--micro-batch-size 3"),
    "ep2": (2, "--micro-batch-size 3 --expert-model-parallel-size 2"),
}


@pytest.fixture(scope="module")
def one_by_one(worker_pool: WorkerPools) -> DocumentResult:
    """Every document alone, in fp64, with a balancing loss of its own."""
    flags = f"{EXPERTS} {DOCUMENT_LOSS} --micro-batch-size 1"
    (result,) = worker_pool(1).run(run_documents, flags, PIECES, True)
    return result


def router(weights: Weights) -> Weights:
    return {name: x for name, x in weights.items() if ".router." in name}


def check(result: RankResult, expected: DocumentResult) -> None:
    assert result.losses[0] == pytest.approx(expected.loss, rel=2e-6)
    assert relative_l2(result.gradient, expected.gradient) < 1e-5
    assert relative_l2(router(result.gradient), router(expected.gradient)) < 1e-5


@pytest.mark.parametrize("way", WAYS)
def test_packs_equal_documents(
    way: str, worker_pool: WorkerPools, one_by_one: DocumentResult
) -> None:
    """Also the balancing losses, which look at each document by itself."""
    check(run(worker_pool, 1, f"{EXPERTS} {DOCUMENT_LOSS} {WAYS[way]}", rows=SAMPLES), one_by_one)


@pytest.mark.parametrize("layout", DISTRIBUTED)
def test_packs_on_two_processes_equal_documents(
    layout: str, worker_pool: WorkerPools, one_by_one: DocumentResult
) -> None:
    world_size, flags = DISTRIBUTED[layout]
    flags = f"{EXPERTS} {DOCUMENT_LOSS} {flags}"
    check(run(worker_pool, world_size, flags, rows=SAMPLES), one_by_one)


@pytest.mark.parametrize("size", [1, 3])
def test_padded_rows_equal_documents(size: int, worker_pool: WorkerPools) -> None:
    """Routing and z-loss know nothing of a row's tail."""
    (expected,) = worker_pool(1).run(run_documents, f"{EXPERTS} --micro-batch-size 1", PIECES, True)
    flags = EXPERTS.replace("--use-packed-sequence", ROWS) + f"--micro-batch-size {size}"
    # Rows are fed to the model as they are: their padding must be ids that it has.
    rows = [{**each, "text": each["text"].clip(min=0)} for each in SAMPLES]
    check(run(worker_pool, 1, flags, rows=rows), expected)


def test_the_losses_are_part_of_it(worker_pool: WorkerPools, one_by_one: DocumentResult) -> None:
    """Without them the router's gradient is another one, so the tests above see them."""
    flags = EXPERTS.replace("--moe-z-loss-coeff 0.05", "") + "--micro-batch-size 6"
    plain = run(worker_pool, 1, flags, rows=SAMPLES)
    assert relative_l2(router(plain.gradient), router(one_by_one.gradient)) > 0.05
    assert plain.losses[0] == pytest.approx(one_by_one.loss, rel=2e-6)
