"""Inputs and labels of multi-token prediction against plain lists, in packs and in rows."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from megatron.packed.data.bshd import BshdBatch, BshdCollator
from megatron.packed.model.mtp import DeeperTargets
from megatron.packed.packing import PackedBatch, PackPlan, build_pack_plan
from megatron.packed.packing.partition import make_partition

EOD = 99
KINDS = ("contiguous", "zigzag", "striped")


def targets_of(batch: PackedBatch | BshdBatch) -> DeeperTargets:
    return DeeperTargets.of(batch.labels, batch.mtp_labels, batch.mtp_loss_masks)


def test_known_answer() -> None:
    """Upstream's roll of [1 2 3 | 4 5], which the inputs of depth 1 must equal."""
    plan = PackPlan.from_documents([3, 2], 0)
    batch = PackedBatch.from_plan(plan, np.array([1, 2, 3, 4, 5]), mtp_depths=2)
    deeper = targets_of(batch)
    assert deeper.tokens[:, 0].tolist() == [[2, 3, 0, 5, 0], [3, 0, 0, 0, 0]]
    assert deeper.labels[:, 0].tolist() == [[3, 0, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert deeper.loss_masks[:, 0].tolist() == [[1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]


def test_the_roll_ignores_where_padding_is() -> None:
    """Aligned boundaries move documents; their targets stay their own."""
    plan = PackPlan.from_documents([3, 2], 0, alignment=4)
    deeper = targets_of(PackedBatch.from_plan(plan, np.arange(1, 6), mtp_depths=1))
    assert deeper.tokens[0, 0].tolist() == [2, 3, 0, 0, 5, 0, 0, 0]
    assert deeper.labels[0, 0].tolist() == [3, 0, 0, 0, 0, 0, 0, 0]


def by_hand(
    documents: list[list[int]], held: list[int], depth: int
) -> list[tuple[int, list[int], list[int], list[bool]]]:
    """(length, inputs, labels, supervised) of each document at a depth.

    Args:
        documents: tokens that the data has of each.
        held: how many of them are inputs.
        depth: from 1 on.
    """
    result = []
    for tokens, length in zip(documents, held, strict=True):
        padded = [*tokens, *[0] * (depth + 2 + length)]
        there = [place + depth < len(tokens) for place in range(length)]
        labels = [place + 1 + depth < len(tokens) for place in range(length)]
        result.append(
            (
                length,
                [padded[p + depth] if there[p] else 0 for p in range(length)],
                [padded[p + depth + 1] if labels[p] else 0 for p in range(length)],
                labels,
            )
        )
    return result


@pytest.mark.parametrize("seed", range(12))
def test_random_packs(seed: int) -> None:
    draw = random.Random(seed)
    depths, cp = draw.randint(1, 4), draw.choice([1, 2, 4])
    kind = draw.choice(KINDS)
    held = [draw.choice([0, 1, 2, 3, draw.randint(1, 30)]) for _ in range(draw.randint(1, 9))]
    more = [draw.randint(0, depths + 1) if length else 0 for length in held]
    token = iter(range(1, 1000))
    documents = [[next(token) for _ in range(a + b)] for a, b in zip(held, more, strict=True)]
    flat = np.array([x for document in documents for x in document], dtype=np.int64)
    plan = PackPlan.from_documents(held, 0, lookahead=more, alignment=2 * cp)
    starts = plan.cu_seqlens_padded

    partition = make_partition(kind, starts, cp) if cp > 1 else None
    for rank in range(cp):
        batch = PackedBatch.from_plan(plan, flat, mtp_depths=depths, partition=partition, rank=rank)
        deeper = targets_of(batch)
        place = slice(None) if partition is None else partition.indices(rank)
        for depth in range(1, depths + 1):
            tokens, labels = (np.zeros(plan.total_tokens, np.int64) for _ in range(2))
            wanted = np.zeros(plan.total_tokens, bool)
            for start, (length, inputs, target, supervised) in zip(
                starts, by_hand(documents, held, depth), strict=False
            ):
                tokens[start : start + length] = inputs
                labels[start : start + length] = target
                wanted[start : start + length] = supervised
            assert deeper.tokens[depth - 1, 0].tolist() == tokens[place].tolist()
            assert deeper.labels[depth - 1, 0].tolist() == labels[place].tolist()
            assert deeper.loss_masks[depth - 1, 0].tolist() == wanted[place].tolist()
        counts = [sum(sum(x[3]) for x in by_hand(documents, held, d)) for d in range(depths + 1)]
        assert batch.packed_seq_params.segment_targets.sum(axis=1).tolist() == counts


@pytest.mark.parametrize("eod_mask_loss", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_random_rows(seed: int, eod_mask_loss: bool) -> None:
    """Rows see their next tokens; no prediction crosses an EOD that may not be predicted from."""
    draw = random.Random(seed)
    width, depths = draw.randint(2, 12), draw.randint(1, 4)
    rows = [[draw.choice([EOD, *range(1, 5)]) for _ in range(width + 1)] for _ in range(3)]
    real = [width + 1, draw.randint(0, width), width]
    samples = [
        {"text": np.array(row), "length": length} for row, length in zip(rows, real, strict=True)
    ]
    collate = BshdCollator(EOD, eod_mask_loss=eod_mask_loss, mtp_depths=depths)
    batch = collate(samples)
    batch = BshdBatch.from_buffer(batch.buffer.clone())
    deeper = targets_of(batch)
    assert deeper.tokens.shape == (depths, 3, width)
    found = [0] * depths
    for number, (row, length) in enumerate(zip(rows, real, strict=True)):
        for depth in range(1, depths + 1):
            for place in range(width):
                ahead = row[place + depth] if place + depth <= width else 0
                target = row[place + depth + 1] if place + depth < width else 0
                assert deeper.tokens[depth - 1, number, place] == ahead
                assert deeper.labels[depth - 1, number, place] == target
                crossed = EOD in row[place : place + depth + 1]
                wanted = place + depth + 1 < min(length, width + 1)
                wanted = wanted and not (eod_mask_loss and crossed)
                assert bool(deeper.loss_masks[depth - 1, number, place]) == wanted
                found[depth - 1] += wanted
    assert batch.mtp_targets == tuple(found)


def test_packed_rows_and_rows_of_blocks_have_the_same_targets() -> None:
    draw = np.random.default_rng(0)
    rows = draw.integers(1, 20, (4, 25))
    rows[draw.random(rows.shape) < 0.2] = EOD
    packed = PackedBatch.from_plan(
        build_pack_plan(rows[:, :-1], EOD, -1, extra_token=rows[:, -1]), rows, mtp_depths=3
    )
    collate = BshdCollator(EOD, True, True, True, mtp_depths=3)
    unpacked = collate([{"text": row, "length": 25} for row in rows])
    for depth in range(3):
        mask = packed.mtp_loss_masks[depth, 0]
        assert torch.equal(mask, unpacked.mtp_loss_masks[depth].reshape(-1))
        ours, theirs = packed.mtp_labels[depth, 0], unpacked.mtp_labels[depth].reshape(-1)
        assert torch.equal(ours[mask != 0], theirs[mask != 0])
