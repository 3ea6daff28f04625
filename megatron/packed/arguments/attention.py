"""How attention projects, scales and masks beyond plain heads: latent attention, windows, gates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.packed.arguments.declare import flag
from megatron.packed.arguments.patterns import parse_pattern
from megatron.packed.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """How attention projects, scales and masks: latent attention, windows, gates."""

    SECTION: ClassVar[str] = "attention"

    multi_latent_attention: bool = flag(
        "Project keys and values through one narrow latent vector per token.", default=False
    )
    q_lora_rank: int | None = flag(
        "Width of the latent queries are projected through; by default they go directly.",
        at_least=1,
    )
    kv_lora_rank: int = flag(
        "Width of the latent keys and values are projected through.", default=32, at_least=1
    )
    qk_head_dim: int = flag(
        "Channels of a latent query or key head without positions.", default=128, at_least=1
    )
    qk_pos_emb_head_dim: int = flag(
        "Channels of a latent query or key head that are rotated; all heads share such keys.",
        default=64,
        at_least=2,
    )
    v_head_dim: int = flag("Channels of a latent value head.", default=128, at_least=1)
    rope_type: str | None = flag(
        "Rotary frequencies of latent attention; by default yarn.", choices=("rope", "yarn")
    )
    cache_mla_latents: bool = flag(
        "Cache latents in place of keys and values.",
        default=False,
        refused="latents are cached in inference alone, and this program trains",
    )
    rotary_scaling_factor: float = flag(
        "How much YaRN stretches the context.", default=1.0, above=0.0
    )
    mscale: float = flag("YaRN's scale of rotated channels.", default=1.0, at_least=0.0)
    mscale_all_dim: float = flag(
        "YaRN's scale of all channels: with latent attention also of the scores.",
        default=0.0,
        at_least=0.0,
    )
    yarn_original_max_position_embeddings: int = flag(
        "Context that YaRN stretches.", default=4096, at_least=1
    )
    yarn_beta_fast: float = flag(
        "YaRN leaves channels alone that turn more often in that context.", default=32.0, above=0.0
    )
    yarn_beta_slow: float = flag(
        "YaRN interpolates channels that turn less often in that context.", default=1.0, above=0.0
    )
    yarn_correction_range_round_to_int: bool = flag(
        "Do not round the channels between which YaRN blends to whole ones.",
        "--no-yarn-correction-range-round-to-int",
        default=True,
        negative=True,
    )
    no_rope_freq: str | None = flag(
        "Layers without rotary embedding: every n-th, or a pattern such as ([0]*3+[1])*2."
    )
    window_size: str | None = flag(
        "Sliding window L,R: a token sees L tokens to its left (-1: all) besides itself; R is 0."
    )
    window_attn_skip_freq: str | None = flag(
        "Layers without the window: every n-th, or a pattern of 1 (window) and 0, such as "
        "([1]*3+[0])*2."
    )
    softmax_type: str = flag(
        "Softmax of attention: plain; with one more key of score 0 and value 0; or of a score that "
        "each head learns.",
        default="vanilla",
        choices=("vanilla", "off-by-one", "learnable"),
    )
    qk_l2_norm: bool = flag(
        "Divide queries and keys of each head by their root mean square, without gains.",
        default=False,
    )
    attention_output_gate: bool = flag(
        "Multiply the output of attention by a sigmoid of the layer's input.", default=False
    )

    def no_rope_layers(self, num_layers: int) -> list[int] | None:
        """1 for every layer without rotary embedding, else 0; None where all have it.

        Args:
            num_layers: of the whole model.

        Raises:
            ConfigurationError: the pattern isn't one, or is of another length.
        """
        if self.no_rope_freq is None:
            return None
        pattern = parse_pattern(self.no_rope_freq)
        if isinstance(pattern, int):
            if pattern < 1 or num_layers % pattern:
                raise ConfigurationError(f"must be a divisor of --num-layers {num_layers}")
            pattern = (*[0] * (pattern - 1), 1) * (num_layers // pattern)
        return list(_zeros_and_ones(pattern, num_layers))

    @property
    def window(self) -> tuple[int, int] | None:
        """`--window-size` as numbers.

        Raises:
            ConfigurationError: it isn't a window of causal attention.
        """
        if self.window_size is None:
            return None
        try:
            left, right = (int(part) for part in self.window_size.strip("()[] ").split(","))
        except ValueError:
            raise ConfigurationError("must be two whole numbers, such as 128,0") from None
        if left < -1 or right not in (-1, 0):
            raise ConfigurationError(
                "must be the tokens that stay visible to the left (-1 for all), and 0 to the "
                "right, where causal attention sees nothing"
            )
        return left, right

    @property
    def window_skip(self) -> int | list[int] | None:
        """`--window-attn-skip-freq` as megatron-core takes it.

        Raises:
            ConfigurationError: it is neither a number nor a pattern.
        """
        if self.window_attn_skip_freq is None:
            return None
        pattern = parse_pattern(self.window_attn_skip_freq)
        return pattern if isinstance(pattern, int) else list(pattern)

    def layer_windows(self, num_layers: int) -> tuple[int | None, ...]:
        """Tokens to the left that each layer sees besides the query itself; None for all of them.

        Args:
            num_layers: of the whole model.

        Raises:
            ConfigurationError: for a window or a pattern that can't be read, or that has another
                number of layers.
        """
        window, skip = self.window, self.window_skip
        if window is None or window[0] < 0:
            return (None,) * num_layers
        if skip is None:
            return (window[0],) * num_layers
        if isinstance(skip, int):
            if skip < 1:
                raise ConfigurationError("must be at least 1")
            return tuple(window[0] if n % skip else None for n in range(1, num_layers + 1))
        return tuple(window[0] if on else None for on in _zeros_and_ones(tuple(skip), num_layers))

    @property
    def query_width(self) -> int:
        """Channels of a latent query or key head."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    @property
    def rotates_by_yarn(self) -> bool:
        """Whether latent attention takes YaRN's frequencies."""
        return self.rope_type != "rope"


def _zeros_and_ones(pattern: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    if len(pattern) != num_layers or not set(pattern) <= {0, 1}:
        raise ConfigurationError(
            f"must be a zero or a one for each of --num-layers {num_layers}, not {len(pattern)} "
            f"numbers up to {max(pattern, default=0)}"
        )
    return pattern
