"""Dropout on attention probabilities against loops, with masks that the test draws."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.packed.attention.kernels import cpu, dropout
from megatron.packed.attention.segments import build_segment_layout

SCALE = 0.3
LAYOUT = build_segment_layout([0, 3, 10, 17], [3, 5, 6, 1], rows=2, row_length=10)


def inputs(heads: int = 4, kv_heads: int = 2) -> list[torch.Tensor]:
    shapes = [(2, 10, heads, 8), (2, 10, kv_heads, 8), (2, 10, kv_heads, 6)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def outside() -> torch.Tensor:
    held = torch.zeros(20, dtype=torch.bool)
    for start, length in zip(LAYOUT.starts, LAYOUT.lengths, strict=True):
        held[start : start + length] = True
    return ~held.view(2, 10)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_without_drops_it_is_the_exact_attention(kv_heads: int) -> None:
    q, k, v = inputs(kv_heads=kv_heads)
    weight = torch.randn(2, 10, 4, 6, dtype=torch.float64)
    exact = cpu.segment_attention(q, k, v, LAYOUT, SCALE)
    expected = torch.autograd.grad((exact * weight).sum(), (q, k, v))
    ours = dropout.segment_attention(q, k, v, LAYOUT, SCALE, rate=0.0)
    assert not ours[outside()].any()
    torch.testing.assert_close(ours, exact, rtol=0, atol=1e-14)
    gradients = torch.autograd.grad((ours * weight).sum(), (q, k, v))
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize("window", [None, 2])
def test_drops_act_on_normalised_probabilities(monkeypatch, window: int | None) -> None:
    """A loop over queries and keys with the masks that were drawn, scaled by 1 / (1 - rate)."""
    rate, masks = 0.4, []

    def drop(probabilities: torch.Tensor, p: float) -> torch.Tensor:
        assert p == rate
        masks.append((torch.rand_like(probabilities) >= p).to(probabilities) / (1 - p))
        return probabilities * masks[-1]

    monkeypatch.setattr(dropout.F, "dropout", drop)
    q, k, v = inputs()
    out = dropout.segment_attention(q, k, v, LAYOUT, SCALE, rate, window)
    q, k, v = (x.detach().flatten(0, 1) for x in (q, k, v))
    out = out.flatten(0, 1)
    assert len(masks) == len(LAYOUT.starts)
    for start, length, mask in zip(LAYOUT.starts, LAYOUT.lengths, masks, strict=True):
        assert mask.shape == (2, 2, length, length)
        for head in range(4):
            group, member = divmod(head, 2)
            for query in range(length):
                first = 0 if window is None else max(0, query - window)
                keys = range(first, query + 1)
                scores = [
                    math.exp(SCALE * float(q[start + query, head] @ k[start + key, group]))
                    for key in keys
                ]
                expected = sum(
                    score / sum(scores) * mask[group, member, query, key] * v[start + key, group]
                    for score, key in zip(scores, keys, strict=True)
                )
                torch.testing.assert_close(out[start + query, head], expected)


def test_on_average_nothing_changes() -> None:
    q, k, v = (x.detach() for x in inputs())
    exact = cpu.segment_attention(q, k, v, LAYOUT, SCALE)
    draws = [dropout.segment_attention(q, k, v, LAYOUT, SCALE, 0.5) for _ in range(2000)]
    error = torch.stack(draws).mean(0) - exact
    spread = torch.stack(draws).std(0) / math.sqrt(len(draws))
    assert (error.abs() <= 6 * spread + 1e-12).all()
    assert spread.max() > 1e-3


def test_what_lies_outside_segments_never_matters() -> None:
    q, k, v = (x.detach() for x in inputs())
    broken = [x.clone() for x in (q, k, v)]
    for x in broken:
        x[outside()] = torch.nan
        x.requires_grad_()
    out = dropout.segment_attention(*broken, LAYOUT, SCALE, 0.5)
    out.sum().backward()
    for x in (out, *(x.grad for x in broken)):
        assert torch.isfinite(x).all() and not x[outside()].any()


def test_half_precision_is_computed_in_fp32() -> None:
    q, k, v = (x.detach().bfloat16() for x in inputs())
    out = dropout.segment_attention(q, k, v, LAYOUT, SCALE, 0.0)
    exact = cpu.segment_attention(q.float(), k.float(), v.float(), LAYOUT, SCALE)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), exact, rtol=8e-3, atol=8e-3)
