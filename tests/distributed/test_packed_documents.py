"""A packed micro-batch is its documents, one at a time; padding is nothing at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.documents import DocumentResult, Piece, piece, run_documents, run_pack
from tests.distributed.harness import assert_bitwise_equal, relative_l2, run, sample
from tests.distributed.pool import WorkerPools

EOD, SEQ = 256, 16
ROWS = 6

MODELS = {
    "rope": (
        "--position-embedding-type rope --normalization RMSNorm --swiglu --group-query-attention "
        "--num-query-groups 2 --disable-bias-linear --untie-embeddings-and-output-weights"
    ),
    "learned": "--position-embedding-type learned_absolute",
}
COMMON = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --mock-data "
    "--tokenizer-type ByteTokenizer --attention-dropout 0 --hidden-dropout 0 --num-workers 0 "
    "--train-iters 1 --lr 1e-3 --lr-decay-style constant --eval-iters 0 --log-interval 1 "
    "--use-packed-sequence --threads 1 --global-batch-size 6"
)

# What is in the rows and, by hand, what the model shall make of it. Token 0 is what the plan writes
# into padding, so no document holds it.
SAMPLES = [
    # A whole document, a one-token document, one cut by the end of the row.
    sample([10, 11, 12, EOD, EOD, *range(30, 41), 41], SEQ),
    # A document that fills the row; the extra token is the next document's first.
    sample([*range(50, 65), EOD, 99], SEQ),
    # Tail padding after a last document without EOD.
    sample([70, 71, 72, EOD, 80, 81, 82], SEQ),
    # One row of nothing but one-token documents.
    sample([EOD] * 17, SEQ),
    # All but the extra token: the last position has nothing to predict.
    sample(range(100, 116), SEQ),
    # The cut document ends with the extra token.
    sample([90, EOD, *range(120, 134), EOD], SEQ),
]
PIECES = [
    piece(10, 11, 12, EOD),
    piece(EOD),
    piece(*range(30, 41), then=41),
    piece(*range(50, 65), EOD),
    piece(70, 71, 72, EOD),
    piece(80, 81, 82),
    *[piece(EOD)] * 16,
    piece(*range(100, 116)),
    piece(90, EOD),
    piece(*range(120, 134), then=EOD),
]


def test_pieces_cover_the_samples() -> None:
    """The hand-made expectation reads every real input token once, in order."""
    real = [id_ for row in SAMPLES for id_ in row["text"][: min(row["length"], SEQ)].tolist()]
    assert [id_ for each in PIECES for id_ in each.inputs] == real
    # Predicting EOD counts, in the middle of a row and across its end.
    assert sum(target == EOD for each in PIECES for target in each.targets) == 5
    assert all(99 not in each.targets for each in PIECES)


@pytest.fixture(scope="module", params=MODELS)
def flags(request: pytest.FixtureRequest) -> str:
    """A command line without micro-batch size."""
    return f"{COMMON} {MODELS[request.param]}"


@pytest.fixture(scope="module")
def one_by_one(worker_pool: WorkerPools, flags: str) -> DocumentResult:
    """Every document alone, in fp64."""
    (result,) = worker_pool(1).run(run_documents, f"{flags} --micro-batch-size 1", PIECES, True)
    return result


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (1, "--micro-batch-size 6"),
        (1, "--micro-batch-size 3"),
        (1, "--micro-batch-size 1"),
        (1, "--micro-batch-size 6 --packing-alignment segment"),
        (2, "--micro-batch-size 3 --packing-alignment segment --tensor-model-parallel-size 2"),
        (2, "--micro-batch-size 3 --tensor-model-parallel-size 2 --sequence-parallel"),
        (2, "--micro-batch-size 3 --pipeline-model-parallel-size 2"),
        (2, "--micro-batch-size 1 --use-distributed-optimizer"),
    ],
)
def test_a_step_equals_its_documents(
    world_size: int, layout: str, flags: str, one_by_one: DocumentResult, worker_pool: WorkerPools
) -> None:
    result = run(worker_pool, world_size, f"{flags} {layout}", rows=SAMPLES)
    assert result.loss_counts == [one_by_one.count]
    assert result.losses[0] == pytest.approx(one_by_one.loss, rel=2e-6)
    assert relative_l2(result.gradient, one_by_one.gradient) < 1e-5
    assert result.statistics.segments == len(PIECES)
    assert result.statistics.real_tokens == sum(len(each.inputs) for each in PIECES)
    assert result.statistics.sum_squared_lengths == sum(len(each.inputs) ** 2 for each in PIECES)


@pytest.mark.parametrize("alignment", [1, 8, 5])
def test_in_double_precision(
    alignment: int, flags: str, one_by_one: DocumentResult, worker_pool: WorkerPools
) -> None:
    """Document by document, with every segment padded to a multiple."""
    command = f"{flags} --micro-batch-size 6"
    (result,) = worker_pool(1).run(run_pack, command, SAMPLES, alignment)
    assert result.count == one_by_one.count
    assert result.losses == pytest.approx(one_by_one.losses, rel=1e-12, abs=1e-12)
    assert relative_l2(result.gradient, one_by_one.gradient) < 1e-12


def _poison_padding(trainer: Any) -> None:
    """Other ids, labels and positions in the slots of padding."""
    source = trainer.splits.train.source
    batches = list(source.loader)
    assert any(not bool(batch.valid_mask.all()) for batch in batches)
    for batch in batches:
        padding = ~batch.valid_mask
        batch.tokens[padding] = 77
        batch.labels[padding] = 78
        batch.position_ids[padding] = 3
    object.__setattr__(source, "loader", iter(batches))


def _poison_embedding(trainer: Any) -> None:
    """NaN in the embedding of the id that fills padding."""
    for name, parameter in trainer.step.model[0].named_parameters():
        if name.endswith("embedding.word_embeddings.weight"):
            parameter.data[0] = float("nan")


def test_padding_contributes_nothing(flags: str, worker_pool: WorkerPools) -> None:
    command = f"{flags} --micro-batch-size 3"
    clean = run(worker_pool, 1, command, rows=SAMPLES)
    poisoned = run(worker_pool, 1, command, rows=SAMPLES, prepare=_poison_padding)
    assert poisoned.statistics.padded_tokens == clean.statistics.padded_tokens > 0
    assert poisoned.losses == clean.losses
    assert_bitwise_equal(poisoned.gradient, clean.gradient)
    assert_bitwise_equal(poisoned.final_weights, clean.final_weights)
    unused = clean.gradient["embedding.word_embeddings.weight"]
    if "untie" in command:
        assert not unused[0].any()


def test_nan_in_padding_stays_out_of_the_loss(worker_pool: WorkerPools) -> None:
    command = f"{COMMON} {MODELS['rope']} --micro-batch-size 3"
    command += " --no-check-for-nan-in-loss-and-grad"
    clean = run(worker_pool, 1, command, rows=SAMPLES)
    poisoned = run(worker_pool, 1, command, rows=SAMPLES, prepare=_poison_embedding)
    assert poisoned.losses == clean.losses
    assert torch.tensor(poisoned.losses).isfinite().all()


def test_rows_follow_the_same_targets_but_for_document_ends(worker_pool: WorkerPools) -> None:
    """Without packing, and no flag, a row is one text: EOD predicts the next document."""
    flags = f"{COMMON} {MODELS['learned']} --micro-batch-size 1 --global-batch-size 2"
    flags = flags.replace("--use-packed-sequence", "--calculate-per-token-loss")
    ids = [10, 11, 12, EOD, EOD, *range(30, 41), 41]
    tail = [70, 71, 72, EOD, 80, 81, 82]
    rows = [sample(ids, SEQ), sample(tail, SEQ)]
    rows[1]["text"][7:] = EOD  # what tail padding holds must not matter, but it is embedded
    expected = [
        Piece(tuple(ids[:-1]), tuple(ids[1:])),
        Piece((*tail, *[EOD] * 9), (*tail[1:], *[-100] * 10)),
    ]
    result = run(worker_pool, 1, flags, rows=rows)
    (reference,) = worker_pool(1).run(run_documents, flags, expected, True)
    assert result.loss_counts == [16 + 6]
    assert result.losses[0] == pytest.approx(reference.loss, rel=2e-6)
    assert relative_l2(result.gradient, reference.gradient) < 1e-5
