"""Tiles by plain matrix products: any device, any dtype torch has them for.

The scores of one tile are formed in blocks of query rows, so memory stays linear in the keys. It is
exact everywhere and the fastest nowhere: the path for devices without a kernel of their own, and
the second opinion on those that have one. Functions are those of `tiles_cpu.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.packed.attention.kernels.merge import merge_, start_gradients
from megatron.packed.attention.plans.plan import Step
from megatron.packed.attention.tile_calls import TileCall

# Scores formed at once; 64 MiB of fp32.
MAX_SCORES = 1 << 24


def prepare(x: Tensor, width: int) -> Tensor:
    """Rows in fp32 or fp64; the width stays as it is."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Step,
    softmax_scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attend to the keys of a step's tiles and merge into `out` and `lse`, in place."""
    for call, rows, keys, hidden in _blocks(step.calls, q):
        query, key, value = _grouped(q[rows], k), k[keys], v[keys]
        scores = torch.einsum("qhgd,khd->hgqk", query, key) * softmax_scale
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        more = scores.logsumexp(dim=-1)
        weights = torch.exp(scores - more.unsqueeze(-1))
        o = torch.einsum("hgqk,khd->qhgd", weights, value).flatten(1, 2)
        more = more.permute(2, 0, 1).flatten(1)
        if call.fresh:
            out[rows], lse[rows] = o, more
        else:
            merge_(out[rows], lse[rows], o, more)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    step: Step,
    softmax_scale: float,
    delta: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Add the gradients of a step's tiles, in place."""
    start_gradients(step, dq, dk, dv)
    for _, rows, keys, hidden in _blocks(step.calls, q):
        query, upstream, result = (_grouped(x[rows], k) for x in (q, grad, out))
        key, value = k[keys], v[keys]
        scores = torch.einsum("qhgd,khd->hgqk", query, key) * softmax_scale
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        total = lse[rows].unflatten(1, query.shape[1:3]).permute(1, 2, 0)
        weights = torch.exp(scores - total.unsqueeze(-1))
        delta = (upstream * result).sum(dim=-1).permute(1, 2, 0)
        dv[keys] += torch.einsum("hgqk,qhgd->khd", weights, upstream)
        slopes = torch.einsum("qhgd,khd->hgqk", upstream, value) - delta.unsqueeze(-1)
        slopes = slopes * weights * softmax_scale
        dq[rows] += torch.einsum("hgqk,khd->qhgd", slopes, key).flatten(1, 2)
        dk[keys] += torch.einsum("hgqk,qhgd->khd", slopes, query)


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """Query heads by the key-value head they share: `[rows, kv_heads, group, d]`."""
    return x.unflatten(1, (k.shape[1], x.shape[1] // k.shape[1]))


def _blocks(
    calls: tuple[TileCall, ...], q: Tensor
) -> Iterator[tuple[TileCall, slice, slice, Tensor | None]]:
    """Call, query rows, key rows and hidden pairs of every block of every rectangle."""
    for call in calls:
        block_rows = max(MAX_SCORES // (q.shape[1] * call.k_count), 1)
        for index in range(call.repeat):
            q_start = call.q_start + index * call.q_stride
            k_start = call.k_start + index * call.k_stride
            for start in range(0, call.q_count, block_rows):
                end = min(start + block_rows, call.q_count)
                stop = min(call.k_count, end - call.low)
                hidden = None
                if not call.is_full:
                    row = torch.arange(start, end, device=q.device).unsqueeze(1)
                    distance = row - torch.arange(stop, device=q.device)
                    hidden = (distance < call.low) | (distance > call.high)
                rows = slice(q_start + start, q_start + end)
                yield call, rows, slice(k_start, k_start + stop), hidden
