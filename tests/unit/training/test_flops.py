from __future__ import annotations

import json
import shlex

import numpy as np
import pytest
import torch

from megatron.packed.training.flops import FlopsCounter, attended_pairs, measure_gemm_peak

from .flags import config

PADDED_VOCAB = 128


def _brute_force(flags: str, lengths: list[int]) -> int:
    """Multiply and add token by token, pair by pair; backward costs twice the forward pass."""
    model = config(flags).model
    hidden = model.hidden_size
    total = 0
    for length in lengths:
        for position in range(length):
            for layer in range(model.num_layers):
                attend = _latent_heads if "latent" in flags else _plain_heads
                narrow = "window" in flags and ("skip" not in flags or layer % 2 == 0)
                total += attend(flags, min(position + 1, 4) if narrow else position + 1)
                total += _feed_forward(flags, layer)
            total += 2 * hidden * PADDED_VOCAB
    return 3 * total


def _feed_forward(flags: str, layer: int) -> int:
    """One token through a layer's dense or chosen experts."""
    model = config(flags).model
    matrices, hidden = 3 if "glu" in flags else 2, model.hidden_size
    if "experts" not in flags or ("freq" in flags and layer == 0):
        return matrices * 2 * hidden * model.ffn_hidden_size
    total = 0
    for _ in range(4):
        total += 2 * hidden  # a logit
    for _ in range(3):
        total += matrices * 2 * hidden * 24
    if "shared" in flags:
        total += matrices * 2 * hidden * 40 + 2 * hidden
    return total


def _plain_heads(flags: str, keys: int) -> int:
    """One token's attention over some keys."""
    model, total = config(flags).model, 0
    head, hidden = model.kv_channels, model.hidden_size
    for _ in range(model.num_attention_heads):
        total += 2 * hidden * head  # query
        total += 2 * hidden * head if "output-gate" in flags else 0
        total += 2 * head * hidden  # its part of the output projection
        for _ in range(keys):
            total += 2 * head + 2 * head  # score, and weighted value
    for _ in range(model.num_query_groups):
        total += 2 * (2 * hidden * head)  # key and value
    return total


def _latent_heads(flags: str, keys: int) -> int:
    """The same with the widths of `LATENT`."""
    model = config(flags).model
    hidden, heads = model.hidden_size, model.num_attention_heads
    total = 2 * hidden * (12 + 6)  # kv latent, shared key channels
    total += 2 * hidden * 20 if "q-lora" in flags else 0
    for _ in range(heads):
        total += 2 * (20 if "q-lora" in flags else hidden) * (10 + 6)  # query
        total += 2 * 12 * (10 + 14)  # key and value
        total += 2 * 14 * hidden
        total += keys * (2 * (10 + 6) + 2 * 14)
    return total


LATENT = (
    "--multi-latent-attention --kv-lora-rank 12 --qk-head-dim 10 --qk-pos-emb-head-dim 6 "
    "--v-head-dim 14 --num-layers 2 "
)


EXPERTS = "--num-experts 4 --moe-router-topk 3 --moe-ffn-hidden-size 24 --disable-bias-linear "


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--swiglu --ffn-hidden-size 96",
        "--group-query-attention --num-query-groups 2",
        "--group-query-attention --num-query-groups 1 --kv-channels 8 --num-layers 1",
        "--quick-geglu",
        "--attention-output-gate --kv-channels 8",
        "--window-size 3,0",
        "--window-size 3,0 --window-attn-skip-freq 2 --num-layers 3",
        EXPERTS,
        EXPERTS + "--swiglu --num-layers 3 --moe-layer-freq ([0]*1+[1]*2)",
        EXPERTS + "--moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate",
        LATENT,
        LATENT + "--q-lora-rank 20",
    ],
)
@pytest.mark.parametrize("lengths", [[1], [7], [3, 1, 5, 1], []])
def test_count_equals_brute_force(flags: str, lengths: list[int]) -> None:
    counter = FlopsCounter.from_config(config(flags), PADDED_VOCAB)
    tokens, squares = sum(lengths), sum(length**2 for length in lengths)
    narrow = attended_pairs(np.array(lengths, dtype=np.int64), 3)
    assert counter.count(tokens, squares, narrow) == _brute_force(flags, lengths)


def test_attention_follows_segments_not_the_pack() -> None:
    counter = FlopsCounter.from_config(config(), PADDED_VOCAB)
    whole, pieces = counter.count(4096, 4096**2), counter.count(4096, 64 * 64**2)
    assert whole - pieces == (4096**2 - 64 * 64**2) // 2 * counter.per_pair


def test_the_peak_is_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    peak = measure_gemm_peak(torch.device("cpu"), torch.float32, size=64, repeats=3)
    assert 1e6 < peak < 1e15


def test_layers_that_differ_count_by_themselves() -> None:
    layers = [
        {"attention": {"num_query_groups": 2}, "ffn": {"ffn_hidden_size": 96}},
        {
            "attention": {"num_query_groups": None, "no_op": True},
            "ffn": {"ffn_mult": None, "replace_with_linear": True},
        },
        {
            "attention": {"num_query_groups": None, "replace_with_linear": True},
            "ffn": {"ffn_mult": None, "no_op": True},
        },
        {"attention": {"num_query_groups": 4}, "ffn": {"ffn_mult": 2.0}},
    ]
    text = shlex.quote(json.dumps({"block_configs": layers}))
    flags = f"--num-layers 4 --heterogeneous-layers-config-encoded-json {text}"
    counter = FlopsCounter.from_config(config(flags), PADDED_VOCAB)
    heads, square = 4 * 16, 64 * 64
    first = 64 * (heads + 2 * 2 * 16) + square + 2 * 64 * 96
    last = 64 * (heads + 2 * 4 * 16) + square + 2 * 64 * 256  # int(2 * 2 * 64 / 3), up to 256
    assert counter.per_token == 6 * (first + square + square + last + 64 * PADDED_VOCAB)
    assert counter.per_pair == 6 * 2 * (2 * heads)
