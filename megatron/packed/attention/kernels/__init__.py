"""Kernels: segments -> causal attention output, differentiable. One file per device kind."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megatron.packed.attention.kernels import cpu, portable
from megatron.packed.attention.segments import SegmentLayout

Kernel = Callable[[Tensor, Tensor, Tensor, SegmentLayout, float], Tensor]


def select_kernel(query: Tensor) -> Kernel:
    """The kernel for the device that holds ``query``."""
    return cpu.segment_attention if query.device.type == "cpu" else portable.segment_attention
