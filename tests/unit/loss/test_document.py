"""Losses of documents against plain Python sums, on hand-made packs and random ones."""

from __future__ import annotations

import math
import random
from collections import defaultdict

import numpy as np
import pytest
import torch

from megatron.packed.errors import DataError
from megatron.packed.loss.calculation import OBJECTIVE, LossCalculationHelper
from megatron.packed.loss.document import (
    PackedDocLevelParams,
    document_loss,
    document_sums,
    token_weights,
    update_packed_doc_level_params,
)
from megatron.packed.packing import PackedBatch, PackPlan
from megatron.packed.packing.partition import make_partition
from megatron.packed.packing.records import SegmentRecords

REDUCTIONS = ("token", "document", "sqrt")
NAN = float("nan")


def make_pack(
    lengths: list[int],
    continues: list[int],
    *,
    cp: int = 1,
    rank: int = 0,
    alignment: int = 1,
    segments: SegmentRecords | None = None,
) -> PackedBatch:
    """Pieces of documents; `continues` says whether the token after a piece is in the data."""
    plan = PackPlan.from_documents(lengths, 0, lookahead=continues, alignment=alignment * 2 * cp)
    partition = None
    if cp > 1:
        partition = make_partition("zigzag", plan.cu_seqlens_padded, cp)
    tokens = np.arange(sum(lengths) + sum(continues))
    return PackedBatch.from_plan(plan, tokens, partition=partition, rank=rank, segments=segments)


def records(targets: list[int], weights: list[float]) -> SegmentRecords:
    count = len(targets)
    zeros = np.zeros(count, np.int64)
    return SegmentRecords(zeros, np.arange(count), zeros, np.array(targets), np.array(weights))


def random_losses(batch: PackedBatch, seed: int = 0) -> torch.Tensor:
    """A loss that depends on the token alone, so that every rank gives it the same; else NaN."""
    noise = torch.rand(4096, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    losses = noise[batch.tokens[0]][None]
    return torch.where(batch.loss_mask != 0, losses, NAN).requires_grad_()


def plain_objective(
    documents: list[list[float]], reduction: str, weights: list[float]
) -> tuple[float, float]:
    """(sum, weight) as the formulas of the documentation read; no weighting of tokens."""
    total = count = 0.0
    for losses, weight in zip(documents, weights, strict=True):
        n = len(losses)
        if n == 0:
            continue
        match reduction:
            case "token":
                total, count = total + weight * math.fsum(losses), count + weight * n
            case "document":
                total, count = total + weight * (math.fsum(losses) / n), count + weight
            case "sqrt":
                total += weight * math.fsum(losses) / math.sqrt(n)
                count += weight * math.sqrt(n)
    return total, count


def losses_by_document(batch: PackedBatch, losses: torch.Tensor, count: int) -> list[list[float]]:
    found: dict[int, list[float]] = defaultdict(list)
    ids, mask = batch.document_ids[0].tolist(), batch.loss_mask[0].tolist()
    for place, (document, wanted) in enumerate(zip(ids, mask, strict=True)):
        if wanted:
            found[document].append(losses[0, place].item())
    return [found[number] for number in range(count)]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("seed", range(6))
def test_random_packs_equal_plain_sums(reduction: str, seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(1, 12)
    lengths = [draw.choice([0, 1, 1, 2, 3, draw.randint(1, 40)]) for _ in range(count)]
    continues = [draw.randint(0, 1) if length else 0 for length in lengths]
    weights = [draw.choice([1.0, 0.0, 2.5]) for _ in range(count)]
    known = records([0] * count, weights)

    whole = make_pack(lengths, continues, segments=known)
    wanted = losses_by_document(whole, random_losses(whole), count)
    total, weight = plain_objective(wanted, reduction, weights)

    for cp in (1, 2, 4):
        sums, weighed = torch.zeros(count, dtype=torch.float64), []
        for rank in range(cp):
            batch = make_pack(lengths, continues, cp=cp, rank=rank, segments=known)
            update_packed_doc_level_params(batch, reduction=reduction)
            params = PackedDocLevelParams.of(batch.packed_seq_params)
            losses = random_losses(batch)
            sums += document_sums(losses, batch.loss_mask, params).detach()
            result = document_loss(losses, batch.loss_mask, params)
            weighed.append(result.item())
            assert params.total_weight == pytest.approx(weight, rel=1e-12)
            (gradient,) = torch.autograd.grad(result, losses)
            expected = params.weights[batch.document_ids.long().clamp(min=0)]
            expected = torch.where(batch.loss_mask != 0, expected, 0.0)
            assert torch.equal(gradient, expected)
        assert sums.tolist() == pytest.approx([math.fsum(x) for x in wanted], rel=1e-12)
        assert math.fsum(weighed) == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("token", [1, 1, 0]), ("document", [1 / 4, 1, 0]), ("sqrt", [1 / 2, 1, 0])],
)
def test_weights_by_hand(reduction: str, expected: list[float]) -> None:
    assert token_weights(np.array([4, 1, 0]), reduction).tolist() == expected


