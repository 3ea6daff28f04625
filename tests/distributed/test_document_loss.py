"""Reductions over documents: one gradient for a global batch, however it is laid out.

The reference runs every document alone, in fp64, and adds up plain Python numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.packed.errors import TrainingError
from tests.distributed.documents import (
    NO_TARGET,
    DocumentResult,
    Piece,
    build_model,
    gradient_of,
    named,
    piece,
)
from tests.distributed.harness import relative_l2, run, sample
from tests.distributed.pool import WorkerPools
from tests.distributed.recording import record, recorded
from tests.unit.data.helpers import write_corpus

EOD, SEQ = 256, 16
FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --mock-data "
    "--tokenizer-type ByteTokenizer --attention-dropout 0 --hidden-dropout 0 --num-workers 0 "
    "--train-iters 1 --lr 1e-3 --lr-decay-style constant --eval-iters 0 --log-interval 1 "
    "--use-packed-sequence --threads 1 --position-embedding-type rope --normalization RMSNorm "
    "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights"
)


def row(ids: Sequence[int], documents: list[tuple[int, int, int]], offset: int = 0) -> Any:
    """A sample that says what documents it holds: (number, ids in this row, ids as stored)."""
    numbers, lengths, sizes = (np.array(column) for column in zip(*documents, strict=True))
    return sample(ids, SEQ) | {
        "document_ids": numbers,
        "document_lengths": lengths,
        "document_offset": offset,
        "document_sizes": sizes,
    }


# Document 2 goes on from row 0 through row 1; the extra token of row 2 begins document 6.
ROWS = [
    row([10, 11, EOD, EOD, *range(30, 43)], [(0, 3, 3), (1, 1, 1), (2, 13, 18)]),
    row([*range(42, 47), EOD, *range(60, 71)], [(2, 6, 18), (3, 11, 20)], offset=12),
    row([80, EOD, *range(90, 103), EOD, 110], [(4, 2, 2), (5, 14, 14), (6, 1, 9)]),
    row([EOD] * 17, [(number, 1, 1) for number in range(7, 24)]),
    row(range(120, 137), [(30, 17, 40)]),
    row([140, 141, 142, EOD], [(31, 4, 4)]),
]
PIECES = [
    piece(10, 11, EOD),
    piece(EOD),
    piece(*range(30, 42), then=42),
    piece(*range(42, 47), EOD),
    piece(*range(60, 70), then=70),
    piece(80, EOD),
    piece(*range(90, 103), EOD),
    *[piece(EOD)] * 16,
    piece(*range(120, 136), then=136),
    piece(140, 141, 142, EOD),
]
# Targets of the stored documents that the pieces belong to.
STORED = [2, 0, 17, 17, 19, 1, 13, *[0] * 16, 39, 3]


def lengths_of(pieces: Sequence[Piece]) -> list[int]:
    return [sum(target != NO_TARGET for target in each.targets) for each in pieces]


def weights_of(reduction: str, lengths: Sequence[int]) -> list[float]:
    """What a token of each piece weighs."""
    power = {"token": 0.0, "document": -1.0, "sqrt": -0.5}[reduction]
    return [float(n) ** power if n else 0.0 for n in lengths]


def run_weighted(flags: str, pieces: Sequence[Piece], weights: Sequence[float]) -> DocumentResult:
    """Each piece alone through the initial model; `count` is the sum of the weights."""
    import torch

    model, vocab_size = build_model(flags, double=True)
    losses, count = [], 0.0
    for each, weight in zip(pieces, weights, strict=True):
        logits = model(torch.tensor([each.inputs]), torch.arange(len(each.inputs))[None], None)
        targets = torch.tensor(each.targets)
        loss = torch.nn.functional.cross_entropy(
            logits[0, :, :vocab_size], targets, ignore_index=NO_TARGET, reduction="sum"
        )
        (weight * loss).backward()
        losses.append(loss.item())
        count += weight * int((targets != NO_TARGET).sum())
    gradient = {name: gradient_of(parameter) / count for name, parameter in named(model)}
    return DocumentResult(losses, count, gradient)  # type: ignore[arg-type]


OBJECTIVES = {
    "document": ("--loss-reduction document", "document", lengths_of(PIECES)),
    "sqrt": ("--loss-reduction sqrt", "sqrt", lengths_of(PIECES)),
    "token": ("--loss-reduction token", "token", lengths_of(PIECES)),
    "whole-document": (
        "--loss-reduction document --document-length document",
        "document",
        STORED,
    ),
    "whole-sqrt": ("--loss-reduction sqrt --document-length document", "sqrt", STORED),
}


SLOW = ("token", "whole-sqrt")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in OBJECTIVES
    ],
)
def objective(request: pytest.FixtureRequest, worker_pool: WorkerPools) -> tuple[str, Any, float]:
    """Flags, the reference, and the objective's value."""
    flags, reduction, lengths = OBJECTIVES[request.param]
    weights = weights_of(reduction, lengths)
    command = f"{FLAGS} --global-batch-size 6 --micro-batch-size 1"
    (result,) = worker_pool(1).run(run_weighted, command, PIECES, weights)
    total = math.fsum(w * loss for w, loss in zip(weights, result.losses, strict=True))
    return flags, result, total / result.count


