"""Merging partial attention results: associative, commutative, and safe where nothing is seen."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.packed.attention.plans.plan import Step


def merge_(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """Merge a partial result into another, in place.

    `L = log(exp L_1 + exp L_2)`, `O = exp(L_1 - L) O_1 + exp(L_2 - L) O_2`.

    Args:
        out: `[..., dv]`; finite, also in rows that have seen nothing.
        lse: `[...]`, -inf in rows that have seen nothing.
        more_out: `[..., dv]`, as `out`.
        more_lse: `[...]`, as `lse`.
    """
    total = torch.logaddexp(lse, more_lse)
    # -inf - -inf is NaN: a row that neither part has seen keeps its zeros.
    weight = torch.where(total == -torch.inf, 0.0, torch.exp(more_lse - total))
    out.lerp_(more_out, weight.unsqueeze(-1))
    lse.copy_(total)


def start_gradients(step: Step, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Zero what no tile has touched before a step; for kernels that only add.

    Args:
        step: about to be computed.
        dq: `[rows, heads, d]`.
        dk: `[key rows, kv_heads, d]` of the step.
        dv: `[key rows, kv_heads, dv]` of the step.
    """
    for gradient in (dq, dk, dv) if step.index == 0 else (dk, dv):
        gradient.zero_()
