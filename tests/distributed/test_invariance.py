"""What else must not change the training, and reruns that repeat it bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest

from tests.distributed import harness
from tests.distributed.harness import RankResult, assert_bitwise_equal, relative_l2, run
from tests.distributed.pool import WorkerPools

COMMON = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 "
    "--attention-dropout 0 --train-iters 6 --lr 1e-3 --lr-decay-style constant "
    "--eval-iters 2 --eval-interval 3 --log-interval 2 --threads 1 --global-batch-size 4 "
    "--use-packed-sequence "
)
LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --group-query-attention "
    "--num-query-groups 2 --disable-bias-linear --untie-embeddings-and-output-weights "
)
NO_DROPOUT = "--hidden-dropout 0 "
DROPOUT = "--hidden-dropout 0.1 "
TP2_SP = "--tensor-model-parallel-size 2 --sequence-parallel "
PP2 = "--pipeline-model-parallel-size 2 "

Train = Callable[..., RankResult]


@pytest.fixture(scope="module")
def train(worker_pool: WorkerPools, data_flags: str) -> Train:
    """Run flags on a number of processes; each combination once."""
    known: dict[tuple[int, str], RankResult] = {}

    def get(world_size: int, flags: str, again: bool = False) -> RankResult:
        key = (world_size, flags)
        if again or key not in known:
            known[key] = run(worker_pool, world_size, f"{COMMON} {flags} {data_flags}")
        return known[key]

    return get


def _check_equal(result: RankResult, reference: RankResult) -> None:
    assert result.losses == pytest.approx(reference.losses, rel=2e-6)
    assert relative_l2(result.gradient, reference.gradient) < 1e-5
    assert result.loss_counts == reference.loss_counts
    for (loss, count), (expected, tokens) in zip(
        result.validations, reference.validations, strict=True
    ):
        assert (loss, count) == (pytest.approx(expected, rel=2e-6), tokens)


def _check_identical(result: RankResult, reference: RankResult) -> None:
    assert result.losses == reference.losses
    assert result.grad_norms == reference.grad_norms
    assert_bitwise_equal(result.gradient, reference.gradient)
    assert_bitwise_equal(result.final_weights, reference.final_weights)


@pytest.mark.parametrize(
    ("world_size", "micro_batch_size", "layout"),
    [(1, 1, ""), (1, 2, ""), (2, 2, ""), (2, 1, "--use-distributed-optimizer"), (2, 2, PP2)],
)
def test_the_cut_into_micro_batches(
    world_size: int, micro_batch_size: int, layout: str, train: Train
) -> None:
    """One pack of the whole global batch, or many: targets per pack are uneven."""
    flags = LLAMA + NO_DROPOUT
    reference = train(1, f"{flags} --micro-batch-size 4")
    result = train(world_size, f"{flags} --micro-batch-size {micro_batch_size} {layout}")
    _check_equal(result, reference)
    # Real tokens and segments are the data's, whatever packs hold them.
    assert result.statistics.packs == 6 * 4 // micro_batch_size
    for name in ("segments", "real_tokens", "supervised_tokens", "sum_squared_lengths"):
        assert getattr(result.statistics, name) == getattr(reference.statistics, name)


@pytest.mark.parametrize(
    "recompute",
    [
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
        "--recompute-granularity selective",
    ],
    ids=["uniform", "block", "selective"],
)
def test_recomputation_repeats_the_forward_pass(recompute: str, train: Train) -> None:
    """With dropout: the second forward pass must draw the same masks."""
    flags = f"{LLAMA} {DROPOUT} --micro-batch-size 2"
    _check_identical(train(1, f"{flags} {recompute}"), train(1, flags))


def test_recomputation_with_sequence_parallelism(train: Train) -> None:
    flags = f"{DROPOUT} --micro-batch-size 2 {TP2_SP}"
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"
    _check_identical(train(2, f"{flags} {recompute}"), train(2, flags))


def test_dropout_is_not_a_no_op(train: Train) -> None:
    """What makes the tests of recomputation mean something."""
    flags = f"{LLAMA} --micro-batch-size 2"
    dropped, kept = train(1, f"{flags} {DROPOUT}"), train(1, f"{flags} {NO_DROPOUT}")
    assert abs(dropped.losses[0] / kept.losses[0] - 1) > 1e-5
    assert dropped.losses[0] == pytest.approx(kept.losses[0], rel=0.02)


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(1, ""), (2, "--use-distributed-optimizer"), (2, TP2_SP)],
    ids=["one-process", "dp2", "tp2-sp"],
)
def test_deterministic_mode_repeats_bit_by_bit(world_size: int, layout: str, train: Train) -> None:
    flags = f"{LLAMA} {DROPOUT} --micro-batch-size 1 --deterministic-mode {layout}"
    _check_identical(train(world_size, flags, again=True), train(world_size, flags))


def test_another_seed_is_another_run(train: Train) -> None:
    flags = f"{LLAMA} {NO_DROPOUT} --micro-batch-size 2"
    other = train(1, f"{flags} --seed 4321")
    assert other.losses[0] != train(1, flags).losses[0]
    name, real = "embedding.word_embeddings.weight", 258
    drawn = [run.initial_weights[name][:real] for run in (other, train(1, flags))]
    assert not (drawn[0] == drawn[1]).any()


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (1, ""),
        (1, "--fp32-residual-connection"),
        (2, "--use-distributed-optimizer"),
        (2, TP2_SP),
        (2, PP2),
    ],
    ids=["one-process", "fp32-residual", "dp2", "tp2-sp", "pp2"],
)
def test_bf16_follows_fp32(world_size: int, layout: str, train: Train) -> None:
    flags = f"{LLAMA} {NO_DROPOUT} --micro-batch-size 2"
    half = train(world_size, f"{flags} --bf16 {layout}")
    assert half.losses == pytest.approx(train(1, flags).losses, rel=5e-3)
    assert half.losses[-1] < half.losses[0] - 0.2
    assert all(half.updated)


@pytest.mark.parametrize(("world_size", "layout"), [(1, ""), (2, PP2)], ids=["one-process", "pp2"])
def test_padding_every_segment(
    world_size: int, layout: str, train: Train, worker_pool: WorkerPools, data_flags: str
) -> None:
    """Packs of varying length, as layouts that pad each segment make them."""
    flags = f"{LLAMA} {NO_DROPOUT} --micro-batch-size 2"
    (padded, *_) = worker_pool(world_size).run(
        _train_with_padded_segments, f"{COMMON} {flags} {layout} {data_flags}"
    )
    reference = train(1, flags)
    assert padded.losses == pytest.approx(reference.losses, rel=2e-6)
    assert padded.grad_norms == pytest.approx(reference.grad_norms, rel=1e-5)
    assert padded.loss_counts == reference.loss_counts
    assert padded.statistics.real_tokens == reference.statistics.real_tokens
    assert padded.statistics.padded_tokens > reference.statistics.segments


def _train_with_padded_segments(flags: str) -> RankResult:
    from megatron.packed.packing import Alignment
    from megatron.packed.training import collation, loop

    def every_segment(config: object) -> Alignment:
        return Alignment(segment=8)

    with (
        mock.patch.object(collation, "pack_alignment", every_segment),
        mock.patch.object(loop, "pack_alignment", every_segment),
    ):
        return harness.train(flags)
