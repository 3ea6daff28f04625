"""Every packing strategy through the real trainer: what is trained, and what must not change it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.distributed.harness import RankResult, relative_l2, run
from tests.distributed.pool import WorkerPools
from tests.distributed.recording import in_order, record, recorded

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --position-embedding-type rope "
    "--attention-dropout 0 --hidden-dropout 0 --lr-decay-style constant --threads 1 "
    "--use-packed-sequence "
)
CURVE = (
    MODEL + "--seq-length 128 --lr 1e-3 --train-iters 5 --eval-iters 1 --eval-interval 5 "
    "--log-interval 5 --global-batch-size 4 "
)
PACKERS = ("next_fit", "best_fit_decreasing", "windowed_best_fit", "greedy_workload")
TP2_SP = "--tensor-model-parallel-size 2 --sequence-parallel "
PP2 = "--pipeline-model-parallel-size 2 "
SEQ, VOCABULARY = 32, 1400

Train = Callable[..., RankResult]


@pytest.fixture(scope="module")
def train(worker_pool: WorkerPools, data_flags: str) -> Train:
    """Run a strategy and flags on real text; each combination once."""
    known: dict[tuple[int, str], RankResult] = {}

    def get(world_size: int, strategy: str, flags: str) -> RankResult:
        command = f"{CURVE} {data_flags} --packing-strategy {strategy} {flags}"
        key = (world_size, command)
        if key not in known:
            known[key] = run(worker_pool, world_size, command)
        return known[key]

    return get


def _check_equal(result: RankResult, reference: RankResult) -> None:
    assert result.losses == pytest.approx(reference.losses, rel=2e-6)
    assert result.loss_counts == reference.loss_counts
    assert relative_l2(result.gradient, reference.gradient) < 1e-5
    for (loss, count), (expected, tokens) in zip(
        result.validations, reference.validations, strict=True
    ):
        assert (loss, count) == (pytest.approx(expected, rel=2e-6), tokens)


@pytest.mark.parametrize("strategy", PACKERS)
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, "--micro-batch-size 1 --num-workers 1"),
        (2, f"--micro-batch-size 2 --check-packing-metadata {TP2_SP}"),
        (2, f"--micro-batch-size 2 --packed-sequence-capacity 320 --num-workers 2 {PP2}"),
    ],
    ids=["dp2-worker", "tp2-sp", "pp2-capacity-workers"],
)
def test_no_layout_changes_the_training(
    world_size: int, layout: str, strategy: str, train: Train
) -> None:
    reference = train(1, strategy, "--micro-batch-size 4")
    result = train(world_size, strategy, layout)
    _check_equal(result, reference)
    for name in ("segments", "real_tokens", "supervised_tokens", "sum_squared_lengths"):
        assert getattr(result.statistics, name) == getattr(reference.statistics, name)
    assert reference.losses[-1] < reference.losses[0]


@pytest.mark.parametrize(
    "flags",
    [
        f"--micro-batch-size 2 --packing-alignment segment {TP2_SP}",
        f"--micro-batch-size 2 --packing-alignment pack --check-packing-metadata {PP2}",
        "--micro-batch-size 2 --context-parallel-size 2 --check-packing-metadata",
        "--micro-batch-size 2 --context-parallel-size 2 --packed-sequence-capacity 512",
    ],
    ids=["segment-tp2", "pack-pp2", "cp2", "cp2-capacity"],
)
def test_alignment_modes(flags: str, train: Train) -> None:
    _check_equal(
        train(2, "windowed_best_fit", flags), train(1, "windowed_best_fit", "--micro-batch-size 4")
    )


def test_capacity_of_packs_of_rows(train: Train) -> None:
    reference = train(1, "rows", "--micro-batch-size 4")
    wide = train(1, "rows", "--micro-batch-size 4 --packed-sequence-capacity 600")
    _check_equal(wide, reference)
    steps = len(reference.losses)
    assert reference.statistics.padded_tokens == 0
    assert wide.statistics.padded_tokens == steps * (600 - 512)


def test_boundaries_by_index_train_like_those_by_eod(train: Train) -> None:
    """The same corpus, whose documents all end in EOD, on one process and shared out."""
    reference = train(1, "rows", "--micro-batch-size 4")
    by_index = train(1, "rows", "--micro-batch-size 4 --document-boundaries index")
    assert by_index.losses == reference.losses
    assert by_index.validations == reference.validations
    flags = f"--micro-batch-size 2 --document-boundaries index --check-packing-metadata {TP2_SP}"
    _check_equal(train(2, "rows", flags), reference)


# ---- which tokens are trained ---------------------------------------------------------------


@pytest.fixture(scope="module")
def documents() -> list[list[int]]:
    """Documents of 1 to 90 tokens, no token in two of them; many don't fit in a pack."""
    ends = np.cumsum(np.random.default_rng(1).integers(1, 90, size=30)).tolist()
    assert ends[-1] < VOCABULARY
    return [list(range(a, b)) for a, b in zip([0, *ends[:-1]], ends, strict=True)]


