"""What a log line says of the steps since the last one, kept as sums: it doesn't grow with them."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.packed.training.step import StepResult


@dataclass
class Interval:
    """Sums over steps.

    Losses of steps that were left out for a NaN aren't meant, and not in them.

    Attributes:
        steps: how many.
        last: the last one; None before the first.
        loss_sum: of supervised losses.
        loss_count: of supervised tokens.
        reports: sum and count of whatever else was reported, by name.
        expert_losses: sums of the means over layers, by name.
    """

    steps: int = 0
    last: StepResult | None = None
    loss_sum: float = 0.0
    loss_count: float = 0.0
    reports: dict[str, tuple[float, float]] = field(default_factory=dict)
    expert_losses: dict[str, float] = field(default_factory=dict)

    def add(self, step: StepResult) -> None:
        """Take in one step."""
        self.steps += 1
        self.last = step
        for name, mean in step.expert_losses.means().items():
            self.expert_losses[name] = self.expert_losses.get(name, 0.0) + mean
        if step.bad is not None:
            return
        self.loss_sum += step.loss_sum
        self.loss_count += step.loss_count
        for name, (total, count) in step.reports.items():
            so_far = self.reports.get(name, (0.0, 0.0))
            self.reports[name] = (so_far[0] + total, so_far[1] + count)
