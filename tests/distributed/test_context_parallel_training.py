"""Context parallelism never changes the training: every helper and exchange against one process.

Losses of 20 steps, the first gradient, evaluations and what was counted, in fp32.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.distributed.harness import RankResult, assert_bitwise_equal, relative_l2, run
from tests.distributed.pool import RankDiedError, WorkerPools

LOSS_TOLERANCE = 2e-6
GRADIENT_TOLERANCE = 1e-5

COMMON = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 "
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2 --global-batch-size 4 "
    "--train-iters 20 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2 "
    "--eval-iters 1 --eval-interval 10 --log-interval 10 --threads 1 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --group-query-attention "
    "--num-query-groups 2 --disable-bias-linear --untie-embeddings-and-output-weights "
)
PACKED = "--use-packed-sequence "
# The loss of a micro-batch is its own mean here: counts differ between micro-batches and ranks.
ROWS = "--reset-position-ids --reset-attention-mask --eod-mask-loss "
PLAIN_ROWS = "--calculate-per-token-loss "
DOCUMENTS = "--use-packed-sequence --packing-strategy windowed_best_fit "
HIERARCHY = "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2 "
LEARNED = "--position-embedding-type learned_absolute "

# Name: processes, what is trained on, how it is spread.
RUNS = {
    "rows": (2, ROWS, ""),
    "plain-rows": (2, PLAIN_ROWS, ""),
    "rows-a2a": (2, ROWS, "--cp-comm-type a2a"),
    "rows-striped-4": (4, ROWS, "--cp-comm-type striped"),
    "ring": (2, PACKED, ""),
    "ring-4": (4, PACKED, ""),
    "all_gather": (2, PACKED, "--cp-comm-type all_gather"),
    "striped": (2, PACKED, "--cp-comm-type striped"),
    "ulysses": (2, PACKED, "--attention-backend flex"),
    "a2a-replicated-4": (4, PACKED, "--cp-comm-type a2a"),
    "a2a+p2p-4": (4, PACKED, HIERARCHY),
    "magi": (2, PACKED, "--attention-backend magi"),
    "magi-chunks-4": (4, PACKED, "--attention-backend magi --magi-attn-chunk-size 16"),
    "one-a-layer": (2, PACKED, "--cp-comm-type p2p a2a"),
    "documents": (2, DOCUMENTS, ""),
    "learned-positions": (2, PACKED + LEARNED, ""),
    "ring-tp2": (4, PACKED, "--tensor-model-parallel-size 2 --num-workers 1"),
    "ring-tp2-sp": (4, PACKED, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "ring-pp2": (4, PACKED, "--pipeline-model-parallel-size 2 --check-packing-metadata"),
    "ring-pp2-capacity": (
        4,
        PACKED,
        "--pipeline-model-parallel-size 2 --packed-sequence-capacity 512",
    ),
    "ring-dp2": (4, PACKED, ""),
    "ring-dp2-distributed-optimizer": (4, PACKED, "--use-distributed-optimizer"),
    "rows-tp2-sp": (4, ROWS, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "magi-pp2": (4, PACKED, "--attention-backend magi --pipeline-model-parallel-size 2"),
}


def _cp_size(name: str) -> int:
    return 4 if name.endswith("-4") else 2


def check_parity(result: RankResult, reference: RankResult) -> None:
    """Same start, same gradient, same curve, same evaluations, the same data counted once."""
    assert_bitwise_equal(result.initial_weights, reference.initial_weights)
    assert relative_l2(result.gradient, reference.gradient) < GRADIENT_TOLERANCE
    assert len(result.losses) == 20
    assert result.losses == pytest.approx(reference.losses, rel=LOSS_TOLERANCE)
    assert result.loss_counts == reference.loss_counts
    assert result.grad_norms == pytest.approx(reference.grad_norms, rel=GRADIENT_TOLERANCE)
    for (loss, tokens), (expected, count) in zip(
        result.validations, reference.validations, strict=True
    ):
        assert tokens == count
        assert loss == pytest.approx(expected, rel=LOSS_TOLERANCE)
    for name in ("packs", "segments", "real_tokens", "supervised_tokens", "sum_squared_lengths"):
        assert getattr(result.statistics, name) == getattr(reference.statistics, name)


# Each helper stays in the quick suite, and each kind of layout beside it.
SLOW = ("rows-striped-4", "ring-tp2", "ring-pp2-capacity", "ring-dp2", "magi-pp2", "plain-rows")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in RUNS]
)
def test_context_parallel_equals_one_process(
    name: str,
    worker_pool: WorkerPools,
    data_flags: str,
    one_process: Callable[[str], RankResult],
) -> None:
    world_size, kind, layout = RUNS[name]
    flags = f"{COMMON} {kind} --context-parallel-size {_cp_size(name)} {data_flags} {layout}"
    check_parity(run(worker_pool, world_size, flags), one_process(COMMON + kind))


@pytest.mark.slow
@pytest.mark.parametrize("shapes", ["", "--packed-sequence-capacity 512"], ids=["vary", "fixed"])
def test_four_pipeline_stages(shapes: str, worker_pool: WorkerPools, data_flags: str) -> None:
    """Eight processes: stages in the middle hold neither embedding nor loss, nor their neighbours'
    packs' lengths, unless all packs have one."""
    flags = f"{COMMON} {PACKED} {data_flags} --num-layers 4 --global-batch-size 8"
    layout = f"--context-parallel-size 2 --pipeline-model-parallel-size 4 {shapes}"
    check_parity(run(worker_pool, 8, f"{flags} {layout}"), run(worker_pool, 1, flags))


