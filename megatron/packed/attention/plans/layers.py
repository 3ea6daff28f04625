"""The plans of a model's layers: one for all, or one for each kind of exchange among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.packed.attention.plans.plan import AttentionPlan


@dataclass(frozen=True, eq=False)
class LayerPlans:
    """One rank's plans of one micro-batch.

    Attributes:
        plans: by kind; all for the same partition and boundaries.
        layer_kinds: the kind of every layer, or of all of them.
    """

    plans: Mapping[str, AttentionPlan]
    layer_kinds: tuple[str, ...]

    @property
    def cp_size(self) -> int:
        """Context-parallel ranks."""
        return next(iter(self.plans.values())).cp_size

    def of_layer(self, number: int) -> AttentionPlan:
        """The plan of a layer.

        Args:
            number: counted from 1 over the whole model.
        """
        kinds = self.layer_kinds
        return self.plans[kinds[0] if len(kinds) == 1 else kinds[number - 1]]
