"""All ranks of a plan in one process, differentiable: for tests, simulations and debugging."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.packed.attention.executor import backward_task, check_inputs, forward_task
from megatron.packed.attention.in_process import InProcessNetwork
from megatron.packed.attention.plans.plan import AttentionPlan


def simulate_attention(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    plans: Sequence[AttentionPlan],
    *,
    softmax_scale: float | None = None,
    network: InProcessNetwork | None = None,
) -> list[Tensor]:
    """What `packed_attention` gives on every rank.

    Args:
        queries: `[T_local, heads, d]` of each rank.
        keys: `[T_local, kv_heads, d]` of each rank.
        values: `[T_local, kv_heads, dv]` of each rank.
        plans: the plan of each rank.
        softmax_scale: factor of the scores, by default `d ** -0.5`.
        network: to count bytes with; a new one by default.

    Returns:
        `[T_local, heads, dv]` of each rank.

    Raises:
        RuntimeError: if ranks wait for each other, or messages do not match.
    """
    for rank, plan in enumerate(plans):
        check_inputs(queries[rank], keys[rank], values[rank], plan)
    scale = queries[0].shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    network = network or InProcessNetwork(len(plans))
    return list(_Simulation.apply(tuple(plans), network, scale, *queries, *keys, *values))


class _Simulation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plans, network, scale, *tensors):
        size = len(plans)
        tasks = [
            forward_task(
                plan, end, tensors[rank], tensors[size + rank], tensors[2 * size + rank], scale
            )
            for rank, (plan, end) in enumerate(zip(plans, network.communicators(), strict=True))
        ]
        results = network.drive(tasks)
        ctx.save_for_backward(*(x for _, saved in results for x in saved))
        ctx.plans, ctx.network, ctx.scale = plans, network, scale
        ctx.kv_heads = tensors[size].shape[1]
        return tuple(out for out, _ in results)

    @staticmethod
    def backward(ctx, *grads):
        saved = ctx.saved_tensors
        tasks = [
            backward_task(
                plan, end, grads[rank], saved[5 * rank : 5 * rank + 5], ctx.scale, ctx.kv_heads
            )
            for rank, (plan, end) in enumerate(
                zip(ctx.plans, ctx.network.communicators(), strict=True)
            )
        ]
        results = ctx.network.drive(tasks)
        return (None, None, None, *(x for part in zip(*results, strict=True) for x in part))
