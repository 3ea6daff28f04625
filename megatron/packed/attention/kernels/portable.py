"""Causal attention per segment through torch's public operator, for devices other than the CPU.

One call per segment: exact, and linear in memory wherever torch has a flash kernel; not the
fastest. Source: `torch.nn.functional.scaled_dot_product_attention`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.packed.attention.kernels.cpu import check_inputs
from megatron.packed.attention.segments import SegmentLayout


def segment_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: SegmentLayout, softmax_scale: float
) -> Tensor:
    """Causal attention of every segment with itself; arguments and result as the CPU kernel's."""
    check_inputs(query, key, value, layout)
    rows, row_length, heads, _ = query.shape
    sizes = _piece_sizes(layout)
    # Splitting once makes the backward one concatenation; slicing would allocate T rows a segment.
    pieces = zip(
        *(x.reshape(rows * row_length, *x.shape[2:]).split(sizes) for x in (query, key, value)),
        strict=True,
    )
    outputs = []
    for index, (q, k, v) in enumerate(pieces):
        if index % 2 == 0:
            outputs.append(q.new_zeros(q.shape[0], heads, v.shape[2]))
            continue
        attended = F.scaled_dot_product_attention(
            *(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)),
            is_causal=True,
            scale=softmax_scale,
            enable_gqa=heads != k.shape[1],
        )
        outputs.append(attended.squeeze(0).transpose(0, 1))
    out = torch.cat(outputs).view(rows, row_length, heads, -1)
    # Sums of nothing: a stream without segments still has (zero) gradients.
    return out + sum(x[..., :0].sum() for x in (query, key, value)) if not layout.starts else out


def _piece_sizes(layout: SegmentLayout) -> list[int]:
    """Slots of gap, segment, gap, segment, ..., gap; gaps may be empty."""
    sizes, end = [], 0
    for start, length in zip(layout.starts, layout.lengths, strict=True):
        sizes += [start - end, length]
        end = start + length
    return [*sizes, layout.rows * layout.row_length - end]
