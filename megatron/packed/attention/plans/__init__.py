"""Context-parallel algorithms as plans: pure functions of boundaries, one file each."""

from __future__ import annotations

from megatron.packed.attention.plans.build import (
    PLAN_KINDS,
    build_attention_plan,
    default_partition,
)
from megatron.packed.attention.plans.dispatch import effective_chunk_size
from megatron.packed.attention.plans.layers import LayerPlans, PlanKey
from megatron.packed.attention.plans.plan import (
    AttentionPlan,
    HeadExchange,
    PlanReport,
    Receive,
    Send,
    Step,
    report,
)

__all__ = [
    "PLAN_KINDS",
    "AttentionPlan",
    "HeadExchange",
    "LayerPlans",
    "PlanKey",
    "PlanReport",
    "Receive",
    "Send",
    "Step",
    "build_attention_plan",
    "default_partition",
    "effective_chunk_size",
    "report",
]
