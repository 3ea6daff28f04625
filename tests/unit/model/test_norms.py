"""Norms against torch's in fp64, and what megatron-core expects of their parameters."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.packed.errors import ConfigurationError
from megatron.packed.model.norms import LayerNorm, RMSNorm, build_norm

EPS = 1e-5
LIMITS = [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 8e-3)]


def config(**changes) -> TransformerConfig:
    return TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, **changes)


def oracle(kind, x, weight, bias):
    if kind is LayerNorm:
        return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


@pytest.mark.parametrize("width", [1, 31, 64, 256])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize(("dtype", "limit"), LIMITS)
@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_matches_the_definition(kind, dtype, limit, zero_centered, width, implementation):
    settings = config(layernorm_zero_centered_gamma=zero_centered, params_dtype=dtype)
    norm = kind(settings, width, eps=EPS)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn(width).to(dtype))
    x = (torch.randn(150, 2, width) * 3 + 1).to(dtype).requires_grad_()
    grad = torch.randn(150, 2, width).to(dtype)
    exact = [x.detach().double().requires_grad_()]
    exact += [p.detach().double().requires_grad_() for p in norm.parameters()]
    bias = exact[2] if kind is LayerNorm else None
    want = oracle(kind, exact[0], exact[1] + 1 if zero_centered else exact[1], bias)
    got = norm(x)
    assert got.dtype == dtype
    results = [got, *torch.autograd.grad(got, [x, *norm.parameters()], grad)]
    wanted = [want, *torch.autograd.grad(want, exact, grad.double())]
    for a, b in zip(results, wanted, strict=True):
        floor = 1.0 if width > 1 else 1e3  # one channel: its gradient is rounding alone
        assert (a.double() - b).norm() <= limit * b.norm().clamp(min=floor)


def test_any_strides_and_leading_shapes(implementation):
    norm = RMSNorm(config(), 16)
    x = torch.randn(4, 16, 3)
    view = x.transpose(1, 2).requires_grad_()
    plain = view.detach().contiguous().requires_grad_()
    for leaf in (view, plain):
        norm(leaf).sum().backward()
    assert torch.equal(norm(view), norm(plain))
    assert torch.equal(view.grad, plain.grad)
    assert norm(torch.empty(0, 1, 16)).shape == (0, 1, 16)


@pytest.mark.parametrize("count", [1, 2])
def test_threads_do_not_change_a_bit(count):
    torch.set_num_threads(count)
    torch.manual_seed(1)
    x = torch.randn(999, 1, 64, requires_grad=True)
    norm = RMSNorm(config(), 64)
    norm(x).square().sum().backward()
    again = RMSNorm(config(), 64)
    torch.set_num_threads(1)
    again(x.detach()).square().sum().backward()
    assert torch.equal(norm.weight.grad, again.weight.grad)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_parameters_carry_the_sequence_parallel_mark(sequence_parallel):
    settings = config()
    settings.sequence_parallel = sequence_parallel
    for kind in (RMSNorm, LayerNorm):
        for parameter in kind(settings, 8).parameters():
            assert parameter.sequence_parallel is sequence_parallel


def test_contract_of_the_constructor():
    norm = LayerNorm(
        config=config(), hidden_size=8, eps=1e-6, persist_layer_norm=True, normalization="LayerNorm"
    )
    assert norm.eps == 1e-6
    assert torch.equal(norm.weight, torch.ones(8))
    assert torch.equal(norm.bias, torch.zeros(8))
    centred = RMSNorm(config(layernorm_zero_centered_gamma=True), 8)
    assert torch.equal(centred.weight, torch.zeros(8))


def test_the_configuration_names_the_norm():
    assert type(build_norm(config(normalization="RMSNorm"), 8)) is RMSNorm
    assert type(build_norm(config(), 8)) is LayerNorm
    with pytest.raises(ConfigurationError, match="--normalization L2Norm"):
        build_norm(config(normalization="L2Norm"), 8)
