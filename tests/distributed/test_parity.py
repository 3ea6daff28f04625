"""The layout never changes the training: every split of a run against one process, in fp32."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from tests.distributed.harness import RankResult, assert_bitwise_equal, relative_l2, run
from tests.distributed.pool import WorkerPools

LOSS_TOLERANCE = 2e-6
GRADIENT_TOLERANCE = 1e-5

COMMON = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 "
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 4 "
    "--train-iters 10 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2 "
    "--eval-iters 1 --eval-interval 5 --log-interval 5 --threads 1 "
)
LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --group-query-attention "
    "--num-query-groups 2 --disable-bias-linear --untie-embeddings-and-output-weights "
)
GPT = "--position-embedding-type learned_absolute --normalization LayerNorm "
LLAMA_TIED = LLAMA.replace("--untie-embeddings-and-output-weights", "")
GPT_UNTIED = GPT + "--untie-embeddings-and-output-weights "

PACKED = "--use-packed-sequence "
ROWS = ""
# Blocks inside rows, and counts that differ between micro-batches.
RESET_ROWS = "--reset-position-ids --reset-attention-mask --eod-mask-loss "

RUNS = {
    "llama-packed": LLAMA + PACKED,
    "gpt-packed": GPT + PACKED,
    "llama-rows": LLAMA + RESET_ROWS,
    "gpt-rows": GPT + ROWS,
}
LAYOUTS = {
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "tp2-sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "dp2": (2, ""),
    "dp2-distributed-optimizer": (2, "--use-distributed-optimizer"),
    "tp2-pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
}


def check_parity(result: RankResult, reference: RankResult) -> None:
    """Same start, same gradient, same curve, same evaluations."""
    assert_bitwise_equal(result.initial_weights, reference.initial_weights)
    assert relative_l2(result.gradient, reference.gradient) < GRADIENT_TOLERANCE
    assert len(result.losses) == 10
    assert result.losses == pytest.approx(reference.losses, rel=LOSS_TOLERANCE)
    assert result.loss_counts == reference.loss_counts
    assert result.grad_norms == pytest.approx(reference.grad_norms, rel=GRADIENT_TOLERANCE)
    assert len(result.validations) == 4  # twice on the way, validation and test at the end
    for (loss, tokens), (expected, count) in zip(
        result.validations, reference.validations, strict=True
    ):
        assert tokens == count
        assert loss == pytest.approx(expected, rel=LOSS_TOLERANCE)
    assert result.statistics == reference.statistics
    assert relative_l2(result.final_weights, reference.final_weights) < GRADIENT_TOLERANCE


# What the others and the matrix of layouts (tests/functional/parity.py) show between them.
SLOW = {"llama-packed": ("tp2-sp", "pp2", "dp2"), "gpt-rows": ("tp2", "pp2", "tp2-pp2")}
GRID = [
    pytest.param(kind, layout, marks=pytest.mark.slow if layout in SLOW.get(kind, ()) else ())
    for kind in RUNS
    for layout in LAYOUTS
]


@pytest.mark.parametrize(("kind", "layout"), GRID)
def test_layout_equals_one_process(
    kind: str,
    layout: str,
    worker_pool: WorkerPools,
    data_flags: str,
    one_process: Callable[[str], RankResult],
) -> None:
    world_size, flags = LAYOUTS[layout]
    result = run(worker_pool, world_size, f"{COMMON} {RUNS[kind]} {flags} {data_flags}")
    check_parity(result, one_process(COMMON + RUNS[kind]))


@pytest.mark.parametrize("kind", [LLAMA_TIED, GPT_UNTIED], ids=["llama-tied", "gpt-untied"])
def test_embeddings_tied_and_untied(
    kind: str,
    worker_pool: WorkerPools,
    data_flags: str,
    one_process: Callable[[str], RankResult],
) -> None:
    world_size, layout = LAYOUTS["tp2-pp2"]
    result = run(worker_pool, world_size, f"{COMMON} {kind} {PACKED} {layout} {data_flags}")
    check_parity(result, one_process(COMMON + kind + PACKED))


def test_reference_is_worth_comparing_with(one_process: Callable[[str], RankResult]) -> None:
    """The runs learn from a uniform guess on, and what they are fed is packed in earnest."""
    for flags in RUNS.values():
        reference = one_process(COMMON + flags)
        assert reference.losses[0] == pytest.approx(math.log(258), abs=0.15)
        assert reference.losses[-1] < reference.losses[0] - 0.3
        assert all(reference.updated)
    packed, rows = one_process(COMMON + RUNS["gpt-packed"]), one_process(COMMON + RUNS["gpt-rows"])
    assert packed.statistics.segments > 2 * packed.statistics.packs
    # Documents are the library's of this Python version: a token's own is hardly half a row long.
    assert packed.statistics.sum_squared_lengths < 0.6 * 128 * packed.statistics.real_tokens
    assert len(set(packed.loss_counts)) > 1
    assert packed.losses[0] != pytest.approx(rows.losses[0], rel=1e-4)


def test_packs_equal_rows_with_resets(
    worker_pool: WorkerPools, data_flags: str, one_process: Callable[[str], RankResult]
) -> None:
    """Blocks inside rows are the same training as packs of the rows' segments."""
    flags = f"{COMMON} {LLAMA} {RESET_ROWS} --calculate-per-token-loss --micro-batch-size 2"
    rows = run(worker_pool, 1, f"{flags} {data_flags}")
    packed = one_process(COMMON + RUNS["llama-packed"])
    rows.statistics.packs = packed.statistics.packs
    check_parity(rows, packed)


def test_vocabulary_padding_never_enters_the_loss(
    worker_pool: WorkerPools, data_flags: str, one_process: Callable[[str], RankResult]
) -> None:
    """258 ids padded to 258, 384 and 4,096 rows; the rows that pad get no gradient."""
    for multiple in (1, 4096):
        flags = f"{COMMON} {RUNS['gpt-packed']} --make-vocab-size-divisible-by {multiple}"
        result = run(worker_pool, 1, f"{flags} {data_flags}")
        check_parity(result, one_process(COMMON + RUNS["gpt-packed"]))
        gradient = result.gradient["embedding.word_embeddings.weight"]
        assert gradient.shape[0] == -(-258 // multiple) * multiple
        assert not gradient[258:].any()
