"""Exact causal attention inside segments on CPU: fp32 by our C++ kernel, the rest by torch's.

Both keep O(T) memory and give the same bits in every run; ours also for any number of threads.
Half precision is cast to fp32 and back: twice as fast as torch's own half-precision kernel, and
more exact.

The traps of torch's operator, which serves fp64 and installations without the extension, are
closed here: it must never see an empty segment (SIGFPE), it accepts head counts that don't divide,
and it wants equal query-key and value widths and a unit stride in the last dimension.

Source: ``aten/src/ATen/native/cpu/FlashAttentionKernel.cpp`` of PyTorch; FlashAttention-2
(https://arxiv.org/abs/2307.08691).
"""

from __future__ import annotations

from functools import partial
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.packed.accelerator import cpu_ops
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
        q, k, v = (_computable(x) for x in (query, key, value))
        native = _native(q)
        compute = _forward_with_torch if native is None else partial(_forward_native, native)
        out, lse = compute(q, k, v, layout, softmax_scale)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        query, key, value, out, lse = ctx.saved_tensors
        grad, q, k, v, o = (_computable(x) for x in (grad_out, query, key, value, out))
        native = _native(grad)
        compute = _backward_with_torch if native is None else partial(_backward_native, native)
        grads = compute(grad, q, k, v, o, lse, ctx.layout, ctx.softmax_scale)
        return (*(g.to(query.dtype) for g in grads), None, None)


def _native(x: Tensor) -> ModuleType | None:
    native = cpu_ops.suitable(x)
    return native if native is not None and native.has_sgemm() else None


def _stream(x: Tensor) -> tuple[int, int, int, int]:
    return (x.data_ptr(), *x.stride()[:3])


def _sizes(layout: SegmentLayout, q: Tensor, v: Tensor, scale: float) -> tuple:
    """Trailing arguments that both compiled functions take."""
    table = layout.table
    shape = (q.shape[2], v.shape[2], q.shape[3], v.shape[3])
    return (table.ctypes.data, len(table), *shape, scale, cpu_ops.threads())


def _forward_native(native, q, k, v, layout, scale):
    out = _allocate((*q.shape[:3], v.shape[3]), q, layout)
    lse = _allocate(q.shape[:3], q, layout)
    streams = (_stream(x) for x in (q, k, v, out, lse))
    native.attention(*streams, *_sizes(layout, q, v, scale))
    return out, lse


def _backward_native(native, grad, q, k, v, out, lse, layout, scale):
    grads = [_allocate(x.shape, x, layout) for x in (q, k, v)]
    streams = (_stream(x) for x in (grad, q, k, v, out, lse, *grads))
    native.attention_backward(*streams, *_sizes(layout, q, v, scale))
    return grads


def _forward_with_torch(q, k, v, layout, scale):
    q, k, v, value_width = *_same_width(q, k, v), v.shape[3]
    out = _allocate(q.shape, q, layout)
    lse = _allocate(q.shape[:3], q, layout)
    for run in layout.runs:
        views = (run_view(x, run) for x in (q, k, v))
        o, log_sum_exp = _flash_forward(*views, 0.0, True, attn_mask=None, scale=scale)
        run_view(out, run).copy_(o)
        run_view(lse, run).copy_(log_sum_exp)
    return _narrow(out, value_width), lse


def _backward_with_torch(grad, q, k, v, out, lse, layout, scale):
    widths = [x.shape[3] for x in (q, k, v)]
    grad, q, k, v, out = _same_width(grad, q, k, v, out)
    grads = [_allocate(x.shape, x, layout) for x in (q, k, v)]
    for run in layout.runs:
        views = (run_view(x, run) for x in (grad, q, k, v, out, lse))
        pieces = _flash_backward(*views, 0.0, True, attn_mask=None, scale=scale)
        for whole, piece in zip(grads, pieces, strict=True):
            run_view(whole, run).copy_(piece)
    return [_narrow(g, width) for g, width in zip(grads, widths, strict=True)]


def _allocate(shape: tuple[int, ...], like: Tensor, layout: SegmentLayout) -> Tensor:
    """Buffer ``[rows, slots, ...]`` that lies slot by slot in memory, as megatron-core's BSHD does.

    Zeroed only where padding slots exist: kernels write all others.
    """
    rows, slots, *rest = shape
    make = like.new_empty if layout.is_dense else like.new_zeros
    return make((slots, rows, *rest)).transpose(0, 1)


def _computable(x: Tensor) -> Tensor:
    """Up-cast half precision; make the last dimension contiguous."""
    if x.dtype not in (torch.float32, torch.float64):
        x = x.float()
    return x if x.stride(3) == 1 else x.contiguous()


def _same_width(*tensors: Tensor) -> list[Tensor]:
    """Pad the last dimension with zeros to the one width that torch's operator needs.

    Zero columns add nothing to q.k, and give output columns that are dropped again.
    """
    width = max(x.shape[3] for x in tensors)
    return [x if x.shape[3] == width else F.pad(x, (0, width - x.shape[3])) for x in tensors]


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
