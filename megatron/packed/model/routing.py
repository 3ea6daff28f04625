"""The arithmetic of routing: which tokens an expert keeps, and the losses that balance experts.

Sums run over a micro-batch's tokens; padding takes no part. A micro-batch is spread over tensor-
and context-parallel ranks: `group` reduces what all of them must know, and each rank returns its
own tokens' share of a loss, so that shares add up to the loss of the whole micro-batch whatever
the layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.packed.model.token_slots import TokenSlots

_ALIKE = 2.0**-16  # probabilities closer than this count as equal where tokens are dropped


@dataclass(frozen=True)
class LossShare:
    """This rank's part of a loss over the tokens of a micro-batch.

    Attributes:
        weighted: the loss times the tokens that it is the mean over; differentiable.
        tokens: those tokens, over all ranks of the group.
    """

    weighted: Tensor
    tokens: Tensor

    @property
    def mean(self) -> Tensor:
        """The share of the mean; 0 where no rank holds a token."""
        return self.weighted / self.tokens.clamp(min=1)


def reduced(x: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp = dist.ReduceOp.SUM) -> Tensor:
    """`x` over all ranks of a group, without a gradient."""
    x = x.detach().clone()
    if group.size() > 1:
        dist.all_reduce(x, op, group=group)
    return x


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All ranks' rows of equally shaped tensors, in order of rank, without a gradient."""
    if group.size() == 1:
        return x.detach()
    kind = torch.uint8 if x.dtype == torch.bool else x.dtype
    mine = x.detach().to(kind).contiguous()
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine, group=group)
    return torch.cat(parts).to(x.dtype)


def own_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's rows of what `gathered` returned."""
    return x.chunk(group.size())[group.rank()]


def within_capacity(
    probs: Tensor, chosen: Tensor, order: Tensor, *, topk: int, factor: float, by_position: bool
) -> Tensor:
    """Which choices an expert serves when it takes only so many tokens of a micro-batch.

    Of tokens that are equally probable, the first ones stay. Equal they often are, at the start
    of documents, but for rounding that depends on the layout: it must not decide.

    Args:
        probs: [T, E], weights of the chosen experts.
        chosen: bool [T, E].
        order: int64 [T], where each token stands; -1 without a token, which counts for nothing.
        topk: experts of a token.
        factor: capacity over an even share of all choices.
        by_position: keep the first tokens; else the most probable ones.

    Returns:
        bool [T, E], a part of `chosen`.

    Source: GShard (https://arxiv.org/abs/2006.16668);
    ``megatron/core/transformer/moe/moe_utils.py`` (0.16.1), `apply_router_token_dropping`
    """
    tokens, experts = chosen.shape
    share = (order >= 0).sum().double() * topk / experts
    capacity = torch.ceil(share * factor)
    first = order.argsort(stable=True)
    keys = probs.new_zeros(1, 1) if by_position else (probs.detach() / _ALIKE).round()
    keys = torch.where(chosen, keys, -math.inf)[first]
    best = keys.argsort(dim=0, descending=True, stable=True)
    rank = torch.empty_like(best).scatter_(
        0, best, torch.arange(tokens, device=best.device)[:, None].expand(tokens, experts)
    )
    kept = torch.empty_like(chosen)
    kept[first] = rank < capacity
    return kept & chosen


def sinkhorn_assignment(logits: Tensor, topk: int, tolerance: float = 1e-4) -> Tensor:
    """The experts of each token when all experts must get equal shares.

    Args:
        logits: [T, E], of tokens only.
        topk: experts of a token.
        tolerance: mean change of the column factors at which the iteration ends.

    Returns:
        int64 [T, topk].

    Source: BASE layers (https://arxiv.org/abs/2103.16716); megatron-core's `sinkhorn`, here in
    fp64, so that the choice doesn't depend on the order of tokens.
    """
    cost = torch.exp(logits.double())
    rows, columns = cost.shape
    column = torch.ones(columns, dtype=torch.double, device=cost.device)
    row = torch.ones(rows, dtype=torch.double, device=cost.device)
    error = math.inf
    while rows and error > tolerance:
        row = 1 / (rows * ((cost * column).sum(1) + 1e-8))
        updated = 1 / (columns * ((cost * row[:, None]).sum(0) + 1e-8))
        error = float((updated - column).abs().mean())
        column = updated
    return (cost * column * row[:, None]).topk(topk, dim=1).indices


