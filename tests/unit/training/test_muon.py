"""Muon's update against singular vectors, and its bookkeeping by brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron.packed.training.muon import (
    Muon,
    MuonSettings,
    join_shares,
    orthogonalize,
    split_shares,
    update_scale,
)


class OneProcess:
    """A group of one."""

    def size(self) -> int:
        return 1


def settings(**changes: object) -> MuonSettings:
    values: dict = dict(
        momentum=0.9,
        nesterov=False,
        steps=5,
        scale_mode="spectral",
        extra_scale=1.0,
        precision="highest",
        query_shares=None,
    )
    return MuonSettings(**{**values, **changes})


def iterated(matrix: np.ndarray, steps: int) -> np.ndarray:
    """The iteration as a polynomial of singular values: what it does to each of them."""
    coefficients = [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ]
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values = values / np.sqrt((values**2).sum())
    for step in range(steps):
        a, b, c = coefficients[step % 5]
        values = a * values + b * values**3 + c * values**5
    return left @ np.diag(values) @ right


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (8, 8), (1, 5)])
@pytest.mark.parametrize("steps", [5, 10])
def test_orthogonalisation_keeps_singular_vectors(shape: tuple[int, int], steps: int) -> None:
    matrix = torch.randn(shape, dtype=torch.float64)
    result = orthogonalize(matrix, steps)
    expected = torch.from_numpy(iterated(matrix.numpy(), steps))
    assert (result - expected).norm() <= 1e-12 * expected.norm() * 10
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.3 and values.max() < 1.3


def test_orthogonalisation_in_bf16_rounds_and_no_more() -> None:
    matrix = torch.randn(16, 24)
    exact, rounded = orthogonalize(matrix, 5), orthogonalize(matrix, 5, "medium")
    assert rounded.dtype is torch.float32
    assert 0 < (exact - rounded).norm() / exact.norm() < 0.05
    assert torch.equal(orthogonalize(torch.zeros(3, 4), 5), torch.zeros(3, 4))


def test_permutations_pass_through() -> None:
    """So shares of gates or heads may be put together in any order."""
    matrix = torch.randn(10, 7, dtype=torch.float64)
    rows, columns = torch.randperm(10), torch.randperm(7)
    permuted = orthogonalize(matrix[rows][:, columns], 5)
    assert torch.allclose(permuted, orthogonalize(matrix, 5)[rows][:, columns], atol=1e-13)


def test_scales() -> None:
    assert update_scale(4, 9, "spectral") == update_scale(9, 4, "spectral") == 3.0
    assert update_scale(4, 9, "unit_rms_norm") == pytest.approx(2 / 3)
    assert update_scale(4, 9, "shape_scaling") == 1.0
    assert update_scale(9, 4, "shape_scaling") == 1.5
    with pytest.raises(ValueError, match="must be spectral"):
        update_scale(1, 1, "other")


def test_shares_of_a_projection() -> None:
    rows = torch.arange(12.0).repeat_interleave(2).view(12, 2)
    parts = split_shares(rows, (2, 1, 1))  # three groups of two queries, a key and a value
    assert [part[:, 0].tolist() for part in parts] == [
        [0, 1, 4, 5, 8, 9],
        [2, 6, 10],
        [3, 7, 11],
    ]
    assert torch.equal(join_shares(parts, (2, 1, 1)), rows)


@pytest.mark.parametrize("nesterov", [False, True])
def test_two_steps_by_hand(nesterov: bool) -> None:
    torch.manual_seed(3)
    start, shares = torch.randn(8, 6, dtype=torch.float64), (2, 1, 1)
    parameter = torch.nn.Parameter(start.clone())
    rule = Muon(
        [{"params": [parameter]}],
        settings(nesterov=nesterov, query_shares=shares, extra_scale=0.2),
        lr=0.1,
        weight_decay=0.5,
        kind_of=lambda parameter: "query",
        tp_group=lambda kind: OneProcess(),  # type: ignore[arg-type,return-value]
    )
    expected, mean = start.numpy().copy(), np.zeros((8, 6))
    for _ in range(2):
        gradient = torch.randn(8, 6, dtype=torch.float64)
        parameter.grad = gradient.clone()
        rule.step()
        mean = 0.9 * mean + 0.1 * gradient.numpy()
        direction = 0.9 * mean + 0.1 * gradient.numpy() if nesterov else mean
        update = np.zeros((8, 6))
        for rows in ([0, 1, 4, 5], [2, 6], [3, 7]):
            part = iterated(direction[rows], 5)
            update[rows] = part * math.sqrt(max(part.shape)) * 0.2
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * update
    assert np.abs(parameter.detach().numpy() - expected).max() < 1e-12
    assert rule.state[parameter].keys() == {"momentum_buffer"}


def test_parameters_without_gradient_stay() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    rule = Muon(
        [{"params": [parameter]}],
        settings(),
        lr=0.1,
        weight_decay=0.5,
        kind_of=lambda parameter: "query",
        tp_group=lambda kind: OneProcess(),  # type: ignore[arg-type,return-value]
    )
    rule.step()
    assert torch.equal(parameter, torch.ones(2, 2))
