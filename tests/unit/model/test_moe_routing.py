"""The arithmetic of routing against plain Python, token by token."""

from __future__ import annotations

import math

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import sinkhorn as upstream_sinkhorn
from torch import Tensor

from megatron.packed.model import routing
from megatron.packed.model.token_slots import TokenSlots, encode_slots, pack_slots, row_slots

TOKENS, EXPERTS, TOPK = 13, 5, 2


class OneRank:
    """A process group of this process alone."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


GROUP = OneRank()


def _case(seed: int = 0) -> tuple[Tensor, TokenSlots]:
    """Logits of a few documents with padding between them, in shuffled order of slots."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(TOKENS, EXPERTS, generator=generator, dtype=torch.float64)
    documents = torch.tensor([[0, 0, 0, -1, 1, 2, 2, 2, 2, -1, -1, 2, 3]])
    positions = torch.tensor([[2, 0, 1, 7, 0, 3, 1, 0, 2, 0, 0, 4, 0]])
    codes = pack_slots(documents, positions, torch.tensor([0, 4, 6, 11, 12]))
    return logits, TokenSlots.decode(codes)


# --- slots ----------------------------------------------------------------------------------------


def test_codes_of_a_pack() -> None:
    _, slots = _case()
    assert slots.valid.tolist() == [d >= 0 for d in (0, 0, 0, -1, 1, 2, 2, 2, 2, -1, -1, 2, 3)]
    assert slots.sequence.tolist() == [0, 0, 0, -1, 1, 2, 2, 2, 2, -1, -1, 2, 3]
    assert slots.order.tolist() == [2, 0, 1, -1, 4, 9, 7, 6, 8, -1, -1, 10, 11]


def test_codes_of_rows_follow_hidden_states() -> None:
    """Hidden states are [S, B]: tokens of all rows at one place come together."""
    valid = torch.tensor([[True, True, True], [True, True, False]])
    slots = TokenSlots.decode(row_slots(valid))
    assert slots.valid.tolist() == [True, True, True, True, True, False]
    assert slots.sequence.tolist() == [0, 1, 0, 1, 0, -1]
    assert slots.order.tolist() == [0, 1, 2, 3, 4, -1]
    placed = TokenSlots.decode(row_slots(valid, torch.tensor([[5, 0, 3], [1, 2, 4]])))
    assert placed.order.tolist() == [10, 3, 0, 5, 6, -1]
    everything = TokenSlots.whole(2, 3, torch.device("cpu"))
    assert everything.valid.all() and everything.sequence.tolist() == [0, 1] * 3


def test_large_numbers_keep_apart() -> None:
    valid = torch.ones(1, 2, dtype=torch.bool)
    big = torch.tensor([[(1 << 31) - 1, 0]])
    slots = TokenSlots.decode(encode_slots(valid, big, big.flip(1)))
    assert slots.sequence.tolist() == [(1 << 31) - 1, 0]
    assert slots.order.tolist() == [0, (1 << 31) - 1]


# --- capacity -------------------------------------------------------------------------------------


def _served(probs: Tensor, chosen: Tensor, order: Tensor, factor: float, first: bool) -> Tensor:
    """Each expert takes its tokens one at a time until it is full."""
    tokens = [t for t in range(len(order)) if order[t] >= 0]
    capacity = math.ceil(len(tokens) * TOPK / EXPERTS * factor)
    served = torch.zeros_like(chosen)
    for expert in range(EXPERTS):
        wanting = [t for t in tokens if chosen[t, expert]]
        if first:
            wanting.sort(key=lambda t: int(order[t]))
        else:
            wanting.sort(key=lambda t: (-float(probs[t, expert]), int(order[t])))
        for token in wanting[:capacity]:
            served[token, expert] = True
    return served


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("factor", [0.3, 0.7, 1.0, 4.0])
@pytest.mark.parametrize("seed", range(4))
def test_capacity_equals_taking_tokens_one_by_one(first: bool, factor: float, seed: int) -> None:
    logits, slots = _case(seed)
    probs, chosen = routing.balancing_scores(logits, slots, TOPK, "softmax")
    probs = probs.mul(4).round().div(4)  # equal ones: the earlier token comes first
    kept = routing.within_capacity(
        probs, chosen, slots.order, topk=TOPK, factor=factor, by_position=first
    )
    assert torch.equal(kept, _served(probs, chosen, slots.order, factor, first))
    assert factor < 4.0 or torch.equal(kept, chosen)


def test_capacity_of_a_pack_does_not_depend_on_its_padding() -> None:
    logits, slots = _case()
    kept = []
    for each in (slots, _without_padding(slots)):
        of = logits[: len(each.valid)] if each is slots else logits[slots.valid]
        probs, chosen = routing.balancing_scores(of, each, TOPK, "softmax")
        kept.append(
            routing.within_capacity(
                probs, chosen, each.order, topk=TOPK, factor=0.7, by_position=False
            )
        )
    assert torch.equal(kept[0][slots.valid], kept[1])
    assert not kept[0][~slots.valid].any()


def _without_padding(slots: TokenSlots) -> TokenSlots:
    keep = slots.valid
    return TokenSlots(keep[keep], slots.sequence[keep], slots.order[keep])


# --- losses ---------------------------------------------------------------------------------------


def _scores(row: list[float], score: str) -> list[float]:
    weights = [math.exp(x) if score == "softmax" else 1 / (1 + math.exp(-x)) for x in row]
    return [w / sum(weights) for w in weights]


