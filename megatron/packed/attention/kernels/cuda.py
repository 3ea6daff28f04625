"""Tiles on CUDA: one variable-length flash call a step and mask type, on the kernels in torch.

Rows of queries and keys are laid end to end, rectangle by rectangle (`tile_lists.py`), and read in
place where they are one run. The operator gives the log-sum-exp with the output, and its backward
pass honours the output and log-sum-exp it is *handed*: with the merged ones, every rectangle's
gradient is exact on its own.

What the operator demands is met here: one head width for queries, keys and values, a multiple of 8
and at most 256 (zero columns add nothing to q.k and give output columns that are dropped again);
bf16 or fp16; at least one rectangle, none empty. What it can't do, fp32 and wider heads, goes to
`tiles_portable.py`. Functions are those of `tiles_cpu.py`.

The operators are handed in: the tests put a brute-force stand-in for them, on a CPU.

Sources: `torch/nn/attention/varlen.py` for the calls; FlashAttention-2 (Dao 2023).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.packed.attention.kernels.merge import merge_, start_gradients
from megatron.packed.attention.plans.plan import Step
from megatron.packed.attention.tile_lists import Int64, TileList
from megatron.packed.errors import TrainingError

DTYPES = (torch.bfloat16, torch.float16)
MAX_WIDTH = 256
WIDTH_MULTIPLE = 8

Rows: TypeAlias = slice | Tensor
"""Rows of a stream: one run, or int64 indices on the device."""


class _Placed(NamedTuple):
    """What a call needs of a tile list, on its device."""

    q_rows: Rows
    k_rows: Rows
    cu_q: Tensor
    cu_k: Tensor


def refusal(dtype: torch.dtype, width: int) -> str | None:
    """Why the flash operators can't compute these heads; None where they can.

    Args:
        dtype: of queries, keys and values.
        width: the larger one of the head widths.
    """
    if dtype not in DTYPES:
        return (
            f"{str(dtype).removeprefix('torch.')} has no flash kernel in torch, only bf16 and fp16"
        )
    if width > MAX_WIDTH:
        return f"heads of width {width} are wider than the {MAX_WIDTH} that flash kernels take"
    return None


class FlashTiles:
    """The tile kernel over a pair of variable-length operators.

    Args:
        forward_operator: called as `aten._flash_attention_forward` is.
        backward_operator: called as `aten._flash_attention_backward` is.
    """

    def __init__(
        self,
        forward_operator: Callable[..., Any] | None = None,
        backward_operator: Callable[..., Any] | None = None,
    ) -> None:
        self._forward = forward_operator or torch.ops.aten._flash_attention_forward.default
        self._backward = backward_operator or torch.ops.aten._flash_attention_backward.default

    def prepare(self, x: Tensor, width: int) -> Tensor:
        """Rows in the form that the operator reads: padded width, last dimension contiguous.

        Args:
            x: `[rows, heads, d]`.
            width: the larger one of the head widths.
        """
        columns = -(-width // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
        if x.shape[2] < columns:
            return F.pad(x, (0, columns - x.shape[2]))
        return x if x.stride(2) == 1 else x.contiguous()

    def forward(
        self,
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
            q: `[rows, heads, w]`, prepared.
            k, v: `[key rows, kv_heads, w]`, prepared.
            step: what to compute.
            softmax_scale: factor of the scores.
            out: `[rows, heads, dv]` fp32; before step 0, anything in rows that it computes.
            lse: `[rows, heads]` fp32; -inf in rows that have seen nothing.
        """
        if step.index == 0 and len(step.lists) > 1:
            out.zero_()  # a list may merge rows of which only some have been written
        for tiles in step.lists:
            placed = _place(tiles, q.device)
            query = _take(q, placed.q_rows)
            o, more = self._forward(
                query,
                _take(k, placed.k_rows),
                _take(v, placed.k_rows),
                placed.cu_q,
                placed.cu_k,
                tiles.max_q,
                tiles.max_k,
                0.0,
                tiles.is_causal,
                False,
                scale=softmax_scale,
                window_size_left=tiles.left,
                window_size_right=tiles.right,
            )[:2]
            if more.shape != query.shape[1::-1]:
                raise TrainingError(
                    f"flash attention of torch {torch.__version__}: log-sum-exps come in shape "
                    f"{tuple(more.shape)} instead of [heads, rows]; install another torch, or use "
                    "--attention-backend local"
                )
            o, more = o[..., : out.shape[2]].to(out.dtype), more.t()
            if tiles.fresh:
                out[placed.q_rows], lse[placed.q_rows] = o, more
            elif isinstance(placed.q_rows, slice):
                merge_(out[placed.q_rows], lse[placed.q_rows], o, more)
            else:
                so_far, total = _take(out, placed.q_rows), _take(lse, placed.q_rows)
                merge_(so_far, total, o, more)
                out[placed.q_rows], lse[placed.q_rows] = so_far, total

    def backward(
        self,
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
            grad: `[rows, heads, w]`, gradient of the merged output, prepared.
            q, k, v: as in `forward`.
            out: `[rows, heads, w]`, the merged output, prepared.
            lse: `[rows, heads]` fp32, the merged log-sum-exp.
            step: what to compute.
            softmax_scale: factor of the scores.
            delta: not used; flash operators make their own.
            dq: `[rows, heads, d]` fp32; before step 0, anything in rows that it computes.
            dk: `[key rows, kv_heads, d]` fp32; written, whatever it holds.
            dv: `[key rows, kv_heads, dv]` fp32; as `dk`.
        """
        start_gradients(step, dq, dk, dv)
        for tiles in step.lists:
            placed = _place(tiles, q.device)
            pieces = self._backward(
                _take(grad, placed.q_rows),
                _take(q, placed.q_rows),
                _take(k, placed.k_rows),
                _take(v, placed.k_rows),
                _take(out, placed.q_rows),
                _take(lse, placed.q_rows).t().contiguous(),
                placed.cu_q,
                placed.cu_k,
                tiles.max_q,
                tiles.max_k,
                0.0,
                tiles.is_causal,
                # State of a dropout that isn't there.
                torch.zeros(2, dtype=torch.uint64, device=q.device),
                torch.empty(0, device=q.device),
                scale=softmax_scale,
                window_size_left=tiles.left,
                window_size_right=tiles.right,
            )
            places = placed.q_rows, placed.k_rows, placed.k_rows
            for whole, rows, piece in zip((dq, dk, dv), places, pieces, strict=True):
                _add(whole, rows, piece[..., : whole.shape[2]].to(whole.dtype))


def _place(tiles: TileList, device: torch.device) -> _Placed:
    """A list's arrays on a device; every layer of a micro-batch asks for the same ones."""
    placed = tiles.device_copies.get(device)
    if placed is None:
        placed = _Placed(
            _rows_on(tiles.q_rows, device),
            _rows_on(tiles.k_rows, device),
            torch.from_numpy(tiles.cu_q).to(device),
            torch.from_numpy(tiles.cu_k).to(device),
        )
        tiles.device_copies[device] = placed
    return placed


def _rows_on(rows: Int64, device: torch.device) -> Rows:
    if np.all(np.diff(rows) == 1):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows).to(device)


def _take(x: Tensor, rows: Rows) -> Tensor:
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def _add(whole: Tensor, rows: Rows, piece: Tensor) -> None:
    if isinstance(rows, slice):
        whole[rows].add_(piece)
    else:
        whole.index_add_(0, rows, piece)
