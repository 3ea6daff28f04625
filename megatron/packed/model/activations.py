"""SwiGLU as one pass forward and one backward, where megatron-core's unfused path takes ten.

Source: GLU variants (https://arxiv.org/abs/2002.05202);
``megatron/core/fusions/fused_bias_swiglu.py`` (0.16.1), whose function of the same name this
replaces inside `MLP` (see `patches`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl as upstream_bias_swiglu
from torch import Tensor

from megatron.packed.accelerator import cpu_ops


def swiglu(x: Tensor) -> Tensor:
    """``silu(a) * b`` for the last dimension ``[a | b]``.

    Args:
        x: ``[..., 2 * width]``, any floating dtype.

    Returns:
        ``[..., width]`` in the same dtype.
    """
    if cpu_ops.suitable(x) is not None:
        return _SwiGLU.apply(x)
    gate, linear = x.chunk(2, dim=-1)
    return F.silu(gate) * linear


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)² (Primer, So et al. 2021)."""
    return F.relu(x).square()


def quick_gelu(x: Tensor) -> Tensor:
    """x · sigmoid(1.702 x) (Hendrycks and Gimpel 2016)."""
    return x * torch.sigmoid(1.702 * x)


def bias_swiglu_impl(
    x: Tensor, bias: Tensor | None, fp8_input_store: bool = False, cpu_offload_input: bool = False
) -> Tensor:
    """megatron-core's fused bias and SwiGLU, through our kernel where it applies.

    Args:
        x: ``[..., 2 * width]``.
        bias: ``[2 * width]`` or None.
        fp8_input_store: Keep the input in FP8 for backward; goes to megatron-core's function.
        cpu_offload_input: Offload the saved input; goes to megatron-core's function.

    Returns:
        ``[..., width]``.
    """
    if fp8_input_store or cpu_offload_input or cpu_ops.suitable(x) is None:
        return upstream_bias_swiglu(x, bias, fp8_input_store, cpu_offload_input)
    return swiglu(x if bias is None else x + bias)


class _SwiGLU(torch.autograd.Function):
    """fp32 on CPU; saves its input alone."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        ctx.save_for_backward(x)
        out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        _call("swiglu", x, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        _call("swiglu_backward", grad.contiguous(), x, dx)
        return dx


def _call(name: str, first: Tensor, second: Tensor, *rest: Tensor) -> None:
    """Run a kernel of the extension over rows of ``width`` outputs."""
    width = min(first.shape[-1], second.shape[-1])
    rows = min(first.numel(), second.numel()) // max(width, 1)
    pointers = [x.data_ptr() for x in (first, second, *rest)]
    getattr(cpu_ops.load(), name)(*pointers, rows, width, cpu_ops.threads())
