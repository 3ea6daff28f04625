"""One linear layer in place of attention or of a feed-forward layer."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.heterogeneous.linear_replacements import ColumnParallelLinearGathered
from torch import Tensor


class GatheredLinear(ColumnParallelLinearGathered):
    """megatron-core's, whose output is whole with sequence parallelism, too.

    There, megatron-core's pads the sequence where it means the columns, and fails (0.16.1).
    """

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Apply the layer to ``[S, B, hidden]``; whatever else attention is given is ignored."""
        out, _ = ColumnParallelLinear.forward(self, input_)
        if self.tp_group.size() > 1:
            out = gather_from_tensor_model_parallel_region(out, self.tp_group)
            if self.config.sequence_parallel:
                out = scatter_to_sequence_parallel_region(out, self.tp_group)
        return out, None
