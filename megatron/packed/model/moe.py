"""megatron-core's mixture-of-experts layer, for packs, on any hardware."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import (
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megatron.packed.accelerator.compat import made_by, submodules_of
from megatron.packed.model.router import PackedRouter
from megatron.packed.model.token_slots import TokenSlots


class PackedAlltoAllTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """Sends tokens only, and counts on the host as every backend takes them.

    Upstream expects every slot to choose as many experts, which padding does not, and leaves
    counts in tensors where there is no CUDA stream to copy them on.
    """

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Count what travels where.

        Args:
            routing_map: bool [T, experts].

        Returns:
            int64 [local experts], tokens that each gets from all ranks.
        """
        tokens_per_expert = super().preprocess(routing_map)
        if not self.drop_and_pad:
            self.num_out_tokens = routing_map.sum()
        return tokens_per_expert

    def token_dispatch(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Send tokens and their weights to their experts' ranks.

        Args:
            tokens: [T * topk, hidden], sorted by expert.
            probs: [T * topk].
        """
        for name in ("input_splits", "output_splits"):
            counts = getattr(self, name)
            if isinstance(counts, Tensor) and not counts.is_cuda:
                setattr(self, name, counts.tolist())
        return super().token_dispatch(tokens, probs)


class ExpertOutputLinear(RowParallelLinear):
    """Second layer of a whole expert, whose bias belongs to this process alone.

    megatron-core adds the bias in place, which a view can't take. Where the rest of the model is
    cut, it sums the bias's gradient over tensor-parallel processes as if they held parts of a
    sequence, and finds it in the norm of gradients of the first of them alone: yet each holds
    experts of its own, or a replica that sees other tokens.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.bias is not None:
            self.bias.sequence_parallel = False
            set_tensor_model_parallel_attributes(self.bias, is_parallel=True, dim=0, stride=1)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Multiply; arguments and results are the base class's."""
        output, bias = super().forward(input_)
        return output if bias is None else output.clone(), bias


class PackedMoELayer(MoELayer):
    """A layer whose router knows which slots hold tokens; constructor arguments are upstream's."""

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        **kwargs: Any,
    ) -> None:
        groups = pg_collection or get_default_pg_collection()
        super().__init__(
            config=config,
            submodules=submodules,
            layer_number=layer_number,
            pg_collection=groups,
            **kwargs,
        )
        if config.moe_token_dispatcher_type == "alltoall":
            self.token_dispatcher = PackedAlltoAllTokenDispatcher(
                self.num_local_experts,
                self.local_expert_indices,
                config=config,
                pg_collection=groups,
            )
            if self.use_shared_expert and self.shared_expert_overlap:
                self.token_dispatcher.set_shared_experts(self.shared_experts)
        self.slots_of_batch: Tensor | None = None

    def forward(
        self,
        hidden_states: Tensor,
        intermediate_tensors: Any = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Route tokens to their experts and add up what comes back.

        Args:
            hidden_states: [S, B, hidden].
            intermediate_tensors: for megatron-core's CUDA graphs; not used here.
            padding_mask: int64 [B, S] codes of the slots, see `token_slots`; None for the
                micro-batch's own, or all tokens.

        Returns:
            [S, B, hidden], and no bias.
        """
        codes = self.slots_of_batch if padding_mask is None else padding_mask
        compute = partial(self._compute, slots=None if codes is None else TokenSlots.decode(codes))
        if self.moe_layer_recompute and self.training:
            return tensor_parallel.checkpoint(compute, False, hidden_states), None
        return compute(hidden_states), None

    def _compute(self, hidden_states: Tensor, slots: TokenSlots | None) -> Tensor:
        shared = self.shared_experts_compute(hidden_states)
        probs, chosen = self.router(hidden_states, slots)
        tokens, probs = self.preprocess(hidden_states, probs, chosen)
        dispatched, probs = self.dispatch(tokens, probs)
        output, _ = self.routed_experts_compute(dispatched, probs)
        return self.postprocess(self.combine(output), shared)


def use_packed_experts(layer: ModuleSpec) -> None:
    """Put this project's modules into a layer that megatron-core specified with experts.

    Args:
        layer: specification of a transformer layer; changed in place.
    """
    parts = submodules_of(layer.submodules.mlp)
    parts.router = PackedRouter
    experts = submodules_of(parts.experts)
    if getattr(experts, "linear_fc2", None) is RowParallelLinear:
        experts.linear_fc2 = ExpertOutputLinear
    layer.submodules.mlp = made_by(layer.submodules.mlp, PackedMoELayer)


def moe_layers(model: torch.nn.Module | None) -> Iterator[tuple[str, PackedMoELayer]]:
    """The layers of a model that have experts, by their names, in order."""
    if model is not None:
        for name, module in model.named_modules():
            if isinstance(module, PackedMoELayer):
                yield name, module