CP = "--context-parallel-size"
LAYOUTS = [
    pytest.param(world, layout, id=layout.replace("--", "").replace(" ", "_"), marks=marks)
    for world, layout, marks in [
        (1, "--micro-batch-size 6", ()),
        (1, "--micro-batch-size 3", pytest.mark.slow),
        (1, "--micro-batch-size 1", ()),
        (1, "--micro-batch-size 6 --packing-alignment segment", pytest.mark.slow),
        (1, "--micro-batch-size 2 --packed-sequence-capacity 64", ()),
        (2, "--micro-batch-size 3", ()),
        (2, "--micro-batch-size 1 --use-distributed-optimizer", pytest.mark.slow),
        (
            2,
            "--micro-batch-size 3 --tensor-model-parallel-size 2 --sequence-parallel",
            pytest.mark.slow,
        ),
        (2, "--micro-batch-size 2 --pipeline-model-parallel-size 2", ()),
        (2, f"--micro-batch-size 3 {CP} 2 --cp-comm-type p2p", ()),
        (2, f"--micro-batch-size 6 {CP} 2 --cp-comm-type a2a", pytest.mark.slow),
        (2, f"--micro-batch-size 6 {CP} 2 --cp-comm-type striped", pytest.mark.slow),
        (2, f"--micro-batch-size 6 {CP} 2 --cp-comm-type all_gather", pytest.mark.slow),
        (2, f"--micro-batch-size 6 {CP} 2 --attention-backend magi", pytest.mark.slow),
        (4, f"--micro-batch-size 6 {CP} 4", pytest.mark.slow),
        (4, f"--micro-batch-size 3 {CP} 2 --packing-alignment segment", pytest.mark.slow),
    ]
]


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS)
def test_a_step_equals_its_documents(
    world_size: int, layout: str, objective: tuple[str, Any, float], worker_pool: WorkerPools
) -> None:
    flags, reference, value = objective
    command = f"{FLAGS} --global-batch-size 6 {flags} {layout}"
    result = run(worker_pool, world_size, command, rows=ROWS)
    assert relative_l2(result.gradient, reference.gradient) < 1e-5
    # The log keeps the mean over tokens, and has the objective beside it.
    tokens = sum(lengths_of(PIECES))
    assert result.loss_counts == [tokens]
    assert result.losses[0] == pytest.approx(math.fsum(reference.losses) / tokens, rel=2e-6)
    if "token" in flags:
        return
    (line,) = (line for line in result.log.splitlines() if "consumed samples" in line)
    shown = [field for field in line.split(" | ") if field.startswith(("lm loss", "objective"))]
    assert [field.split(": ")[0] for field in shown] == ["lm loss", "objective"]
    total, weight = result.reports[0]["objective"]
    assert total / weight == pytest.approx(value, rel=2e-6)
    assert weight == pytest.approx(reference.count, rel=1e-12)
    assert float(shown[1].split(": ")[1]) == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("reduction", ["document", pytest.param("sqrt", marks=pytest.mark.slow)])
