"""Rules on layers that replace attention by a recurrence."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.packed.arguments.config import Config
from megatron.packed.errors import ConfigurationError

VARIANT = "--experimental-attention-variant"


def sparse_attention(config: Config) -> Iterator[str]:
    if config.linear_attention.experimental_attention_variant == "dsa":
        yield (
            f"{VARIANT} dsa is refused: it attends to the keys that an indexer of its own picks, "
            "which isn't part of this build; leave it out for exact attention to all of them"
        )


def linear_layers(config: Config) -> Iterator[str]:
    linear = config.linear_attention
    if linear.experimental_attention_variant != "gated_delta_net":
        if linear.linear_attention_freq is not None:
            yield (
                f"--linear-attention-freq {linear.linear_attention_freq}: needs {VARIANT} "
                "gated_delta_net; add it, or leave this out"
            )
        return
    try:
        linear.linear_layers(config.model.num_layers)
    except ConfigurationError as error:
        yield f"--linear-attention-freq {linear.linear_attention_freq}: {error}"


def linear_heads(config: Config) -> Iterator[str]:
    if config.linear_attention.experimental_attention_variant != "gated_delta_net":
        return
    keys = config.get("linear_num_key_heads")
    values = config.get("linear_num_value_heads")
    size = config.parallel.tensor_model_parallel_size
    if values % keys:
        yield (
            f"--linear-num-value-heads {values}: must be a multiple of --linear-num-key-heads "
            f"{keys}; change one of them"
        )
    if keys % size:
        yield (
            f"--linear-num-key-heads {keys}: must be a multiple of --tensor-model-parallel-size "
            f"{size}; change one of them"
        )


def linear_layer_surroundings(config: Config) -> Iterator[str]:
    if config.linear_attention.experimental_attention_variant != "gated_delta_net":
        return
    if config.parallel.context_parallel_size > 1:
        yield (
            f"{VARIANT} gated_delta_net: a recurrence isn't spread over "
            f"--context-parallel-size {config.parallel.context_parallel_size}; use 1"
        )


RULES = (sparse_attention, linear_layers, linear_heads, linear_layer_surroundings)
