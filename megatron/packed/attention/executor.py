"""Runs any attention plan forward and backward, exchanging rows while tiles are computed.

```
forward    post 1 | local tiles | wait 1, post 2 | tiles of 1 | wait 2, post 3 | tiles of 2 ...
backward   the same, and after the tiles of i: post the gradients of i to the owners of its keys,
           then wait for and add those that came back for i - 1
```

Memory is that of the local tokens and two key-value buffers, of what arrives and of what is in
use; where ranks share memory, the senders hold them. Outputs, log-sum-exps and gradients are
accumulated in fp32 (fp64 for fp64) in the order of the plan, so that a run repeats bit by bit on
CPU. The backward pass uses the merged log-sum-exp, which makes every tile's gradient exact on its
own; keys and values are fetched again.
Padding rows are never read: their outputs and gradients are zeros even where inputs are NaN.

Sources: Ring Attention (Liu et al. 2023), FlashAttention-2 (Dao 2023) for the backward from the
log-sum-exp, MagiAttention for one engine over many plans.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.packed.attention.communicator import Communicator, Label, Pending, Task, drive
from megatron.packed.attention.head_exchange import (
    check_heads,
    heads_to_tokens,
    tokens_to_heads,
)
from megatron.packed.attention.host import communicator_of
from megatron.packed.attention.in_process import InProcessNetwork
from megatron.packed.attention.kernels import TileKernel, select_tile_kernel
from megatron.packed.attention.plans.plan import AttentionPlan, Step
from megatron.packed.attention.row_copies import new_rows
from megatron.packed.attention.row_exchange import RowExchanges
from megatron.packed.attention.sinks import add_sink, heads_in_steps, sink_gradient

Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan,
    group: Communicator | dist.ProcessGroup | None = None,
    *,
    softmax_scale: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Exact attention over a pack that is spread over context-parallel ranks.

    Args:
        query: `[T_local, heads, d]`, fp64, fp32, bf16 or fp16, any strides.
        key: `[T_local, kv_heads, d]`.
        value: `[T_local, kv_heads, dv]`.
        plan: this rank's plan; every rank passes its own of the same pack.
        group: context-parallel process group, or a communicator; None with one rank.
        softmax_scale: factor of the scores, by default `d ** -0.5`.
        sink: `[heads]`, the score of a key with value 0 that every query sees besides its own;
            None without. Its gradient is that of this rank's queries, or heads in a head exchange:
            sum it over the ranks.

    Returns:
        `[T_local, heads, dv]` in the dtype of `query`; zeros in padding. Differentiable.

    Raises:
        ValueError: if tensors, plan and group do not fit each other.
        ConfigurationError: for head counts that a head exchange can't share out.
        TrainingError: if another rank is lost on the way.
    """
    check_inputs(query, key, value, plan)
    scale = query.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    communicator = _communicator_of(group, plan, query.device)
    if (communicator.rank, communicator.size) != (plan.cp_rank, plan.cp_size):
        raise ValueError(
            f"plan: made for rank {plan.cp_rank} of {plan.cp_size}, the group has rank "
            f"{communicator.rank} of {communicator.size}"
        )
    return _PackedAttention.apply(query, key, value, sink, plan, communicator, scale)


def _communicator_of(
    group: Communicator | dist.ProcessGroup | None, plan: AttentionPlan, device: torch.device
) -> Communicator:
    if group is None:
        return InProcessNetwork(1).communicators()[0]
    if not isinstance(group, dist.ProcessGroup):
        return group
    first = Label("keys", 1, "forward")
    if plan.head_exchange is not None:
        first = Label("heads", 0, "forward")
    return communicator_of(group, device, first)


def check_inputs(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan) -> None:
    """Raise ValueError or ConfigurationError for tensors that the plan can't run on."""
    rows, heads, width = query.shape
    if rows != plan.local_tokens or key.shape[0] != rows or value.shape[:2] != key.shape[:2]:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} "
            f"must hold the {plan.local_tokens} local tokens of the plan, and key and value the "
            "same heads"
        )
    if key.shape[2] != width:
        raise ValueError(f"query width {width} differs from key width {key.shape[2]}")
    kv_heads = key.shape[1]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} key-value heads")
    if not query.dtype == key.dtype == value.dtype or not query.dtype.is_floating_point:
        raise ValueError(
            f"query, key and value must share one floating dtype, got {query.dtype}, "
            f"{key.dtype}, {value.dtype}"
        )
    if plan.head_exchange is not None:
        check_heads(heads, kv_heads, plan.head_exchange.size)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sink, plan, communicator, scale):
        out, saved = drive(forward_task(plan, communicator, query, key, value, scale, sink))
        ctx.save_for_backward(*saved, sink)
        ctx.plan, ctx.communicator, ctx.scale = plan, communicator, scale
        ctx.kv_heads = key.shape[1]
        return out

    @staticmethod
    def backward(ctx, grad):
        *saved, sink = ctx.saved_tensors
        task = backward_task(
            ctx.plan, ctx.communicator, grad, tuple(saved), ctx.scale, ctx.kv_heads, sink
        )
        grads = drive(task)
        return (*grads, *[None] * (7 - len(grads)))


