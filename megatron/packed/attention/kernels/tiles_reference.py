"""Dense fp64 attention over a whole pack, by explicit softmax: the oracle of plans and executor.

It builds T x T scores, so it is for tests alone. It knows segments and positions, no tile.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megatron.packed.attention.task_graph import Mask


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Any,
    cu_seqlens_padded: Any,
    mask: Mask,
    softmax_scale: float,
) -> Tensor:
    """Attention of every segment with itself.

    Args:
        query: `[T, heads, d]`, any floating dtype; `key` and `value` with key-value heads.
        key: `[T, kv_heads, d]`.
        value: `[T, kv_heads, dv]`.
        cu_seqlens: integers `[n + 1]`, real boundaries.
        cu_seqlens_padded: integers `[n + 1]`, padded boundaries.
        mask: what a query sees of its segment.
        softmax_scale: factor of the scores.

    Returns:
        `[T, heads, dv]` fp64; zeros in padding. Differentiable.
    """
    total, heads, _ = query.shape
    document = torch.full((total,), -1, device=query.device)
    position = torch.zeros(total, dtype=torch.long, device=query.device)
    lengths = [b - a for a, b in pairwise(int(x) for x in cu_seqlens)]
    for index, (start, length) in enumerate(zip(cu_seqlens_padded, lengths, strict=False)):
        document[int(start) : int(start) + length] = index
        position[int(start) : int(start) + length] = torch.arange(length, device=query.device)
    real = torch.nonzero(document >= 0).flatten()
    document, position = document[real], position[real]
    q, k, v = (x.double()[real] for x in (query, key, value))
    groups = heads // key.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    distance = position.unsqueeze(1) - position
    visible = document.unsqueeze(1) == document
    if mask.kind == "causal":
        visible &= (distance >= 0) & (distance <= mask.reach)
    scores = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    out = q.new_zeros(total, heads, value.shape[2])
    return out.index_copy(0, real, torch.einsum("hqk,khd->qhd", weights, v))
