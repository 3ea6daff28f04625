"""Dense causal attention per segment in fp64: the oracle of every other kernel.

It builds S x S scores, so it is for tests alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.packed.attention.segments import SegmentLayout


def segment_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: SegmentLayout, softmax_scale: float
) -> Tensor:
    """Causal attention of every segment with itself, by explicit softmax.

    Args:
        query: ``[rows, row_length, heads, d]``, any floating dtype.
        key: ``[rows, row_length, kv_heads, d]``.
        value: ``[rows, row_length, kv_heads, dv]``.
        layout: Segments over the same rows.
        softmax_scale: Factor of the scores.

    Returns:
        ``[rows, row_length, heads, dv]`` fp64; zeros outside segments. Differentiable.
    """
    rows, row_length, heads, _ = query.shape
    groups = heads // key.shape[2]
    q, k, v = (x.double().flatten(0, 1) for x in (query, key, value))
    out = q.new_zeros(rows * row_length, heads, value.shape[3])
    out = out + sum(x[..., :0].sum() for x in (q, k, v))  # in the graph even without segments
    for start, length in zip(layout.starts, layout.lengths, strict=True):
        part = slice(start, start + length)
        keys = k[part].repeat_interleave(groups, dim=1)
        values = v[part].repeat_interleave(groups, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[part], keys) * softmax_scale
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        index = torch.arange(start, start + length, device=q.device)
        out = out.index_copy(0, index, torch.einsum("hqk,khd->qhd", weights, values))
    return out.view(rows, row_length, heads, -1)