@pytest.fixture(scope="module")
def corpus(documents: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = tmp_path_factory.mktemp("documents") / "text"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(f"{prefix}.idx")
    return prefix


def _trained(
    pools: WorkerPools, corpus: Path, strategy: str, world_size: int, flags: str, iterations: int
) -> tuple[RankResult, list[list[tuple[tuple[int, ...], tuple[int, ...]]]]]:
    command = (
        f"{MODEL} --data-path {corpus} --split 1,0,0 --tokenizer-type NullTokenizer "
        f"--vocab-size {VOCABULARY} --seq-length {SEQ} --lr 1e-4 --eval-iters 0 --log-interval 10 "
        f"--micro-batch-size 1 --global-batch-size 2 --train-iters {iterations} --num-workers 0 "
        f"--packing-strategy {strategy} {flags}"
    )
    result = run(pools, world_size, command, prepare=record, inspect=recorded)
    return result, in_order(result.extra, world_size)


@pytest.mark.parametrize("strategy", PACKERS)
def test_every_token_is_trained_once_an_epoch(
    strategy: str, worker_pool: WorkerPools, corpus: Path, documents: list[list[int]]
) -> None:
    """On two ranks, over two epochs: inputs and targets, documents cut or not."""
    _, packs = _trained(worker_pool, corpus, strategy, 2, "", 64)
    total = sum(map(len, documents))
    next_token = {a: b for text in documents for a, b in zip(text, text[1:], strict=False)}
    for epoch in range(2):
        inputs: Counter[int] = Counter()
        while sum(inputs.values()) < total:
            for tokens, targets in packs.pop(0):
                inputs.update(tokens)
                # A cut piece still predicts the token after it.
                assert list(targets) == [next_token.get(token, -1) for token in tokens]
        assert inputs == Counter({token: 1 for text in documents for token in text}), epoch


@pytest.mark.parametrize(
    ("policy", "kept", "said"),
    [
        ("truncate", lambda n: min(n, SEQ), "documents truncated ("),
        ("drop", lambda n: n if n <= SEQ else 0, "documents dropped ("),
    ],
)
def test_documents_that_are_too_long(
    policy: str,
    kept: Callable[[int], int],
    said: str,
    worker_pool: WorkerPools,
    corpus: Path,
    documents: list[list[int]],
) -> None:
    flags = f"--overlong-documents {policy} --packing-window 8"
    result, packs = _trained(worker_pool, corpus, "windowed_best_fit", 1, flags, 30)
    trained = {token for pack in packs for tokens, _ in pack for token in tokens}
    assert trained == {token for text in documents for token in text[: kept(len(text))]}
    assert said in result.log
    assert f"train: {len(documents)} documents of" in result.log
