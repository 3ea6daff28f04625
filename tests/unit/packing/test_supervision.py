"""A mask of target tokens goes through the plan's gathers: every depth, every rank's share."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.packed.packing import Alignment, PackedBatch, PackPlan
from megatron.packed.packing.partition import make_partition


def by_hand(
    lengths: list[int], lookahead: list[int], tokens: np.ndarray, mask: np.ndarray, depth: int
) -> list[list[tuple[int, bool]]]:
    """Label and supervision of each position of each segment, one position at a time."""
    result, at = [], 0
    for length, after in zip(lengths, lookahead, strict=True):
        document = []
        for position in range(length):
            target = position + 1 + depth
            learnt = target < length + after and mask[at + target] == 1
            document.append((int(tokens[at + target]) if learnt else 0, bool(learnt)))
        result.append(document)
        at += length + after
    return result


@pytest.mark.parametrize("seed", range(6))
def test_batches_supervise_what_the_mask_says(seed: int):
    generator = np.random.Generator(np.random.PCG64(seed))
    lengths = generator.integers(0, 12, size=6).tolist()
    lookahead = [
        int(n > 0 and generator.random() < 0.5) * int(generator.integers(1, 4)) for n in lengths
    ]
    total = sum(lengths) + sum(lookahead)
    tokens = generator.integers(1, 100, size=total)
    mask = generator.integers(0, 2, size=total).astype(np.uint8)
    alignment = Alignment(segment=4)
    plan = PackPlan.from_documents(lengths, -1, lookahead=lookahead, alignment=alignment)
    whole = PackedBatch.from_plan(plan, tokens, mtp_depths=2, supervised=mask)
    labels = [whole.labels, *whole.mtp_labels]
    masks = [whole.loss_mask, *whole.mtp_loss_masks]
    padded = plan.cu_seqlens_padded
    for depth in range(3):
        expected = by_hand(lengths, lookahead, tokens, mask, depth)
        for segment, positions in enumerate(expected):
            held = slice(padded[segment], padded[segment] + len(positions))
            found = zip(
                labels[depth][0, held].tolist(), masks[depth][0, held].bool().tolist(), strict=True
            )
            assert list(found) == positions, (depth, segment)
        counts = [sum(learnt for _, learnt in positions) for positions in expected]
        assert whole.packed_seq_params.segment_targets[depth].tolist() == counts
        assert masks[depth].sum() == sum(counts)
    assert whole.statistics.supervised_tokens == int(whole.loss_mask.sum())

    for kind in ("contiguous", "zigzag"):
        partition = make_partition(kind, plan.cu_seqlens_padded, 2)
        for rank in range(2):
            share = PackedBatch.from_plan(
                plan, tokens, mtp_depths=2, supervised=mask, partition=partition, rank=rank
            )
            index = partition.indices(rank)
            for ours, theirs in zip(
                [share.labels, share.loss_mask, *share.mtp_labels, *share.mtp_loss_masks],
                [whole.labels, whole.loss_mask, *whole.mtp_labels, *whole.mtp_loss_masks],
                strict=True,
            ):
                assert ours[0].tolist() == theirs[0, index].tolist()
            assert share.statistics == whole.statistics
            again = PackedBatch.from_buffer(share.buffer, partition=partition)
            assert again.statistics == whole.statistics


def test_a_mask_of_ones_changes_nothing():
    tokens = np.arange(1, 20)
    plan = PackPlan.from_documents([7, 5, 4], -1, lookahead=[1, 0, 2], alignment=2)
    plain = PackedBatch.from_plan(plan, tokens, mtp_depths=1)
    masked = PackedBatch.from_plan(
        plan, tokens, mtp_depths=1, supervised=np.ones(len(tokens), dtype=np.uint8)
    )
    arrays = [batch.layout.arrays(batch.buffer.numpy()) for batch in (plain, masked)]
    for name, values in arrays[0].items():
        np.testing.assert_array_equal(values, arrays[1][name], err_msg=name)
