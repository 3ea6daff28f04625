"""Losses of routers, from each rank's shares to one value a layer, under upstream's names."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.packed.model.moe import moe_layers
from megatron.packed.model.router import LOSS_NAMES, Z_LOSS


@dataclass(frozen=True)
class ExpertLosses:
    """Mean over the micro-batches of a step, without coefficients; equal on every rank.

    Attributes:
        by_layer: for each name, the loss of every decoder layer, then of every depth of
            multi-token prediction; 0 in layers without experts.
        num_layers: layers that have experts.
    """

    by_layer: dict[str, tuple[float, ...]] = field(default_factory=dict)
    num_layers: int = 0

    def means(self) -> dict[str, float]:
        """Each loss, averaged over the layers that have experts."""
        return {name: sum(values) / self.num_layers for name, values in self.by_layer.items()}


def loss_names(config: TransformerConfig) -> list[str]:
    """The losses that a model's routers have, in upstream's order."""
    kinds = config.moe_router_load_balancing_type
    kinds = [kinds] if isinstance(kinds, str) else kinds
    coefficients = config.moe_aux_loss_coeff
    coefficients = [coefficients] if isinstance(coefficients, float) else coefficients
    used = {kind for kind, each in zip(kinds, coefficients, strict=True) if each}
    names = [name for kind, name in LOSS_NAMES.items() if kind in used]
    return names + ([Z_LOSS] if config.moe_z_loss_coeff else [])


def collect_expert_losses(
    model: list[DistributedDataParallel],
    config: TransformerConfig,
    num_microbatches: int,
    device: torch.device,
) -> ExpertLosses:
    """Take what the routers noted in a step, and add it over all ranks; a collective call.

    Args:
        model: this rank's stages.
        config: what they were built from.
        num_microbatches: of the step, on each data-parallel rank.
        device: where collectives run.
    """
    names = loss_names(config) if config.num_moe_experts else []
    if not names:
        return ExpertLosses()
    depths = config.mtp_num_layers or 0
    values = torch.zeros(len(names), config.num_layers + depths, dtype=torch.float64, device=device)
    for chunk in model:
        for name, layer in moe_layers(chunk):
            at = layer.layer_number - 1
            if ".mtp." in f".{name}" and at < config.num_layers:
                at += config.num_layers  # some versions of core number these layers from 1 again
            for row, loss in enumerate(names):
                values[row, at] += layer.router.losses.get(loss, 0.0)
            layer.router.losses.clear()
    torch.distributed.all_reduce(values)
    values /= num_microbatches * parallel_state.get_data_parallel_world_size()
    pattern = config.moe_layer_freq
    assert isinstance(pattern, list)
    by_layer = {name: tuple(row) for name, row in zip(names, values.tolist(), strict=True)}
    return ExpertLosses(by_layer, sum(pattern) + depths * pattern[-1])
