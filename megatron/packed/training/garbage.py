"""Python's garbage collector by hand, so that all ranks pause at once (`--manual-gc`)."""

from __future__ import annotations

import gc
from dataclasses import dataclass

from megatron.packed.arguments import Config


@dataclass(frozen=True)
class GarbageCollection:
    """Python's collector, by hand, so that all ranks pause at once (`--manual-gc`).

    Attributes:
        by_hand: collect here and nowhere else.
        interval: iterations between collections; 0 for none.
        around_evaluations: collect before and after them.
    """

    by_hand: bool = False
    interval: int = 0
    around_evaluations: bool = True

    @classmethod
    def from_config(cls, config: Config) -> GarbageCollection:
        """Read the flags."""
        flags = config.schedule
        return cls(flags.manual_gc, flags.manual_gc_interval, flags.manual_gc_eval)

    def start(self) -> None:
        """Take over from Python."""
        if self.by_hand:
            gc.disable()
            gc.collect()

    def after_step(self, iteration: int) -> None:
        """Collect if it is time."""
        if self.by_hand and self.interval and iteration % self.interval == 0:
            gc.collect()

    def around_evaluation(self) -> None:
        """Collect before and after an evaluation, whose garbage differs from training's."""
        if self.by_hand and self.around_evaluations:
            gc.collect(generation=0)

    def stop(self) -> None:
        """Give the collector back to Python."""
        if self.by_hand:
            gc.enable()