@pytest.mark.parametrize("reduction", ["document", "sqrt"])
def test_a_document_over_two_packs_keeps_one_weight(reduction: str) -> None:
    """7 tokens with 6 targets: 4 in one pack, whose last goes on, and 2 of 3 in the next."""
    pieces = [make_pack([n], [k], segments=records([6], [1.0])) for n, k in ((4, 1), (3, 0))]
    total = weight = 0.0
    losses: list[float] = []
    for batch in pieces:
        update_packed_doc_level_params(batch, reduction=reduction, document_length="document")
        params = PackedDocLevelParams.of(batch.packed_seq_params)
        here = random_losses(batch)
        losses += losses_by_document(batch, here, 1)[0]
        total += document_loss(here, batch.loss_mask, params).item()
        weight += params.total_weight
    assert len(losses) == 6
    assert (total, weight) == pytest.approx(plain_objective([losses], reduction, [1.0]), rel=1e-12)


def test_lengths_of_stored_documents_must_be_known() -> None:
    batch = make_pack([3, 5], [0, 0])
    with pytest.raises(DataError, match="--document-length document: segment 0 .*-1: unknown"):
        update_packed_doc_level_params(batch, reduction="sqrt", document_length="document")


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_one_supervised_token_of_all(reduction: str) -> None:
    """A document of two tokens among those of one: its mean, whatever the reduction."""
    batch = make_pack([1, 2, 1, 0], [0] * 4)
    update_packed_doc_level_params(batch, reduction=reduction)
    params = PackedDocLevelParams.of(batch.packed_seq_params)
    losses = torch.full(batch.tokens.shape, NAN, dtype=torch.float64)
    losses[batch.loss_mask != 0] = 3.5
    losses.requires_grad_()
    loss = document_loss(losses, batch.loss_mask, params)
    loss.backward()
    assert (loss.item(), params.total_weight) == (3.5, 1.0)
    assert losses.grad.tolist() == batch.loss_mask.tolist()
    assert losses.grad.sum() == 1


def test_a_pack_without_a_target_weighs_nothing() -> None:
    batch = make_pack([1, 1], [0, 0])
    update_packed_doc_level_params(batch, reduction="document")
    params = PackedDocLevelParams.of(batch.packed_seq_params)
    losses = torch.full(batch.tokens.shape, NAN, dtype=torch.float64, requires_grad=True)
    loss = document_loss(losses, batch.loss_mask, params)
    loss.backward()
    assert (loss.item(), params.total_weight) == (0.0, 0.0)
    assert not losses.grad.any()


def test_the_door_reports_the_token_mean_whatever_the_objective() -> None:
    lengths, continues = [5, 2, 9], [0, 0, 1]
    batch = make_pack(lengths, continues)
    update_packed_doc_level_params(batch, reduction="document")
    losses = random_losses(batch)
    door = LossCalculationHelper(weighted=True, keep_document_sums=True)
    assert door.report_names == ("lm loss", OBJECTIVE)
    scale = torch.tensor(14 / 3, dtype=torch.float64)
    result = door.compute_loss(losses, batch.packed_seq_params, batch.loss_mask, scale)
    by_document = losses_by_document(batch, losses, 3)
    flat = [loss for document in by_document for loss in document]
    assert result.reports["lm loss"].tolist() == pytest.approx([sum(flat), 14.0], rel=1e-12)
    means = [sum(x) / len(x) for x in by_document]
    assert result.reports[OBJECTIVE].tolist() == pytest.approx([sum(means), 3.0], rel=1e-12)
    assert result.total.item() == pytest.approx(14 / 3 * sum(means), rel=1e-12)
    assert result.count.item() == 14 and result.count.dtype == torch.int32
    assert result.document_sums.tolist() == pytest.approx([sum(x) for x in by_document], rel=1e-12)


@pytest.mark.parametrize("cp", [1, 2])
def test_losses_of_datasets(cp: int) -> None:
    known = records([0] * 4, [1.0] * 4)
    known.datasets[:] = [1, 0, 1, -1]
    door = LossCalculationHelper(datasets=("a", "b"))
    total: dict[str, list[float]] = {"lm loss a": [0, 0], "lm loss b": [0, 0]}
    for rank in range(cp):
        batch = make_pack([4, 3, 2, 5], [0] * 4, cp=cp, rank=rank, segments=known)
        result = door.compute_loss(random_losses(batch), batch.packed_seq_params, batch.loss_mask)
        for name, pair in total.items():
            total[name] = [x + y for x, y in zip(pair, result.reports[name].tolist(), strict=True)]
    whole = make_pack([4, 3, 2, 5], [0] * 4)
    by_document = losses_by_document(whole, random_losses(whole), 4)
    assert total["lm loss a"] == pytest.approx([sum(by_document[1]), 2])
    assert total["lm loss b"] == pytest.approx([sum(by_document[0]) + sum(by_document[2]), 4])
