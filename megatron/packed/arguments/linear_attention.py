"""Layers that replace attention by a recurrence, as megatron-core has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.packed.arguments.declare import flag


@dataclass(frozen=True, kw_only=True)
class LinearAttentionConfig:
    """Which layers are linear; their sizes are megatron-core's own settings."""

    SECTION: ClassVar[str] = "linear attention"

    experimental_attention_variant: str | None = flag(
        "Replace attention in the layers that --linear-attention-freq names.",
        choices=("gated_delta_net", "dsa"),
    )
    linear_attention_freq: str | None = flag(
        "N: one layer of full attention after N - 1 linear ones; or a pattern of 1 (linear) and 0, "
        "as in ([1]*3+[0]*1)*2."
    )
