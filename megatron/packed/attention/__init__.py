"""Attention over packed sequences: plans for context parallelism, the executor, kernels.

Plans are made with numpy alone; `packed_attention` and the communicators need torch and load on
first use, so that planning in a data-loader worker or a tool stays light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.packed.attention.plans import PLAN_KINDS, AttentionPlan, build_attention_plan

if TYPE_CHECKING:
    from megatron.packed.attention.executor import packed_attention
    from megatron.packed.attention.in_process import InProcessNetwork
    from megatron.packed.attention.process_group import ProcessGroupCommunicator
    from megatron.packed.attention.simulation import simulate_attention

__all__ = [
    "PLAN_KINDS",
    "AttentionPlan",
    "InProcessNetwork",
    "ProcessGroupCommunicator",
    "build_attention_plan",
    "packed_attention",
    "simulate_attention",
]

_TORCH_NAMES = {
    "InProcessNetwork": "in_process",
    "ProcessGroupCommunicator": "process_group",
    "packed_attention": "executor",
    "simulate_attention": "simulation",
}


def __getattr__(name: str) -> Any:
    if name in _TORCH_NAMES:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_TORCH_NAMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
