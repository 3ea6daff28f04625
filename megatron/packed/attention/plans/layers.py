"""The plans of a model's layers: one for each exchange and mask among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.packed.attention.plans.plan import AttentionPlan
from megatron.packed.errors import ConfigurationError

PlanKey = tuple[str, int | None]
"""Kind of exchange, and sliding window (None for a layer that sees everything)."""


@dataclass(frozen=True, eq=False)
class LayerPlans:
    """One rank's plans of one micro-batch.

    Attributes:
        plans: by kind and window; all for the same partition and boundaries.
        layer_kinds: the kind of every layer, or of all of them.
    """

    plans: Mapping[PlanKey, AttentionPlan]
    layer_kinds: tuple[str, ...]

    @property
    def cp_size(self) -> int:
        """Context-parallel ranks."""
        return next(iter(self.plans.values())).cp_size

    def of_layer(self, number: int, window: int | None = None) -> AttentionPlan:
        """The plan of a layer.

        Args:
            number: counted from 1 over the whole model.
            window: the layer's sliding window.

        Raises:
            ConfigurationError: for a window that batches were not planned for.
        """
        kinds = self.layer_kinds
        key = kinds[0] if len(kinds) == 1 else kinds[number - 1], window
        if key not in self.plans:
            known = ", ".join(f"{kind} with window {each}" for kind, each in self.plans)
            raise ConfigurationError(
                f"layer {number}: wants attention by {key[0]} with window {window}, the batch has "
                f"plans for {known}; make batches with the helper of the same configuration"
            )
        return self.plans[key]