def test_the_order_of_documents_changes_nothing(reduction: str, worker_pool: WorkerPools) -> None:
    """Rows permuted over micro-batches and replicas: another pack for every document."""
    flags = f"{FLAGS} --global-batch-size 6 --loss-reduction {reduction} --micro-batch-size 3"
    one = run(worker_pool, 1, flags, rows=ROWS)
    for order in ([5, 3, 1, 4, 2, 0], [3, 0, 5, 1, 4, 2]):
        other = run(worker_pool, 2, flags, rows=[ROWS[place] for place in order])
        assert relative_l2(other.gradient, one.gradient) < 1e-5
        assert other.reports[0]["objective"] == pytest.approx(one.reports[0]["objective"], rel=2e-6)


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(1, ""), (2, ""), (2, f"{CP} 2 --cp-comm-type a2a"), (2, "--pipeline-model-parallel-size 2")],
)
@pytest.mark.parametrize("reduction", [pytest.param("token", marks=pytest.mark.slow), "sqrt"])
def test_one_supervised_token_in_the_whole_batch(
    reduction: str, world_size: int, layout: str, worker_pool: WorkerPools
) -> None:
    """On one rank, in one micro-batch; the others contribute exact zeros."""
    rows = [sample([EOD] * 17, SEQ), sample([*[EOD] * 13, 65, EOD, EOD], SEQ)]
    flags = f"{FLAGS} --global-batch-size 2 --micro-batch-size 1"
    alone = piece(65, EOD)
    (reference,) = worker_pool(1).run(run_weighted, flags, [alone], [1.0])
    command = f"{flags} --loss-reduction {reduction} {layout}"
    result = run(worker_pool, world_size, command, rows=rows)
    assert result.loss_counts == [1.0]
    assert result.losses[0] == pytest.approx(reference.losses[0], rel=2e-6)
    assert relative_l2(result.gradient, reference.gradient) < 1e-5


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_empty_batch_is_skipped_or_an_error(world_size: int, worker_pool: WorkerPools) -> None:
    nothing = [sample([EOD] * 17, SEQ)] * 2
    flags = f"{FLAGS} --loss-reduction sqrt --global-batch-size 2 --micro-batch-size 1"
    skipped = run(worker_pool, world_size, flags, rows=nothing)
    assert skipped.updated == [False] and skipped.loss_counts == [0.0]
    with pytest.raises(TrainingError, match="iteration 1: no supervised token .* samples 0..1"):
        run(worker_pool, world_size, f"{flags} --on-empty-batch error", rows=nothing)


