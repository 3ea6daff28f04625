"""Fewer and smaller blocks in a description of layers that differ (`block_configs`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.packed.arguments.heterogeneous import HeterogeneousConfig, LayerShape
from megatron.packed.cases.case import Value
from megatron.packed.cases.layers import resample
from megatron.packed.cases.parallel import CONTEXT, TENSOR, exchanges_heads, size


@dataclass(frozen=True)
class Widths:
    """What a description of layers is measured against.

    Attributes:
        hidden: hidden size.
        heads: attention heads.
        fewest_groups: query groups of layers that share keys and values among some heads.
        divisor: which widths of feed-forward layers are multiples of.
    """

    hidden: int
    heads: int
    fewest_groups: int = 2
    divisor: int = 2


def widths(args: Mapping[str, Value]) -> Widths:
    """Return what a run's flags say of widths.

    Args:
        args: value of each flag.
    """
    tensor = size(args, TENSOR)
    return Widths(
        hidden=size(args, "--hidden-size"),
        heads=size(args, "--num-attention-heads"),
        fewest_groups=max(2, tensor * size(args, CONTEXT)) if exchanges_heads(args) else 2,
        divisor=tensor,
    )


def shrink_description(text: str, layers: int, large: Widths, small: Widths) -> str:
    """Return a description of a small model's layers, with blocks of every kind if they fit.

    Heads without sharing, one group for all, no attention, none of the feed-forward part, or a
    linear layer in place of either stay what they are; widths shrink with the hidden size.

    Args:
        text: JSON, as the flag takes it.
        layers: of the small model.
        large: of the described model.
        small: of the small model.

    Raises:
        ConfigurationError: the text describes no layers.
    """
    described = HeterogeneousConfig(heterogeneous_layers_config_encoded_json=text)
    document = dict(described.document() or {})
    shapes = described.layers(large.hidden, large.heads) or ()
    blocks = [json.dumps(_block(shape, large, small)) for shape in shapes]
    document["block_configs"] = [json.loads(block) for block in resample(blocks, layers)]
    for name, value in (
        ("num_hidden_layers", layers),
        ("hidden_size", small.hidden),
        ("num_attention_heads", small.heads),
    ):
        if name in document:
            document[name] = value
    return json.dumps(document)


def stand_in(layers: int, small: Widths) -> str:
    """Return a description with layers of every kind, for one that can't be read here.

    Args:
        layers: of the small model.
        small: of the small model.
    """
    kinds = [
        LayerShape(True, False, small.heads, True, False, 2 * small.hidden),
        LayerShape(False, False, None, True, False, small.hidden),
        LayerShape(True, False, 2, True, True, None),
        LayerShape(True, True, None, False, False, None),
    ]
    blocks = [_block(shape, small, small) for shape in resample(kinds, layers)]
    return json.dumps({"block_configs": blocks})


def _block(shape: LayerShape, large: Widths, small: Widths) -> Mapping[str, Any]:
    groups, width = shape.query_groups, shape.ffn_hidden_size
    if groups is not None and groups > 1:
        wanted = max(small.fewest_groups, groups * small.heads // large.heads)
        groups = max(n for n in range(1, wanted + 1) if small.heads % n == 0)
    if width is not None:
        unit = small.divisor * 4
        width = unit * max(1, round(width * small.hidden / large.hidden / unit))
    return {
        "attention": {
            "no_op": not shape.attention,
            "replace_with_linear": shape.linear_attention,
            "num_query_groups": groups,
        },
        "ffn": {
            "no_op": not shape.feed_forward,
            "replace_with_linear": shape.linear_feed_forward,
            "ffn_hidden_size": width,
        },
    }
