"""Exact causal attention inside segments on CPU, through torch's flash operator.

The operator keeps O(T) memory, is bitwise the same for any number of threads and honours the
output and log-sum-exp it is given in backward. Its traps are closed here: it must never see an
empty segment (SIGFPE), it accepts head counts that don't divide, it wants equal query-key and
value widths and a unit stride in the last dimension, and bf16 is more than twice as slow in it as
fp32 with casts around.

Source: ``aten/src/ATen/native/cpu/FlashAttentionKernel.cpp`` of PyTorch; FlashAttention-2
(https://arxiv.org/abs/2307.08691).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.packed.attention.segments import Run, SegmentLayout

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def segment_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: SegmentLayout, softmax_scale: float
) -> Tensor:
    """Causal attention of every segment with itself.

    Slots outside segments cost nothing: their outputs and gradients are exact zeros, whatever
    (NaN included) their inputs hold.

    Args:
        query: ``[rows, row_length, heads, d]``, any strides, fp64, fp32, bf16 or fp16.
        key: ``[rows, row_length, kv_heads, d]``.
        value: ``[rows, row_length, kv_heads, dv]``.
        layout: Segments over the same rows.
        softmax_scale: Factor of the scores.

    Returns:
        ``[rows, row_length, heads, dv]`` in the dtype of ``query``.

    Raises:
        ValueError: If shapes, head counts or dtypes do not fit each other.
    """
    check_inputs(query, key, value, layout)
    return _SegmentAttention.apply(query, key, value, layout, softmax_scale)


def check_inputs(query: Tensor, key: Tensor, value: Tensor, layout: SegmentLayout) -> None:
    rows, row_length, heads, width = query.shape
    if (rows, row_length) != (layout.rows, layout.row_length):
        raise ValueError(
            f"query holds {rows} x {row_length} slots, the segment layout "
            f"{layout.rows} x {layout.row_length}"
        )
    if key.shape[:2] != query.shape[:2] or value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} "
            "must agree in rows, slots and, for key and value, heads"
        )
    if key.shape[3] != width:
        raise ValueError(f"query width {width} differs from key width {key.shape[3]}")
    kv_heads = key.shape[2]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} key-value heads")
    if not query.dtype == key.dtype == value.dtype or not query.dtype.is_floating_point:
        raise ValueError(
            f"query, key and value must share one floating dtype, got {query.dtype}, "
            f"{key.dtype}, {value.dtype}"
        )


class _SegmentAttention(torch.autograd.Function):
    """Forward saves the inputs, the output and one log-sum-exp per token and head."""

    @staticmethod
    def forward(ctx, query, key, value, layout, softmax_scale):
        ctx.layout, ctx.softmax_scale = layout, softmax_scale
        value_width = value.shape[3]
        q, k, v = (_computable(x, width) for x, width in _with_widths(query, key, value))
        rows, row_length, heads, width = q.shape
        out = _allocate((rows, row_length, heads, width), q, layout)
        lse = _allocate((rows, row_length, heads), q, layout)
        for run in layout.runs:
            o, log_sum_exp = _flash_forward(
                run_view(q, run),
                run_view(k, run),
                run_view(v, run),
                0.0,
                True,
                attn_mask=None,
                scale=softmax_scale,
            )
            run_view(out, run).copy_(o)
            run_view(lse, run).copy_(log_sum_exp)
        result = _narrow(out, value_width).to(query.dtype)
        ctx.save_for_backward(query, key, value, result, lse)
        return result

    @staticmethod
    def backward(ctx, grad_out):
        query, key, value, result, lse = ctx.saved_tensors
        layout = ctx.layout
        q, k, v = (_computable(x, width) for x, width in _with_widths(query, key, value))
        out, grad = (_computable(x, q.shape[3]) for x in (result, grad_out))
        grads = [_allocate(x.shape, x, layout) for x in (q, k, v)]
        for run in layout.runs:
            pieces = _flash_backward(
                run_view(grad, run),
                run_view(q, run),
                run_view(k, run),
                run_view(v, run),
                run_view(out, run),
                run_view(lse, run),
                0.0,
                True,
                attn_mask=None,
                scale=ctx.softmax_scale,
            )
            for whole, piece in zip(grads, pieces, strict=True):
                run_view(whole, run).copy_(piece)
        grads = [
            _narrow(g, x.shape[3]).to(x.dtype)
            for g, x in zip(grads, (query, key, value), strict=True)
        ]
        return (*grads, None, None)


def _allocate(shape: tuple[int, ...], like: Tensor, layout: SegmentLayout) -> Tensor:
    """Buffer ``[rows, slots, ...]`` that lies slot by slot in memory, as megatron-core's BSHD does.

    Zeroed only where padding slots exist: kernels write all others.
    """
    rows, slots, *rest = shape
    make = like.new_empty if layout.is_dense else like.new_zeros
    return make((slots, rows, *rest)).transpose(0, 1)


def _with_widths(query: Tensor, key: Tensor, value: Tensor) -> list[tuple[Tensor, int]]:
    """Pair each input with the one width that the operator needs for all of them."""
    width = max(query.shape[3], value.shape[3])
    return [(query, width), (key, width), (value, width)]


def _computable(x: Tensor, width: int) -> Tensor:
    """Up-cast half precision, pad the last dimension with zeros, make its stride 1."""
    if x.dtype not in (torch.float32, torch.float64):
        x = x.float()
    if x.shape[3] < width:
        # Zero columns add nothing to q.k and give output columns that are dropped again.
        x = F.pad(x, (0, width - x.shape[3]))
    return x if x.stride(3) == 1 else x.contiguous()


def _narrow(x: Tensor, width: int) -> Tensor:
    return x if x.shape[3] == width else x[..., :width].contiguous()


def run_view(x: Tensor, run: Run) -> Tensor:
    """View of one run as ``[count, heads, length, width]``, or ``[count, heads, length]``."""
    row_length = x.shape[1]
    row, offset = divmod(run.start, row_length)
    row_stride, slot_stride, head_stride = x.stride()[:3]
    run_stride = row_stride if run.stride == row_length else run.stride * slot_stride
    return x.as_strided(
        (run.count, x.shape[2], run.length, *x.shape[3:]),
        (run_stride, head_stride, slot_stride, *x.stride()[3:]),
        x.storage_offset() + row * row_stride + offset * slot_stride,
    )
