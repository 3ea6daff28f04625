"""Layers that replace attention by a recurrence, as megatron-core has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.packed.arguments.declare import flag
from megatron.packed.arguments.patterns import parse_pattern
from megatron.packed.errors import ConfigurationError


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

    def linear_layers(self, num_layers: int) -> tuple[bool, ...]:
        """Whether each layer's attention is replaced.

        Args:
            num_layers: Of the whole model.

        Raises:
            ConfigurationError: The pattern isn't one, or is of another length.
        """
        if self.experimental_attention_variant is None:
            return (False,) * num_layers
        if self.linear_attention_freq is None:
            raise ConfigurationError("is needed to say which layers are linear")
        pattern = parse_pattern(self.linear_attention_freq)
        if isinstance(pattern, int):
            if pattern < 1:
                raise ConfigurationError("must be at least 1")
            return tuple((number + 1) % pattern != 0 for number in range(num_layers))
        if len(pattern) != num_layers or not set(pattern) <= {0, 1}:
            raise ConfigurationError(f"must have a 0 or 1 for each of --num-layers {num_layers}")
        return tuple(map(bool, pattern))
