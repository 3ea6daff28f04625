"""Descriptions of layers that break one rule each; `test_rules.py` runs them."""

from __future__ import annotations

import json
import shlex
from typing import Any

RULE = "heterogeneous_layers"
PLAIN = {"attention": {"num_query_groups": 4}, "ffn": {"ffn_hidden_size": 96}}


def described(blocks: Any, **document: Any) -> str:
    """Flags that describe layers."""
    text = json.dumps({"block_configs": blocks, **document})
    return f"--heterogeneous-layers-config-encoded-json {shlex.quote(text)}"


def with_last(**parts: Any) -> str:
    """Three plain layers and one with other parts."""
    return described([PLAIN, PLAIN, PLAIN, {**PLAIN, **parts}])


# (rule, flags that break it and nothing else, what the message must hold, WORLD_SIZE)
BROKEN_LAYERS = [
    (RULE, "--heterogeneous-layers-config-path /no/such", "config-path /no/such: can't be read", 1),
    (RULE, "--heterogeneous-layers-config-encoded-json {", "must be JSON", 1),
    (RULE, "--heterogeneous-layers-config-encoded-json {}", "a list block_configs", 1),
    (RULE, described([PLAIN] * 3), "has 3 block_configs for --num-layers 4", 1),
    (RULE, described([PLAIN] * 4, hidden_size=32), "says hidden_size 32, which --hidden-size", 1),
    (RULE, described([PLAIN] * 4, hidden_act="silu"), "says hidden_act silu, which --swiglu", 1),
    (RULE, with_last(attention={}), "layer 4 of block_configs: 'n_heads_in_group'", 1),
    (RULE, with_last(attention={"n_heads_in_group": 3}), "n_heads_in_group 3 doesn't divide 4", 1),
    (RULE, with_last(ffn={"ffn_hidden_size": 0}), "the ffn has size 0", 1),
    (RULE, with_last(ffn={"ffn_hidden_size": 8, "no_op": True}), "has a size, but there is", 1),
    (
        RULE,
        with_last(ffn={"ffn_mult": None, "no_op": True, "replace_with_linear": True}),
        "both no_op and replace_with_linear",
        1,
    ),
    (RULE, with_last(attention={"num_query_groups": 3}), "layer 4 has 3 query groups", 1),
    (
        RULE,
        with_last(ffn={"ffn_hidden_size": 97}) + " --tensor-model-parallel-size 2",
        "layer 4 is 97 wide",
        2,
    ),
    (
        "layers_of_one_kind",
        described([PLAIN] * 4) + " --multi-latent-attention",
        "leave --multi-latent-attention out",
        1,
    ),
    (
        "layers_of_one_kind",
        described([PLAIN] * 4) + " --mtp-num-layers 1 --use-packed-sequence",
        "leave --mtp-num-layers out",
        1,
    ),
]
