"""Tiles on CPU: fp32 by our C++ kernel, the rest by torch's flash operator.

Partial results are merged into fp32 (fp64) buffers. The C++ kernel goes on from what the buffers
hold; the operator's results are merged afterwards. What `kernels/cpu.py` says of the operator
holds here, and every row of a call sees a key, so that its log-sum-exp is finite (for a row that
sees none the operator answers 0 instead of -inf).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.packed.accelerator import cpu_ops
from megatron.packed.attention.kernels.merge import merge_, start_gradients
from megatron.packed.attention.plans.plan import Step
from megatron.packed.attention.tile_calls import TileCall

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def prepare(x: Tensor, width: int) -> Tensor:
    """Rows in the form that kernels read: fp32 or fp64, last dimension contiguous.

    Args:
        x: `[rows, heads, d]`.
        width: the one width that torch's operator needs for queries, keys and values.
    """
    if x.dtype not in (torch.float32, torch.float64):
        x = x.float()
    if x.shape[2] < width and _native(x) is None:
        # Zero columns add nothing to q.k and give output columns that are dropped again.
        x = F.pad(x, (0, width - x.shape[2]))
    return x if x.stride(2) == 1 else x.contiguous()


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Step,
    softmax_scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attend to the keys of a step's tiles and merge into `out` and `lse`, in place.

    Args:
        q: `[rows, heads, d]`, prepared.
        k: `[key rows, kv_heads, d]`, prepared.
        v: `[key rows, kv_heads, dv]`, prepared.
        step: what to compute.
        softmax_scale: factor of the scores.
        out: `[rows, heads, dv]` in the dtype of `q`.
        lse: `[rows, heads]` in the dtype of `q`; -inf in rows that have seen nothing.
    """
    native = _native(q)
    if native is not None:
        streams = (_rows(x) for x in (q, k, v, out, lse))
        native.attention_tiles(
            *streams,
            *_table(step),
            step.tiles.fresh,
            *_shape(q, k, v),
            softmax_scale,
            cpu_ops.threads(),
        )
        return
    for call in step.calls:
        o, more = _flash_forward(
            _queries(q, call),
            _keys(k, call),
            _keys(v, call),
            0.0,
            call.is_causal,
            attn_mask=_mask_of(call, q),
            scale=softmax_scale,
        )
        o = o if o.shape[3] == out.shape[2] else o[..., : out.shape[2]]
        if call.fresh:
            _queries(out, call).copy_(o)
            _queries(lse, call).copy_(more)
        else:
            merge_(_queries(out, call), _queries(lse, call), o, more)


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
    """Add the gradients of a step's tiles, in place.

    Args:
        grad: `[rows, heads, dv]`, gradient of the merged output, prepared.
        q, k, v: as in `forward`.
        out: `[rows, heads, dv]`, the merged output, prepared.
        lse: `[rows, heads]`, the merged log-sum-exp.
        step: what to compute.
        softmax_scale: factor of the scores.
        delta: `[rows, heads]` for the kernel, which keeps `grad . out` in it from step 0 on.
        dq: `[rows, heads, d]`; before step 0, anything in rows that it computes.
        dk: `[key rows, kv_heads, d]`; written, whatever it holds.
        dv: `[key rows, kv_heads, dv]`; as `dk`.
    """
    native = _native(q)
    if native is not None:
        streams = (_rows(x) for x in (grad, q, k, v, out, lse, delta, dq, dk, dv))
        native.attention_tiles_backward(
            *streams,
            *_table(step),
            step.tiles.fresh,
            *_shape(q, k, v),
            softmax_scale,
            cpu_ops.threads(),
        )
        return
    start_gradients(step, dq, dk, dv)
    for call in step.calls:
        pieces = _flash_backward(
            _queries(grad, call),
            _queries(q, call),
            _keys(k, call),
            _keys(v, call),
            _queries(out, call),
            _queries(lse, call),
            0.0,
            call.is_causal,
            attn_mask=_mask_of(call, q),
            scale=softmax_scale,
        )
        _accumulate(_queries(dq, call), pieces[0], call.fresh)
        for whole, piece in ((dk, pieces[1]), (dv, pieces[2])):
            if call.k_stride >= call.k_count or call.repeat == 1:
                _accumulate(_keys(whole, call), piece, call.fresh_keys)
                continue
            for index in range(call.repeat):  # rows overlap: one after the other
                one = replace(call, k_start=call.k_start + index * call.k_stride, repeat=1)
                _accumulate(_keys(whole, one), piece[index : index + 1], False)


def _native(x: Tensor) -> ModuleType | None:
    native = cpu_ops.suitable(x)
    return native if native is not None and native.has_sgemm() else None


def _rows(x: Tensor) -> tuple[int, int, int]:
    return (x.data_ptr(), *x.stride()[:2])


def _table(step: Step) -> tuple[int, int]:
    bands = step.tiles.bands
    return bands.ctypes.data, len(bands)


def _shape(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    return q.shape[1], k.shape[1], q.shape[2], v.shape[2]


def _accumulate(whole: Tensor, piece: Tensor, fresh: bool) -> None:
    if piece.shape[3] != whole.shape[3]:
        piece = piece[..., : whole.shape[3]]
    if fresh:
        whole.copy_(piece)
    else:
        whole.add_(piece)


@lru_cache(maxsize=64)
def _band_mask(q_count: int, k_count: int, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """0 where a row sees a key, -inf elsewhere: `[q_count, k_count]`."""
    distance = torch.arange(q_count).unsqueeze(1) - torch.arange(k_count)
    hidden = (distance < low) | (distance > high)
    return torch.zeros(q_count, k_count, dtype=dtype).masked_fill_(hidden, -torch.inf)


def _mask_of(call: TileCall, q: Tensor) -> Tensor | None:
    if call.is_full or call.is_causal:
        return None
    return _band_mask(call.q_count, call.k_count, call.low, call.high, q.dtype)


def _queries(x: Tensor, call: TileCall) -> Tensor:
    return _view(x, call.q_start, call.q_count, call.repeat, call.q_stride)


def _keys(x: Tensor, call: TileCall) -> Tensor:
    return _view(x, call.k_start, call.k_count, call.repeat, call.k_stride)


def _view(x: Tensor, start: int, count: int, repeat: int, stride: int) -> Tensor:
    """Rows of `[rows, heads, ...]` as `[repeat, heads, count, ...]` without a copy."""
    row, head, *rest = x.stride()
    return x.as_strided(
        (repeat, x.shape[1], count, *x.shape[2:]),
        (stride * row, head, row, *rest),
        x.storage_offset() + start * row,
    )
