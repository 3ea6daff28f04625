"""Segment attention with dropout on the probabilities: plain torch, the scores kept.

The flash kernels never form the probabilities that dropout acts on. Here they are formed, segment
by segment, and kept for the backward pass: memory grows with the square of a segment's length, as
in any unfused attention. Evaluation needs no dropout and takes the other kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.packed.attention.kernels.cpu import check_inputs
from megatron.packed.attention.segments import SegmentLayout


def segment_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: SegmentLayout,
    softmax_scale: float,
    rate: float,
    window: int | None = None,
) -> Tensor:
    """Causal attention of every segment with itself, some of its probabilities set to zero.

    Args:
        query: ``[rows, row_length, heads, d]``.
        key: ``[rows, row_length, kv_heads, d]``.
        value: ``[rows, row_length, kv_heads, dv]``.
        layout: Segments over the same rows.
        softmax_scale: Factor of the scores.
        rate: Share of probabilities that is dropped; the others grow to make up for it.
        window: Tokens to the left that a query sees; None for all.

    Returns:
        ``[rows, row_length, heads, dv]`` in the dtype of ``query``; zeros outside segments.
    """
    check_inputs(query, key, value, layout)
    rows, row_length, heads, _ = query.shape
    exact = query.dtype if query.dtype == torch.float64 else torch.float32
    q, k, v = (x.reshape(rows * row_length, *x.shape[2:]).to(exact) for x in (query, key, value))
    parts, places = [], []
    for start, length in zip(layout.starts, layout.lengths, strict=True):
        there = slice(start, start + length)
        parts.append(_attend(q[there], k[there], v[there], softmax_scale, rate, window))
        places.append(torch.arange(start, start + length, device=query.device))
    out = q.new_zeros(rows * row_length, heads, value.shape[-1])
    if parts:
        out = out.index_copy(0, torch.cat(places), torch.cat(parts))
    return out.to(query.dtype).unflatten(0, (rows, row_length))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, rate: float, window: int | None
) -> Tensor:
    """One segment: `[length, heads, d]` and `[length, kv_heads, ...]` to `[length, heads, dv]`."""
    length, kv_heads = k.shape[:2]
    grouped = q.unflatten(1, (kv_heads, -1))
    scores = torch.einsum("qhgd,khd->hgqk", grouped, k) * softmax_scale
    place = torch.arange(length, device=q.device)
    distance = place[:, None] - place[None, :]
    hidden = distance < 0
    if window is not None:
        hidden |= distance > window
    probabilities = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    kept = F.dropout(probabilities, rate)
    return torch.einsum("hgqk,khd->qhgd", kept, v).flatten(1, 2)