def test_documents_that_weigh_nothing_train_nothing(worker_pool: WorkerPools) -> None:
    """Zero weight leaves a document out; zero everywhere is an empty batch."""
    light = [each | {"document_weights": np.zeros(len(each["document_ids"]))} for each in ROWS]
    flags = f"{FLAGS} --use-document-weights --micro-batch-size 1"
    first = run(worker_pool, 1, f"{flags} --global-batch-size 2", rows=[light[0], ROWS[4]])
    alone = run(worker_pool, 1, f"{flags} --global-batch-size 1", rows=[ROWS[4]])
    assert relative_l2(first.gradient, alone.gradient) < 1e-6
    assert first.reports[0]["objective"] == pytest.approx(alone.reports[0]["objective"])
    assert first.loss_counts[0] > alone.loss_counts[0]
    empty = run(worker_pool, 1, f"{flags} --global-batch-size 6", rows=light)
    assert empty.updated == [False] and empty.loss_counts[0] > 0


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (1, "--micro-batch-size 6"),
        (2, "--micro-batch-size 1"),
        (2, f"--micro-batch-size 2 {CP} 2"),
        (2, "--micro-batch-size 2 --pipeline-model-parallel-size 2"),
    ],
)
def test_documents_of_the_highest_loss_are_written(
    world_size: int, layout: str, tmp_path: Path, worker_pool: WorkerPools
) -> None:
    file = tmp_path / "logs" / "highest.jsonl"
    flags = f"{FLAGS} --global-batch-size 6 --log-document-losses 4 --document-losses-path {file}"
    flags = f"{flags} --tensorboard-dir {tmp_path / 'tensorboard'}"
    run(worker_pool, world_size, f"{flags} {layout} --loss-by-dataset", rows=ROWS)
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    command = f"{FLAGS} --global-batch-size 6 --micro-batch-size 1"
    (reference,) = worker_pool(1).run(run_weighted, command, PIECES, [1.0] * len(PIECES))
    counts = lengths_of(PIECES)
    places = [*[(n, 0) for n in range(3)], (2, 12), (3, 0), (4, 0), (5, 0)]
    places += [*[(n, 0) for n in range(7, 23)], (30, 0), (31, 0)]
    means = {
        place: (loss / n, n)
        for place, loss, n in zip(places, reference.losses, counts, strict=True)
        if n
    }
    highest = sorted(means, key=means.__getitem__, reverse=True)[:4]
    assert [(entry["document"], entry["position"]) for entry in entries] == highest
    for entry, place in zip(entries, highest, strict=True):
        assert entry["loss"] == pytest.approx(means[place][0], rel=2e-6)
        assert entry["tokens"] == means[place][1]
        assert (entry["iteration"], entry["dataset"]) == (1, "mock")
    events = EventAccumulator(str(tmp_path / "tensorboard"), {"tensors": 0}).Reload()
    (event,) = events.Tensors("documents of highest loss/text_summary")
    shown = [
        [float(cell) for number, cell in enumerate(line.strip("| ").split(" | ")) if number != 2]
        for line in event.tensor_proto.string_val[0].decode().splitlines()[2:]
    ]
    assert shown == [
        [round(each["loss"], 6), each["tokens"], each["document"], each["position"]]
        for each in entries
    ]


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (1, "--micro-batch-size 6"),
        (2, "--micro-batch-size 1"),
        (2, f"--micro-batch-size 3 {CP} 2"),
        (2, "--micro-batch-size 2 --pipeline-model-parallel-size 2"),
    ],
)
def test_losses_of_datasets_are_those_of_their_documents(
    world_size: int, layout: str, tmp_path: Path, worker_pool: WorkerPools
) -> None:
    """Two blended corpora of different letters; which document is whose is read off its ids."""
    generator = np.random.default_rng(0)
    prefixes = [
        write_corpus(
            tmp_path / name,
            [
                [*generator.integers(first, first + 90, generator.integers(1, 30)).tolist(), EOD]
                for _ in range(40)
            ],
        )
        for name, first in (("low", 0), ("high", 100))
    ]
    flags = f"{FLAGS} --global-batch-size 6 --loss-by-dataset".replace(
        "--mock-data", f"--data-path 0.4 {prefixes[0]} 0.6 {prefixes[1]}"
    )
    one = run(worker_pool, 1, f"{flags} --micro-batch-size 6", prepare=record, inspect=recorded)
    (ranks,) = ([segment for batch in batches for segment in batch] for batches in one.extra)
    pieces = [
        Piece(tokens, tuple(NO_TARGET if each < 0 else each for each in targets))
        for tokens, targets in ranks
        # A row that begins with an EOD token shows nothing of where it is from.
        if set(tokens) != {EOD}
    ]
    (reference,) = worker_pool(1).run(
        run_weighted, f"{flags} --micro-batch-size 1", pieces, [1.0] * len(pieces)
    )
    result = run(worker_pool, world_size, f"{flags} {layout}", rows=None)
    for prefix, first in zip(prefixes, (0, 100), strict=True):
        mine = [n for n, each in enumerate(pieces) if first <= each.inputs[0] < first + 100]
        total, count = result.reports[0][f"lm loss {prefix}"]
        assert count == sum(lengths_of([pieces[n] for n in mine])) > 0
        assert total == pytest.approx(math.fsum(reference.losses[n] for n in mine), rel=2e-6)
        assert f"lm loss {prefix}: " in result.log
