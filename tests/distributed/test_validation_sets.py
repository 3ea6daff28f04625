"""Validation over whole datasets, over several, and with batch sizes of its own."""

from __future__ import annotations

import math

import pytest

from tests.distributed.corpora import write_byte_corpus
from tests.distributed.harness import run
from tests.distributed.pool import WorkerPools

FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--tokenizer-type ByteTokenizer --attention-dropout 0 --hidden-dropout 0 --num-workers 0 "
    "--lr 0 --lr-decay-style constant --log-interval 1 --threads 1 --micro-batch-size 1 "
    "--global-batch-size 2 --train-iters 2 --eval-interval 1 --position-embedding-type rope "
)
PACKED = "--use-packed-sequence "
DOCUMENTS = PACKED + "--packing-strategy next_fit "
TEXTS = ["one two three", "a longer text, of several rows and of many words " * 3, "x", "end"] * 3


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("validation")
    parts = {"train": TEXTS * 2, "first": TEXTS, "second": ["another"] * 20 + TEXTS[:3]}
    return {name: str(write_byte_corpus(folder / name, texts)) for name, texts in parts.items()}


def targets_of(texts: list[str]) -> int:
    """Tokens that a whole pass over documents predicts: all but the first of each."""
    return sum(len(text.encode()) for text in texts)


@pytest.mark.parametrize("kind", [DOCUMENTS, PACKED, ""])
def test_a_full_validation_sees_all_data_each_time(
    kind: str, corpora: dict[str, str], worker_pool: WorkerPools
):
    flags = (
        f"{FLAGS} {kind} --train-data-path {corpora['train']} --valid-data-path {corpora['first']} "
        "--full-validation --eval-iters 0 "
    )
    one = run(worker_pool, 1, flags)
    # Two evaluations and the one after training; the weights stand still.
    losses, tokens = zip(*one.validations, strict=True)
    assert len(losses) == 3 and len(set(losses)) == 1 and len(set(tokens)) == 1
    if kind == DOCUMENTS:
        assert tokens[0] == targets_of(TEXTS)
    layouts = [(2, "--eval-global-batch-size 12 --eval-micro-batch-size 3")]
    if kind == DOCUMENTS:
        layouts += [
            (2, "--tensor-model-parallel-size 2 --eval-global-batch-size 1 --num-workers 1"),
            (2, "--pipeline-model-parallel-size 2 --train-iters 1"),
        ]
    for world_size, more in layouts:
        other = run(worker_pool, world_size, flags + more)
        assert {count for _, count in other.validations} == set(tokens), more
        for loss, _ in other.validations:
            assert loss == pytest.approx(losses[0], rel=2e-6), more


def test_each_set_is_validated_by_itself(corpora: dict[str, str], worker_pool: WorkerPools):
    first, second = corpora["first"], corpora["second"]
    flags = f"{FLAGS} {DOCUMENTS} --train-data-path {corpora['train']} --full-validation "
    both = run(
        worker_pool, 1, f"{flags} --valid-data-path {first} {second} --multiple-validation-sets"
    )
    alone = [run(worker_pool, 1, f"{flags} --valid-data-path {path}") for path in (first, second)]
    assert both.validations[:2] == [result.validations[0] for result in alone]
    assert both.validations[0] != both.validations[1]
    for place in range(2):
        assert both.log.count(f" validation-{place} loss at iteration 1 | lm loss value:") == 1
    assert " validation loss at" not in both.log

    named = run(
        worker_pool,
        2,
        f"{flags} --valid-data-path {first} {second} --multiple-validation-sets "
        "--validation-set-names prose words",
    )
    for ours, theirs in zip(named.validations, both.validations, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-6)
    assert " validation-prose loss at" in named.log and " validation-words loss at" in named.log


def test_sets_go_on_where_they_stopped_without_full_validation(
    corpora: dict[str, str], worker_pool: WorkerPools
):
    flags = (
        f"{FLAGS} {PACKED} --train-data-path {corpora['train']} --valid-data-path "
        f"{corpora['first']} {corpora['second']} --multiple-validation-sets --eval-iters 2 "
    )
    result = run(worker_pool, 1, flags + "--eval-global-batch-size 3")
    assert len(result.validations) == 6
    assert all(math.isfinite(loss) and tokens > 0 for loss, tokens in result.validations)
    dp2 = run(worker_pool, 1, flags + "--eval-global-batch-size 3 --eval-micro-batch-size 3")
    assert [tokens for _, tokens in dp2.validations] == [t for _, t in result.validations]