def forward_task(
    plan: AttentionPlan,
    communicator: Communicator,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    sink: Tensor | None = None,
) -> Task[tuple[Tensor, Saved]]:
    """One rank's forward pass: its output, and what the backward pass needs."""
    exchange = plan.head_exchange
    if sink is not None:
        sink = sink[heads_in_steps(plan, len(sink))]
    if exchange is None:
        out, lse = yield from _forward_steps(plan, communicator, query, key, value, scale, sink)
        return out, (query, key, value, out, lse)
    heads = query.shape[1]
    query, key, value = yield from tokens_to_heads(
        exchange, communicator, (query, key, value), Label("heads", 0, "forward")
    )
    out, lse = yield from _forward_steps(plan, communicator, query, key, value, scale, sink)
    saved = query, key, value, out, lse
    (whole,) = yield from heads_to_tokens(
        exchange, communicator, (out,), (heads,), Label("outputs", 0, "forward")
    )
    return whole, saved


def backward_task(
    plan: AttentionPlan,
    communicator: Communicator,
    grad: Tensor,
    saved: Saved,
    scale: float,
    kv_heads: int,
    sink: Tensor | None = None,
) -> Task[tuple[Tensor, ...]]:
    """One rank's backward pass: gradients of its query, key, value and, where given, sinks."""
    exchange = plan.head_exchange
    dtype = saved[0].dtype
    if exchange is None:
        grads = yield from _backward_steps(plan, communicator, grad, *saved, scale)
        return (*(x.to(dtype) for x in grads), *sink_gradient(plan, grad, *saved[3:], sink))
    heads = grad.shape[1], kv_heads, kv_heads
    (grad,) = yield from tokens_to_heads(
        exchange, communicator, (grad,), Label("outputs", 0, "backward")
    )
    grads = yield from _backward_steps(plan, communicator, grad, *saved, scale)
    if kv_heads >= exchange.size:
        grads = tuple(x.to(dtype) for x in grads)  # nothing is summed any more
    parts = yield from heads_to_tokens(
        exchange, communicator, grads, heads, Label("heads", 0, "backward")
    )
    return (*(x.to(dtype) for x in parts), *sink_gradient(plan, grad, *saved[3:], sink))


def _kernel_for(query: Tensor, value: Tensor) -> TileKernel:
    return select_tile_kernel(query.device.type, query.dtype, max(query.shape[2], value.shape[2]))


def _accumulator(x: Tensor) -> torch.dtype:
    """fp32, or fp64 for fp64: what results and gradients are summed up in."""
    return torch.promote_types(x.dtype, torch.float32)


def _forward_steps(
    plan: AttentionPlan,
    communicator: Communicator,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    sink: Tensor | None = None,
) -> Task[tuple[Tensor, Tensor]]:
    """Output in the dtype of `query`, and the log-sum-exp `[rows, heads]` in fp32 or fp64."""
    kernel = _kernel_for(query, value)
    width = max(key.shape[2], value.shape[2])
    q = kernel.prepare(query, width)
    dtype = _accumulator(query)
    lse = new_rows(q, 1, dtype).squeeze(2).fill_(-torch.inf)
    # A head exchange copies the output anyway; elsewhere a token's heads are read together.
    together = plan.head_exchange is None
    out = new_rows(q, value.shape[2], dtype, plan.padding, together)
    exchanges = RowExchanges(plan, communicator, key, value, "forward")
    arriving: Pending | None = None
    for index, step in enumerate(plan.steps):
        k, v, arrived = key, value, arriving
        if arrived is not None:
            yield arrived
            k, v = exchanges.keys_and_values(arrived)
        following = plan.steps[index + 1] if index + 1 < len(plan.steps) else None
        arriving = exchanges.fetch(following) if following is not None else None
        k, v = kernel.prepare(k, width), kernel.prepare(v, width)
        kernel.forward(q, k, v, step, scale, out, lse)
        if arrived is not None:
            arrived.release()
    if sink is not None:
        add_sink(out, lse, sink)
    return out.to(query.dtype), lse


def _backward_steps(
    plan: AttentionPlan,
    communicator: Communicator,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> Task[tuple[Tensor, Tensor, Tensor]]:
    """Gradients of query, key and value in fp32 or fp64."""
    kernel, dtype = _kernel_for(query, value), _accumulator(query)
    width = max(key.shape[2], value.shape[2])
    q, grad, out = (kernel.prepare(x, width) for x in (query, grad, out))
    exchanges = RowExchanges(plan, communicator, key, value, "backward")
    dq, *local = (new_rows(x, x.shape[2], dtype, plan.padding) for x in (query, key, value))
    delta = torch.empty_like(lse)
    arriving: Pending | None = None
    returning: tuple[Step, Pending] | None = None
    for index, step in enumerate(plan.steps):
        k, v, gradients, arrived = key, value, local, arriving
        if arrived is not None:
            yield arrived
            k, v = exchanges.keys_and_values(arrived)
            rows = exchanges.gradients(step)
            gradients = exchanges.parts_of(rows)
        following = plan.steps[index + 1] if index + 1 < len(plan.steps) else None
        # One global order of all exchanges, fetch i + 1 before give back i, is what lets messages
        # be matched without tags; a rank that skips an exchange must not run ahead of it.
        arriving, late = None, None
        if following is not None:
            if index == 0 or following.index == step.index + 1 or not communicator.in_order:
                arriving = exchanges.fetch(following)
            else:
                late = following
        k, v = kernel.prepare(k, width), kernel.prepare(v, width)
        kernel.backward(grad, q, k, v, out, lse, step, scale, delta, dq, *gradients)
        lent = returning
        if arrived is not None:
            arrived.release()
            returning = step, exchanges.give_back(step, rows)
        if late is not None:
            arriving = exchanges.fetch(late)
        if lent is not None:
            yield lent[1]
            exchanges.take_back(local, *lent)
    if returning is not None:
        yield returning[1]
        exchanges.take_back(local, *returning)
    return dq, *local
