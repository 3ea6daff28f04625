"""Token loss: sums and counts, divided once by the count of the global batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TokenLoss:
    """The loss of one micro-batch on this rank.

    Attributes:
        total: scalar, sum of the supervised losses, float32 or as the losses; it carries the
            gradient.
        count: int32 scalar, supervised tokens.
    """

    total: torch.Tensor
    count: torch.Tensor

    @property
    def report(self) -> torch.Tensor:
        """[2], (sum, count) without gradient, to be added over micro-batches and ranks."""
        return torch.stack((self.total.detach(), self.count.to(self.total.dtype)))


def token_loss(losses: torch.Tensor, loss_mask: torch.Tensor) -> TokenLoss:
    """Sum the losses of the supervised tokens.

    Unsupervised positions are left out by selection, so that garbage there (even NaN) reaches
    neither the sum nor the gradient.

    Args:
        losses: [B, S], per-token losses; float64 is summed as such, all else as float32.
        loss_mask: float32 [B, S], nonzero where supervised.

    Returns:
        Sum and count, never divided here.
    """
    supervised = loss_mask.reshape(-1) != 0
    flat = losses.reshape(-1)
    if flat.dtype != torch.float64:
        flat = flat.float()
    selected = torch.where(supervised, flat, 0.0)
    return TokenLoss(total=selected.sum(), count=supervised.sum().to(torch.int32))