def _loss_of(tokens: list[list[float]]) -> float:
    """E Σ_i (share of choices) (mean score), as the papers write it."""
    if not tokens:
        return 0.0
    counts, sums = [0] * EXPERTS, [0.0] * EXPERTS
    for scores in tokens:
        for best in sorted(range(EXPERTS), key=lambda i: -scores[i])[:TOPK]:
            counts[best] += 1
        sums = [a + b for a, b in zip(sums, scores, strict=True)]
    length = len(tokens)
    return EXPERTS * sum(
        c / (TOPK * length) * s / length for c, s in zip(counts, sums, strict=True)
    )


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("each_sequence", [False, True])
def test_balancing_loss_equals_the_papers(score: str, each_sequence: bool) -> None:
    logits, slots = _case()
    scores, chosen = routing.balancing_scores(logits, slots, TOPK, score)
    sequence = slots.sequence if each_sequence else torch.zeros_like(slots.sequence)
    share = routing.balancing_loss(scores, chosen, sequence, 5, GROUP)
    groups: dict[int, list[list[float]]] = {}
    for token in range(TOKENS):
        if slots.valid[token]:
            row = _scores(logits[token].tolist(), score)
            groups.setdefault(int(sequence[token]), []).append(row)
    expected = sum(len(rows) * _loss_of(rows) for rows in groups.values())
    assert float(share.weighted) == pytest.approx(expected, rel=1e-12)
    assert int(share.tokens) == int(slots.valid.sum())
    assert float(share.mean) == pytest.approx(expected / int(slots.valid.sum()), rel=1e-12)


def test_a_balanced_choice_has_loss_one() -> None:
    logits = torch.eye(EXPERTS, dtype=torch.float64) * 3
    slots = TokenSlots.whole(1, EXPERTS, logits.device)
    scores, chosen = routing.balancing_scores(logits, slots, 1, "softmax")
    share = routing.balancing_loss(scores, chosen, slots.sequence, 1, GROUP)
    assert float(share.mean) == pytest.approx(1.0, rel=1e-12)


def test_gradient_of_the_balancing_loss() -> None:
    """Only scores carry it: choices are counted."""
    logits, slots = _case()
    logits.requires_grad_()
    scores, chosen = routing.balancing_scores(logits, slots, TOPK, "softmax")
    share = routing.balancing_loss(scores, chosen, slots.sequence, 4, GROUP)
    (gradient,) = torch.autograd.grad(share.weighted, logits)
    step, at = 1e-6, (5, 2)
    moved = logits.detach().clone()
    moved[at] += step
    higher = routing.balancing_loss(
        routing.balancing_scores(moved, slots, TOPK, "softmax")[0], chosen, slots.sequence, 4, GROUP
    )
    difference = float((higher.weighted - share.weighted).detach()) / step
    assert float(gradient[at]) == pytest.approx(difference, rel=1e-4)
    assert not gradient[~slots.valid].any()


def test_z_loss_is_the_mean_over_tokens() -> None:
    logits, slots = _case()
    share = routing.z_loss(logits, slots, GROUP)
    values = [
        math.log(sum(math.exp(x) for x in logits[t].tolist())) ** 2
        for t in range(TOKENS)
        if slots.valid[t]
    ]
    assert float(share.weighted) == pytest.approx(sum(values), rel=1e-12)
    assert float(share.mean) == pytest.approx(sum(values) / len(values), rel=1e-12)


def test_nothing_but_padding_has_no_loss() -> None:
    logits, _ = _case()
    slots = TokenSlots.decode(torch.full((1, TOKENS), -1))
    logits = torch.full_like(logits, math.nan)  # whatever stands there
    scores, chosen = routing.balancing_scores(logits, slots, TOPK, "softmax")
    for share in (
        routing.balancing_loss(scores, chosen, slots.sequence, 1, GROUP),
        routing.z_loss(logits, slots, GROUP),
        routing.global_balancing_loss(scores, chosen, torch.zeros(EXPERTS), GROUP),
    ):
        assert float(share.weighted) == float(share.mean) == 0.0


def test_global_loss_counts_choices_of_the_batch_so_far() -> None:
    running = torch.zeros(EXPERTS, dtype=torch.float64)
    total, tokens = [0.0] * EXPERTS, 0
    for seed in range(3):
        logits, slots = _case(seed)
        if seed == 1:  # micro-batches of different lengths
            slots = TokenSlots(slots.valid & (slots.sequence < 2), slots.sequence, slots.order)
        scores, chosen = routing.balancing_scores(logits, slots, TOPK, "softmax")
        share = routing.global_balancing_loss(scores, chosen, running, GROUP)
        held = int(slots.valid.sum())
        tokens += held
        total = [a + float(b) for a, b in zip(total, chosen.sum(0), strict=True)]
        expected = EXPERTS * sum(
            t / (TOPK * tokens) * float(s) / held for t, s in zip(total, scores.sum(0), strict=True)
        )
        assert float(share.mean) == pytest.approx(expected, rel=1e-12)


# --- sinkhorn -------------------------------------------------------------------------------------


def test_sinkhorn_chooses_as_upstream_and_evenly() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(400, 4, generator=generator) + torch.tensor([3.0, 0.0, 0.0, -2.0])
    ours = routing.sinkhorn_assignment(logits, 1)
    theirs = upstream_sinkhorn(logits.double()).topk(1, dim=1).indices
    assert torch.equal(ours, theirs)
    greedy = torch.bincount(logits.argmax(1), minlength=4)
    even = torch.bincount(ours.flatten(), minlength=4)
    assert greedy.max() > 300 and even.max() < 130
    order = torch.randperm(400, generator=generator)
    assert torch.equal(routing.sinkhorn_assignment(logits[order], 1), ours[order])
    assert routing.sinkhorn_assignment(logits[:0], 1).shape == (0, 1)
