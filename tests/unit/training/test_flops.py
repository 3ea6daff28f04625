from __future__ import annotations

import pytest
import torch

from megatron.packed.training.flops import FlopsCounter, measure_gemm_peak

from .flags import config

PADDED_VOCAB = 128


def _brute_force(flags: str, lengths: list[int]) -> int:
    """Multiply and add token by token, pair by pair; backward costs twice the forward pass."""
    model = config(flags).model
    head, hidden, ffn = model.kv_channels, model.hidden_size, model.ffn_hidden_size
    total = 0
    for length in lengths:
        for position in range(length):
            for _ in range(model.num_layers):
                for _ in range(model.num_attention_heads):
                    total += 2 * hidden * head  # query
                    total += 2 * head * hidden  # its part of the output projection
                    for _ in range(position + 1):
                        total += 2 * head + 2 * head  # score, and weighted value
                for _ in range(model.num_query_groups):
                    total += 2 * (2 * hidden * head)  # key and value
                total += (3 if model.swiglu else 2) * 2 * hidden * ffn
            total += 2 * hidden * PADDED_VOCAB
    return 3 * total


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--swiglu --ffn-hidden-size 96",
        "--group-query-attention --num-query-groups 2",
        "--group-query-attention --num-query-groups 1 --kv-channels 8 --num-layers 1",
    ],
)
@pytest.mark.parametrize("lengths", [[1], [7], [3, 1, 5, 1], []])
def test_count_equals_brute_force(flags: str, lengths: list[int]) -> None:
    counter = FlopsCounter.from_config(config(flags).model, PADDED_VOCAB)
    tokens, squares = sum(lengths), sum(length**2 for length in lengths)
    assert counter.count(tokens, squares) == _brute_force(flags, lengths)


def test_attention_follows_segments_not_the_pack() -> None:
    counter = FlopsCounter.from_config(config().model, PADDED_VOCAB)
    whole, pieces = counter.count(4096, 4096**2), counter.count(4096, 64 * 64**2)
    assert whole - pieces == (4096**2 - 64 * 64**2) // 2 * counter.per_pair


def test_the_peak_is_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    peak = measure_gemm_peak(torch.device("cpu"), torch.float32, size=64, repeats=3)
    assert 1e6 < peak < 1e15