def balancing_scores(
    logits: Tensor, slots: TokenSlots, topk: int, score: str
) -> tuple[Tensor, Tensor]:
    """Normalised scores and choices that the balancing losses look at.

    Groups, biases and capacities take no part, as in megatron-core.

    Args:
        logits: [T, E].
        slots: of the tokens.
        topk: experts of a token.
        score: `softmax` or `sigmoid`.

    Returns:
        scores [T, E], differentiable, and choices bool [T, E]; zero where there is no token.
    """
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if score == "softmax":
        scores = torch.softmax(logits, dim=-1, dtype=wide)
    else:
        scores = torch.sigmoid(logits)
        scores = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
    indices = scores.detach().topk(topk, dim=1).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, indices, True)
    valid = slots.valid[:, None]
    return torch.where(valid, scores, 0.0), chosen & valid


def balancing_loss(
    scores: Tensor, chosen: Tensor, sequence: Tensor, sequences: int, group: dist.ProcessGroup
) -> LossShare:
    """Load-balancing loss of every sequence, its tokens' shares weighted by the tokens.

    For one sequence of T tokens, of which c_i chose expert i: E Σ_i c_i / (K T) · Σ_t s_ti / T.

    Args:
        scores: [T, E], zero where there is no token.
        chosen: bool [T, E], K experts for each token.
        sequence: int64 [T], which sequence; anything where there is no token.
        sequences: how many there are, the same number on all ranks of the group.
        group: ranks that share the sequences.

    Source: Switch Transformer (https://arxiv.org/abs/2101.03961), DeepSeek-V2
    (https://arxiv.org/abs/2405.04434) for one loss a sequence.
    """
    experts = scores.shape[1]
    sequence = sequence.clamp(min=0)
    counts = torch.zeros(sequences, experts, dtype=scores.dtype, device=scores.device)
    held = torch.zeros(sequences, 1, dtype=scores.dtype, device=scores.device)
    counts.index_add_(0, sequence, chosen.to(scores.dtype))
    held.index_add_(0, sequence, chosen.any(dim=1, keepdim=True).to(scores.dtype))
    both = reduced(torch.cat((counts, held), dim=1), group)
    return _weigh(scores, sequence, both[:, :-1], both[:, -1:])


def _weigh(scores: Tensor, sequence: Tensor, counts: Tensor, tokens: Tensor) -> LossShare:
    """Shares Σ_i f_i s_ti with f_i = E c_i / Σ c; they sum to Σ_sequences T · loss."""
    choices = counts.sum(dim=1, keepdim=True).clamp(min=1)
    fractions = counts * (counts.shape[1] / choices)
    return LossShare((scores * fractions[sequence]).sum(), tokens.sum())


def global_balancing_loss(
    scores: Tensor, chosen: Tensor, running: Tensor, group: dist.ProcessGroup
) -> LossShare:
    """Load-balancing loss whose choices are counted over the global batch as far as it has come.

    Args:
        scores: [T, E], zero where there is no token.
        chosen: bool [T, E].
        running: [E], choices of this step's earlier micro-batches on all ranks; those of this one
            are added.
        group: all ranks that hold tokens.

    Source: Demons in the detail (https://arxiv.org/abs/2501.11873).
    """
    held = chosen.any(dim=1).sum().reshape(1).to(scores.dtype)
    both = reduced(torch.cat((chosen.sum(dim=0).to(scores.dtype), held)), group)
    running += both[:-1]
    sequence = torch.zeros(scores.shape[0], dtype=torch.int64, device=scores.device)
    return _weigh(scores, sequence, running[None].clone(), both[-1:])


def z_loss(logits: Tensor, slots: TokenSlots, group: dist.ProcessGroup) -> LossShare:
    """Mean of the squared log-partition of router logits.

    Args:
        logits: [T, E].
        slots: of the tokens.
        group: ranks that share the micro-batch.

    Source: ST-MoE (https://arxiv.org/abs/2202.08906).
    """
    values = torch.logsumexp(logits, dim=-1).square()
    total = torch.where(slots.valid, values, 0.0).sum()
    return LossShare(total, reduced(slots.valid.sum(), group))
