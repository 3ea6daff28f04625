"""Kernels: tiles, or whole segments -> attention and its gradients. One file per device kind."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from megatron.packed.attention.kernels import cuda, tiles_cpu, tiles_portable
from megatron.packed.attention.plans.plan import Step


class TileKernel(Protocol):
    """What computes a step's tiles; `tiles_cpu.py` says what the arguments are."""

    def prepare(self, x: Tensor, width: int, /) -> Tensor:
        """Rows in the form that the kernel reads."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: Step,
        softmax_scale: float,
        out: Tensor,
        lse: Tensor,
        /,
    ) -> None:
        """Attend and merge into `out` and `lse`."""

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
        /,
    ) -> None:
        """Add gradients."""


_FLASH = cuda.FlashTiles()


def select_tile_kernel(device: str, dtype: torch.dtype, width: int) -> TileKernel:
    """The kernel for tiles.

    Args:
        device: type of the device that holds the tensors.
        dtype: theirs.
        width: the larger one of the head widths.
    """
    if device == "cpu":
        return tiles_cpu
    reason = f"there are no kernels for {device}"
    if device == "cuda":
        refused = cuda.refusal(dtype, width)
        if refused is None:
            return _FLASH
        reason = refused
    _warn_once(f"attention takes its exact and slow path in plain operations: {reason}")
    return tiles_portable


@lru_cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)