def _look_at_a_rank(trainer: Any) -> dict[str, Any]:
    """What a rank draws dropout from, and its share of the next micro-batch."""
    import torch
    from megatron.core import parallel_state

    from megatron.packed.context_parallel import build_context_parallel_helper

    batch = trainer.splits.train.source.read()
    params = batch.packed_seq_params
    helper = build_context_parallel_helper(trainer.config)
    assert helper.cp_rank == parallel_state.get_context_parallel_rank() == params.cp_rank
    index = helper.get_slice_index(params.partition)
    group = parallel_state.get_context_parallel_group()
    return {
        "seed": torch.initial_seed(),
        "cp_rank": params.cp_rank,
        "index": index.tolist(),
        "total": params.chunk_total_tokens,
        "tokens": batch.tokens[0].tolist(),
        "whole": helper.unslice(batch.tokens, params.partition, group=group)[0].tolist(),
    }


def test_ranks_hold_different_tokens_and_draw_different_dropout(
    worker_pool: WorkerPools, data_flags: str
) -> None:
    flags = f"{COMMON} {PACKED} --context-parallel-size 2 {data_flags} --hidden-dropout 0.1 "
    flags += "--train-iters 3 --eval-iters 0 --tensor-model-parallel-size 2"
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    plain = run(worker_pool, 4, flags, inspect=_look_at_a_rank)
    ranks = plain.extra
    assert [rank["cp_rank"] for rank in ranks] == [0, 0, 1, 1]
    assert ranks[0]["seed"] == ranks[1]["seed"] != ranks[2]["seed"] == ranks[3]["seed"]
    for rank in ranks:
        assert len(rank["tokens"]) == rank["total"] // 2
        assert rank["whole"] == ranks[0]["whole"]
        assert rank["tokens"] == [rank["whole"][i] for i in rank["index"]]
    assert sorted(ranks[0]["index"] + ranks[2]["index"]) == list(range(ranks[0]["total"]))
    # Exchanges and dropout repeat in the second forward pass, bit by bit.
    again = run(worker_pool, 4, f"{flags} {recompute}")
    assert again.losses == plain.losses
    assert_bitwise_equal(again.gradient, plain.gradient)
    assert_bitwise_equal(again.final_weights, plain.final_weights)


def test_half_precision_follows(
    worker_pool: WorkerPools, data_flags: str, one_process: Callable[[str], RankResult]
) -> None:
    flags = f"{COMMON} {PACKED} --context-parallel-size 2 --bf16 {data_flags} --eval-iters 0"
    result = run(worker_pool, 2, flags)
    assert result.losses == pytest.approx(one_process(COMMON + PACKED).losses, rel=5e-3)


def _lose_a_rank(flags: str, folder: Any) -> None:
    """Train until rank 1 dies in the attention of its third step; keep what rank 0 says."""
    import torch.distributed as dist

    from megatron.packed.attention import core_attention
    from megatron.packed.errors import TrainingError
    from tests.distributed import harness
    from tests.distributed.test_context_parallel import _die

    attend, calls = core_attention.packed_attention, itertools.count(1)

    def attend_and_die(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 10 and dist.get_rank() == 1:
            _die(after=2.0)
        return attend(*args, **kwargs)

    with mock.patch.object(core_attention, "packed_attention", attend_and_die):
        try:
            harness.train(flags)
        except TrainingError as error:
            (folder / f"rank {dist.get_rank()}").write_text(str(error))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_lost_rank_is_named_with_its_step(
    worker_pool: WorkerPools, data_flags: str, tmp_path: Path
) -> None:
    flags = f"{COMMON} {PACKED} --context-parallel-size 2 {data_flags} --eval-iters 0"
    with pytest.raises(RankDiedError, match="code 3"):
        worker_pool(2).run(_lose_a_rank, flags, tmp_path)
    message = (tmp_path / "rank 0").read_text()
    assert message.startswith("iteration 3: context-parallel rank 0 lost rank 1 (global rank 1)")
    assert "in step 1 of the attention's forward pass (keys)" in message
    assert "\n" not in message
