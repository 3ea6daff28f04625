"""Pipeline layouts against one process, fed with packs of any length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.distributed.harness import RankResult, run
from tests.distributed.pool import WorkerPools
from tests.distributed.test_parity import (
    COMMON,
    GPT,
    LLAMA,
    LLAMA_TIED,
    PACKED,
    check_parity,
)

DEEP = COMMON + "--num-layers 8 --hidden-size 32 "
SIX = DEEP + "--num-layers 6 "
NINE = DEEP + "--global-batch-size 9 "  # micro-batches that no group size divides
# Whole documents fill packs differently.
DOCUMENTS = PACKED + "--packing-strategy next_fit "
PP2, PP4 = "--pipeline-model-parallel-size 2 ", "--pipeline-model-parallel-size 4 "
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel "

LAYOUTS = {
    "pp2-two-virtual": (2, DEEP, PP2 + "--num-layers-per-virtual-pipeline-stage 2"),
    "pp2-four-virtual": (2, DEEP, PP2 + "--num-virtual-stages-per-pipeline-rank 4"),
    "pp4": (4, DEEP, PP4),
    "pp4-two-virtual": (4, DEEP, PP4 + "--num-virtual-stages-per-pipeline-rank 2"),
    "pp4-no-overlap": (
        4,
        DEEP,
        PP4 + "--num-layers-per-virtual-pipeline-stage 1 --no-overlap-p2p-communication",
    ),
    "pp4-groups-of-five": (
        4,
        NINE,
        PP4 + "--num-layers-per-virtual-pipeline-stage 1 "
        "--microbatch-group-size-per-virtual-pipeline-stage 5 "
        "--overlap-p2p-communication-warmup-flush",
    ),
    "pp4-uneven": (
        4,
        DEEP,
        PP4 + "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3",
    ),
    "pp2-uneven-virtual": (
        2,
        DEEP,
        PP2 + "--decoder-first-pipeline-num-layers 2 --num-virtual-stages-per-pipeline-rank 2",
    ),
    "pp4-counted": (
        4,
        SIX,
        PP4 + "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
        "--num-virtual-stages-per-pipeline-rank 2",
    ),
    "pp4-explicit": (4, DEEP, PP4 + "--pipeline-model-parallel-layout Et*3|(tt|)*2tL"),
    "pp4-explicit-virtual": (4, DEEP, PP4 + "--pipeline-model-parallel-layout E|t|tt|t|t|t|tt|L"),
    "pp4-empty-stage": (4, DEEP, PP4 + "--pipeline-model-parallel-layout Et*4||t*4|L"),
    "tp2-pp2-virtual": (4, DEEP, TP2 + PP2 + "--num-virtual-stages-per-pipeline-rank 2"),
    "cp2-pp2-virtual": (
        4,
        DEEP,
        "--context-parallel-size 2 " + PP2 + "--num-virtual-stages-per-pipeline-rank 2",
    ),
    "dp2-pp2-virtual": (
        4,
        DEEP,
        PP2 + "--num-virtual-stages-per-pipeline-rank 2 --use-distributed-optimizer",
    ),
}


def no_capacity(config: Any, alignment: Any) -> None:
    """In place of `pack_capacity`: packs are as long as what they hold."""


ANY_LENGTH = {
    f"megatron.packed.training.{module}.pack_capacity": no_capacity
    for module in ("collation", "loop")
}


def without_padding(result: RankResult) -> RankResult:
    """Padding depends on the layout, by design."""
    result.statistics.padded_tokens = 0
    return result


# The rest of the grid tells nothing that these don't, in most changes.
EVERY_RUN = {
    "pp2-two-virtual",
    "pp4",
    "pp4-groups-of-five",
    "pp4-counted",
    "pp4-explicit-virtual",
    "tp2-pp2-virtual",
    "cp2-pp2-virtual",
}


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name in EVERY_RUN else pytest.mark.slow) for name in LAYOUTS],
)
def test_layout_equals_one_process(
    layout: str,
    worker_pool: WorkerPools,
    data_flags: str,
    one_process: Callable[[str], RankResult],
) -> None:
    world_size, model, flags = LAYOUTS[layout]
    model = f"{model} {LLAMA} {DOCUMENTS}"
    result = run(worker_pool, world_size, f"{model} {flags} {data_flags}", replace=ANY_LENGTH)
    reference = one_process(model)
    check_parity(without_padding(result), without_padding(reference))


KINDS = {
    "gpt-rows": GPT,
    "gpt-tied-packed": GPT + DOCUMENTS,
    "llama-tied-capacity": LLAMA_TIED + DOCUMENTS + "--packed-sequence-capacity 256 ",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_models_over_virtual_stages(
    kind: str,
    worker_pool: WorkerPools,
    data_flags: str,
    one_process: Callable[[str], RankResult],
) -> None:
    """Positions that are learned, embeddings that two stages hold, packs of one length."""
    world_size, model, flags = LAYOUTS["pp4-two-virtual"]
    result = run(worker_pool, world_size, f"{model} {KINDS[kind]} {flags} {data_flags}")
    reference = one_process(f"{model} {KINDS[kind]}")
    check_parity(without_padding(result), without_padding(reference))


def lengths(trainer: Any) -> list[int]:
    """Lengths of the last step's micro-batches, as every stage knows them."""
    batches = trainer.splits.train
    batches.begin_step()
    return [batches.length_of(number) for number in range(8)]


def test_packs_differ_in_length_and_every_stage_knows(
    worker_pool: WorkerPools, data_flags: str
) -> None:
    flags = f"{DEEP} {LLAMA} {DOCUMENTS} {PP2} {TP2} --lr-warmup-iters 0 --train-iters 1"
    result = run(
        worker_pool,
        4,
        f"{flags} --eval-iters 0 {data_flags}",
        inspect=lengths,
        replace=ANY_LENGTH,
    )
    assert len(set(result.extra[0])) > 2
    assert all(other == result.extra[0] for other in result.extra)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["Et*3|ttt|ttm|L", "Et|t|t|t|t|tt|tm|L"])
def test_predictions_on_a_stage_of_their_own(
    layout: str,
    worker_pool: WorkerPools,
    data_flags: str,
    one_process: Callable[[str], RankResult],
) -> None:
    """The loss's stage gets the hidden states of both depths, twice as long as other tensors."""
    model = f"{DEEP} {LLAMA} {DOCUMENTS} --mtp-num-layers 1 "
    flags = f"{model} {PP4} --pipeline-model-parallel-layout {layout}"
    result = run(worker_pool, 4, f"{flags} {data_flags}", replace=ANY_LENGTH)
    check_parity(without_padding(result), without_padding(one_process(model)))
