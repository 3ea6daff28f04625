"""What a run stands on: CUDA with nccl, or a CPU with gloo."""

from __future__ import annotations

from megatron.packed.accelerator.selection import Accelerator, select_accelerator

__all__ = ["Accelerator", "select_accelerator"]
