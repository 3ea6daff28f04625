from __future__ import annotations

import functools
import json
import shlex

import numpy as np
import pytest
import torch

from megatron.packed.training.flops import FlopsCounter, attended_pairs, measure_gemm_peak

from . import flags as command_lines

config = functools.cache(command_lines.config)
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
                if "gated_delta_net" in flags and (layer + 1) % 2:
                    total += _recurrence(flags) + _feed_forward(flags, layer)
                    continue
                narrow = "window" in flags and ("skip" not in flags or layer % 2 == 0)
                total += attend(flags, min(position + 1, 4) if narrow else position + 1)
                total += _feed_forward(flags, layer)
            total += 2 * hidden * PADDED_VOCAB
    return 3 * total


def _feed_forward(flags: str, layer: int) -> int:
    """One token through a layer's dense or chosen experts."""
    model = config(flags).model
    matrices, hidden = 3 if "glu" in flags else 2, model.hidden_size
    if "experts" not in flags or ("moe-layer-freq" in flags and layer == 0):
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


def _recurrence(flags: str) -> int:
    """One token through Gated DeltaNet with the widths of `LINEAR`; the state is 6 by 10."""
    hidden = config(flags).model.hidden_size
    total = 0
    for _ in range(2):  # heads of keys: a query and a key, each channel through 3 taps
        total += 2 * (2 * hidden * 6 + 2 * 6 * 3)
    for _ in range(4):  # heads of values: value, gate, decay, beta; only the value is filtered
        total += 2 * hidden * (10 + 10 + 1 + 1) + 2 * 10 * 3
        total += 2 * 6 * 6  # the key with itself
        total += 2 * 6 * 10  # what the state holds for the key
        total += 2 * 6 * 10  # its correction, key by value
        total += 2 * 6 * 10  # what the query reads
        total += 2 * 10 * hidden
    return total


LINEAR = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 6 "
    "--linear-value-head-dim 10 --linear-conv-kernel-dim 3 "
)
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
        LINEAR,
        LINEAR + EXPERTS,
    ],
)
@pytest.mark.parametrize("lengths", [[1], [7], [3, 1, 5, 1], []])
def test_count_equals_brute_force(flags: str, lengths: list[int]) -> None:
    counter = FlopsCounter.from_config(config(flags), PADDED_VOCAB)
    tokens, squares = sum(lengths), sum(length**2 for length in lengths)
    narrow = attended_pairs(np.array(lengths, dtype=np.int64), 3)
    assert counter.count(tokens, squares, narrow) == _brute_force(flags, lengths)


def test_a_recurrence_of_square_states_counts_as_upstreams() -> None:
    """Its formula, num_floating_point_operations, knows the width of values alone."""
    hidden, width, keys, values, taps = 64, 8, 2, 4, 4
    flags = LINEAR.replace("-dim 6", "-dim 8").replace("-dim 10", "-dim 8")
    flags = flags.replace("freq 2", "freq ([1]*4)").replace("kernel-dim 3", "kernel-dim 4")
    term = hidden * 2 * (keys * width + values * width + values)
    term += taps * (2 * keys * width + values * width)
    term += values * width**2 * 4 + hidden * values * width
    dense = 2 * hidden * 4 * hidden
    counter = FlopsCounter.from_config(config(flags), PADDED_VOCAB)
    assert counter.per_token == 6 * (4 * (term + dense) + hidden * PADDED_VOCAB)
    assert counter.per_pair == 0


def test_predictions_after_a_recurrence_attend() -> None:
    flags = LINEAR.replace("freq 2", "freq ([1]*4)")
    plain = FlopsCounter.from_config(config(flags), PADDED_VOCAB)
    deeper = FlopsCounter.from_config(config(flags + "--mtp-num-layers 1"), PADDED_VOCAB)
    assert (plain.per_pair, deeper.per_pair) == (0, 6 * 2 * 64)


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
