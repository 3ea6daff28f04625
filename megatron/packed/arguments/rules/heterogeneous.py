"""Rules on models whose layers differ."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.packed.arguments.config import Config
from megatron.packed.arguments.heterogeneous import LayerShape
from megatron.packed.errors import ConfigurationError


def heterogeneous_layers(config: Config) -> Iterator[str]:
    model, source = config.model, config.heterogeneous.source
    try:
        document = config.heterogeneous.document()
        layers = config.heterogeneous.layers(model.hidden_size, model.num_attention_heads)
    except ConfigurationError as error:
        yield f"{source}: {error}"
        return
    if document is None or layers is None:
        return
    if len(layers) != model.num_layers:
        yield (
            f"{source}: has {len(layers)} block_configs for --num-layers {model.num_layers}; "
            "change one of them"
        )
    for field, flag, asked in (
        ("num_hidden_layers", "--num-layers", model.num_layers),
        ("hidden_size", "--hidden-size", model.hidden_size),
        ("num_attention_heads", "--num-attention-heads", model.num_attention_heads),
        ("rope_theta", "--rotary-base", model.rotary_base),
        (
            "tie_word_embeddings",
            "--untie-embeddings-and-output-weights",
            not model.untie_embeddings_and_output_weights,
        ),
        ("hidden_act", "--swiglu", "silu" if model.swiglu else "another"),
    ):
        if document.get(field, asked) != asked:
            yield f"{source}: says {field} {document[field]}, which {flag} contradicts"
    for number, layer in enumerate(layers, 1):
        for problem in _problems(layer, config):
            yield f"{source}: layer {number} {problem}"


def _problems(layer: LayerShape, config: Config) -> Iterator[str]:
    heads, size = config.model.num_attention_heads, config.parallel.tensor_model_parallel_size
    groups, width = layer.query_groups, layer.ffn_hidden_size
    if groups is not None and (heads % groups or (groups % size and size % groups)):
        yield (
            f"has {groups} query groups, which must divide {heads} attention heads and be a "
            f"multiple or a divisor of --tensor-model-parallel-size {size}"
        )
    if width is not None and width % size:
        yield f"is {width} wide, no multiple of --tensor-model-parallel-size {size}"


def layers_of_one_kind(config: Config) -> Iterator[str]:
    if config.heterogeneous == type(config.heterogeneous)():
        return
    for flag, given in (
        ("--multi-latent-attention", config.attention.multi_latent_attention),
        ("--mtp-num-layers", config.loss.mtp_depths > 0),
        ("--num-experts", config.moe.num_experts is not None),
        (
            "--experimental-attention-variant",
            config.linear_attention.experimental_attention_variant,
        ),
    ):
        if given:
            yield (
                f"{config.heterogeneous.source}: describes plain attention and dense feed-forward "
                f"layers; leave {flag} out"
            )


RULES = (heterogeneous_layers, layers_of_one_kind)
