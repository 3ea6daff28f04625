"""SwiGLU against its definition in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.packed.model.activations import bias_swiglu_impl, swiglu


def oracle(x):
    gate, linear = x.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * linear


@pytest.mark.parametrize("width", [1, 17, 64, 100])
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 8e-3)]
)
def test_matches_the_definition(dtype, limit, width, implementation):
    x = (torch.randn(37, 2, 2 * width) * 4).to(dtype).requires_grad_()
    grad = torch.randn(37, 2, width).to(dtype)
    exact = x.detach().double().requires_grad_()
    got, want = swiglu(x), oracle(exact)
    assert got.dtype == dtype
    pairs = [(got, want)]
    (dx,), (dx_exact,) = (
        torch.autograd.grad(got, x, grad),
        torch.autograd.grad(want, exact, grad.double()),
    )
    pairs.append((dx, dx_exact))
    for a, b in pairs:
        assert (a.double() - b).norm() <= limit * b.norm()


def test_extremes_and_garbage(implementation):
    gate = torch.tensor([-1e4, -100.0, -87.5, 0.0, 87.5, 100.0, 1e4, float("nan")])
    x = torch.stack((gate, torch.ones(8)), dim=-1).requires_grad_()
    out = swiglu(x)
    torch.testing.assert_close(out.squeeze(-1), F.silu(gate), equal_nan=True, atol=1e-30, rtol=1e-6)
    (dx,) = torch.autograd.grad(out.sum(), x)
    assert torch.isfinite(dx[:7]).all()
    assert torch.isnan(dx[7, 0])


@pytest.mark.parametrize("biased", [False, True])
def test_stands_in_for_the_fused_function(biased, implementation):
    x = torch.randn(5, 3, 16, requires_grad=True)
    bias = torch.randn(16, requires_grad=True) if biased else None
    leaves = [x, bias] if biased else [x]
    got = bias_swiglu_impl(x, bias)
    want = oracle(x + bias if biased else x)
    torch.testing.assert_close(got, want)
    grad = torch.randn_like(got)
    gradients = (torch.autograd.grad(y, leaves, grad) for y in (got, want))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_strides(implementation):
    x = torch.randn(6, 16, 5).transpose(1, 2)
    torch.testing.assert_close(swiglu(x), swiglu(x.contiguous()), atol=1e-7, rtol=1e-6)
