"""Muon: momentum, orthogonalised; for every matrix but the embedding and the output layer.

The update of a matrix is its momentum with all singular values brought near one, by five steps of
Newton and Schulz's iteration. A matrix that tensor-parallel processes share is gathered first, so
that its update is the one of a single process; queries, keys and values, one projection to the
model, are three matrices to Muon. Orthogonalisation commutes with permutations of rows and
columns: in which order shares of gates or heads are put together makes no difference.

Source: Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024; coefficients
of a series of five by L. Cesista et al., 2025; momentum, scales and defaults are those of the
emerging_optimizers package, which upstream's Muon needs and this one doesn't.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

Shares = tuple[int, ...]

_COEFFICIENTS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
_SMALLEST_NORM = 1e-7


@dataclass(frozen=True)
class MuonSettings:
    """What Muon's update depends on beside gradient and learning rate.

    Attributes:
        momentum: weight of the past in the running mean of gradients.
        nesterov: look ahead by one gradient.
        steps: Newton-Schulz iterations, a multiple of five.
        scale_mode: `spectral`, `unit_rms_norm` or `shape_scaling`.
        extra_scale: factor on every update.
        precision: `low` and `medium` multiply in bf16, `high` lets fp32 products use TF32.
        query_shares: rows that a group of heads takes in the projection of queries, keys and
            values, part by part; None leaves the projection whole.
    """

    momentum: float
    nesterov: bool
    steps: int
    scale_mode: str
    extra_scale: float
    precision: str
    query_shares: Shares | None


def orthogonalize(matrix: torch.Tensor, steps: int, precision: str = "highest") -> torch.Tensor:
    """Bring all singular values of a matrix near one.

    Args:
        matrix: fp32 or fp64 [rows, columns].
        steps: iterations, a multiple of five.
        precision: see `MuonSettings`.

    Returns:
        Of the matrix's shape and dtype.
    """
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    iterate = wide / wide.norm().clamp_min(_SMALLEST_NORM)
    if precision in ("low", "medium"):
        iterate = iterate.bfloat16()
    with _tensor_float32(precision == "high"):
        for step in range(steps):
            first, third, fifth = _COEFFICIENTS[step % len(_COEFFICIENTS)]
            gram = iterate @ iterate.T
            odd = torch.addmm(gram, gram, gram, beta=third, alpha=fifth)
            iterate = torch.addmm(iterate, odd, iterate, beta=first)
    iterate = iterate.to(matrix.dtype)
    return iterate if wide is matrix else iterate.T


@contextlib.contextmanager
def _tensor_float32(allowed: bool) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def update_scale(rows: int, columns: int, mode: str) -> float:
    """The factor on an orthogonal update by the shape of the whole matrix.

    Args:
        rows: outputs.
        columns: inputs.
        mode: see `MuonSettings.scale_mode`.
    """
    match mode:
        case "spectral":  # entries of an update have a mean square near that of Adam's
            return math.sqrt(max(rows, columns))
        case "unit_rms_norm":
            return math.sqrt(rows / columns)
        case "shape_scaling":
            return math.sqrt(max(1.0, rows / columns))
    raise ValueError(f"scale mode {mode}: must be spectral, unit_rms_norm or shape_scaling")


def split_shares(projection: torch.Tensor, shares: Shares) -> list[torch.Tensor]:
    """Take apart a projection whose rows go group by group through its parts.

    Args:
        projection: [groups * sum(shares), columns].
        shares: rows of each part in a group.

    Returns:
        For each part, [groups * share, columns].
    """
    grouped = projection.view(-1, sum(shares), projection.shape[1])
    parts = grouped.split(shares, dim=1)
    return [part.reshape(-1, projection.shape[1]) for part in parts]


def join_shares(parts: list[torch.Tensor], shares: Shares) -> torch.Tensor:
    """Undo `split_shares`."""
    columns = parts[0].shape[1]
    grouped = [part.view(-1, share, columns) for part, share in zip(parts, shares, strict=True)]
    return torch.cat(grouped, dim=1).reshape(-1, columns)


class Muon(torch.optim.Optimizer):
    """The update rule, on parameter groups of megatron-core.

    A matrix is of the kind `plain`, `query` (the projection of queries, keys and values) or
    `expert`.

    Args:
        groups: parameter groups; all hold matrices.
        settings: the rule's settings.
        lr: learning rate until a scheduler sets it.
        weight_decay: decoupled, as in AdamW.
        kind_of: gives the kind of a matrix.
        tp_group: gives the tensor-parallel group of a kind.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        settings: MuonSettings,
        *,
        lr: float,
        weight_decay: float,
        kind_of: Callable[[torch.Tensor], str],
        tp_group: Callable[[str], torch.distributed.ProcessGroup],
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self.settings = settings
        self._kind_of = kind_of
        self._tp_group = tp_group

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient; a collective call of tensor-parallel ranks."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                direction = self._direction(parameter)
                parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                update = self._whole_update(parameter, direction, self._kind_of(parameter))
                parameter.add_(update, alpha=-group["lr"])

    def _direction(self, parameter: torch.Tensor) -> torch.Tensor:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        mean = state["momentum_buffer"]
        mean.lerp_(gradient, 1.0 - self.settings.momentum)
        return gradient.lerp(mean, self.settings.momentum) if self.settings.nesterov else mean

    def _whole_update(
        self, parameter: torch.Tensor, direction: torch.Tensor, kind: str
    ) -> torch.Tensor:
        """This rank's share of the update of the matrix that it has a share of."""
        group = self._tp_group(kind)
        if group.size() == 1 or not getattr(parameter, "tensor_model_parallel", False):
            return self._update(direction, kind)
        dim = parameter.partition_dim  # type: ignore[attr-defined]
        shares = [torch.empty_like(direction) for _ in range(group.size())]
        torch.distributed.all_gather(shares, direction.contiguous(), group=group)
        whole = self._update(torch.cat(shares, dim=dim), kind)
        return whole.chunk(group.size(), dim=dim)[group.rank()]

    def _update(self, direction: torch.Tensor, kind: str) -> torch.Tensor:
        shares = self.settings.query_shares
        if kind != "query" or shares is None:
            return self._scaled(direction)
        parts = [self._scaled(part) for part in split_shares(direction, shares)]
        return join_shares(parts, shares)

    def _scaled(self, direction: torch.Tensor) -> torch.Tensor:
        settings = self.settings
        scale = update_scale(direction.shape[0], direction.shape[1], settings.scale_mode)
        result = orthogonalize(direction, settings.steps, settings.precision)
        return result.mul_(scale * settings.extra_scale)
