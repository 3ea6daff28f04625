"""Sinks: a key of value 0 beside those of the segment, whose score is 0 or learned by each head.

It only takes weight away from the others, so it can be added when all parts of a row are merged:
`O' = O exp(lse - lse')` with `lse' = log(exp lse + exp sink)`.

Source: Attention Is Off By One (Miller 2023); gpt-oss; `softmax_type` of megatron-core (0.16.1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.packed.attention.head_exchange import head_slices
from megatron.packed.attention.plans.plan import AttentionPlan


def heads_in_steps(plan: AttentionPlan, heads: int) -> slice:
    """Query heads that this rank computes while the steps run."""
    exchange = plan.head_exchange
    if exchange is None:
        return slice(0, heads)
    return head_slices(heads, exchange.size)[exchange.place]


def add_sink(out: Tensor, lse: Tensor, sink: Tensor) -> None:
    """Let every row see one more key, of score `sink` `[heads]` and value 0, in place.

    The rows' kernels need not know: their backward pass goes by the log-sum-exp and the output,
    and with these two the gradients of queries, keys and values are right as they are.
    """
    total = torch.logaddexp(lse, sink.to(lse.dtype))
    # -inf - -inf is NaN: a row that sees nothing at all keeps its zeros.
    weight = torch.where(total == -torch.inf, 0.0, torch.exp(lse - total))
    out.mul_(weight.unsqueeze(-1))
    lse.copy_(total)


def sink_gradient(
    plan: AttentionPlan, grad: Tensor, out: Tensor, lse: Tensor, sink: Tensor | None
) -> list[Tensor]:
    """Gradient `[heads]` of the sinks, zero for heads of other ranks; nothing without sinks.

    A sink's weight is `p = exp(sink - lse)`, its value 0: `d sink = p (0 - grad . out)`.

    Args:
        plan: this rank's.
        grad: `[rows, heads, dv]`, gradient of the output while the steps run.
        out: `[rows, heads, dv]`, that output.
        lse: `[rows, heads]`, its log-sum-exp, the sink included.
        sink: `[heads of the rank before a head exchange]`.
    """
    if sink is None:
        return []
    heads = heads_in_steps(plan, len(sink))
    weight = torch.exp(sink[heads].to(lse.dtype) - lse)
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(dim=-1)
    # Padding has no output; what its gradient holds must not matter.
    parts = torch.where((out != 0).any(dim=-1), weight * delta, 0.0)
    total = torch.zeros(len(sink), dtype=lse.dtype, device=lse.device)
    total[heads] = -parts.sum(dim=0)
    return [total.to(sink.dtype)]
