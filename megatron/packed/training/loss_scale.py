"""One loss scale for all optimizers of a chain."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.grad_scaler import MegatronGradScaler


class JointScaler(MegatronGradScaler):
    """A scaler that the members of a chain share.

    megatron-core gives each member, that of the experts say, a scaler of its own, and scales
    losses by the first one's: an overflow in one member alone would leave the others dividing by
    a scale that losses weren't multiplied by. Here an overflow in any member counts for all,
    once each has looked.

    Args:
        scaler: what adapts the scale.
        members: how many optimizers look at gradients in each step.
    """

    def __init__(self, scaler: MegatronGradScaler, members: int) -> None:
        self._scaler = scaler
        self._members = members
        self._found: list[bool] = []

    @property
    def scale(self) -> torch.Tensor:
        """The factor on losses, float32 [1]."""
        return self._scaler.scale

    @property
    def inv_scale(self) -> torch.Tensor:
        """Its inverse."""
        return self._scaler.inv_scale

    def update(self, found_inf: bool) -> None:
        """Take in what one member has found; the last one moves the scale."""
        self._found.append(found_inf)
        if len(self._found) == self._members:
            self._scaler.update(any(self._found))
            self._found.clear()

    def state_dict(self) -> dict[str, Any]:
        """The scaler's."""
        state: dict[str, Any] = self._scaler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the scaler; members that were saved with equal states load them one by one."""
        self._scaler.load_state_dict(state_dict)


def share_loss_scale(optimizer: MegatronOptimizer) -> None:
    """Let all members of a chain that scale their losses use the first one's scaler.

    Args:
        optimizer: megatron-core's, a chain or a single one.
    """
    members = [
        member
        for member in getattr(optimizer, "chained_optimizers", [])
        if getattr(member, "grad_scaler", None) is not None
    ]
    if len(members) > 1:
        joint = JointScaler(members[0].grad_scaler, len(members))
        for member in members:
            member.grad_scaler = joint
