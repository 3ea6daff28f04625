"""The chunked recurrence against the recurrence, and the filter against a loop."""

from __future__ import annotations

import pytest
import torch

from megatron.packed.attention.delta_rule import causal_convolution, gated_delta_rule


def step_by_step(q, k, v, g, beta):
    """The recurrence as it is written, one token after another."""
    batch, length, heads, width = k.shape
    state = q.new_zeros(batch, heads, width, v.shape[-1])
    outputs = []
    for t in range(length):
        state = state * g[:, t].exp()[..., None, None]
        read = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        correction = beta[:, t, :, None] * (v[:, t] - read)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], correction)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, dim=1)


def inputs(length: int, dtype=torch.float64, decay: float = 0.3):
    q, k = (torch.randn(2, length, 3, 5, dtype=dtype) for _ in range(2))
    k = k / k.norm(dim=-1, keepdim=True)
    v = torch.randn(2, length, 3, 4, dtype=dtype)
    g = -decay * torch.rand(2, length, 3, dtype=dtype)
    beta = torch.rand(2, length, 3, dtype=dtype)
    return [x.requires_grad_() for x in (q, k, v, g, beta)]


@pytest.mark.parametrize("length", [1, 7, 8, 9, 30])
def test_chunks_change_nothing(length: int) -> None:
    given = inputs(length)
    expected, ours = step_by_step(*given), gated_delta_rule(*given, chunk=8)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    weight = torch.randn_like(expected)
    theirs = torch.autograd.grad((expected * weight).sum(), given)
    mine = torch.autograd.grad((ours * weight).sum(), given)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def test_a_decay_that_underflows_stays_finite() -> None:
    given = inputs(40, torch.float32, decay=400.0)
    ours = gated_delta_rule(*given, chunk=16)
    torch.testing.assert_close(ours, step_by_step(*given), rtol=1e-5, atol=1e-6)
    ours.sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in given)


def test_half_precision_is_computed_in_fp32() -> None:
    given = [x.detach().bfloat16() for x in inputs(20)]
    ours = gated_delta_rule(*given, chunk=8)
    assert ours.dtype == torch.float32
    expected = step_by_step(*(x.float() for x in given))
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_a_filter_sees_the_token_and_those_before_it() -> None:
    x, weight = torch.randn(2, 6, 3), torch.randn(3, 4)
    out = causal_convolution(x, weight)
    for t in range(6):
        expected = sum(x[:, t - lag] * weight[:, 3 - lag] for lag in range(min(4, t + 1)))
        torch.testing.assert_close(out[:, t], expected)
