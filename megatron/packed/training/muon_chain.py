"""Muon for matrices chained with Adam for the rest, through megatron-core's optimizers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    ChainedOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
)
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from megatron.packed.arguments import Config
from megatron.packed.model.width_transfer import optimizer_overrides
from megatron.packed.training.muon import Muon, MuonSettings, Shares


def query_shares(config: TransformerConfig) -> Shares | None:
    """Rows that one group of heads has in the projection of queries, keys and values.

    Args:
        config: the model's; latent attention projects in other matrices and has none.
    """
    if getattr(config, "multi_latent_attention", False):
        return None
    width, groups = config.kv_channels, config.num_query_groups
    assert width is not None and groups is not None
    queries = config.num_attention_heads // groups * width
    gate = (queries,) if getattr(config, "attention_output_gate", False) else ()
    return (queries, *gate, width, width)


def muon_settings(config: Config, model: TransformerConfig) -> MuonSettings:
    """The settings of the flags."""
    flags = config.optimizer_options
    return MuonSettings(
        momentum=flags.muon_momentum,
        nesterov=flags.muon_use_nesterov,
        steps=flags.muon_num_ns_steps,
        scale_mode=flags.muon_scale_mode,
        extra_scale=flags.muon_extra_scale_factor,
        precision=flags.muon_fp32_matmul_prec,
        query_shares=query_shares(model) if flags.muon_split_qkv else None,
    )


def kind_of(name: str, parameter: torch.Tensor) -> str | None:
    """What a parameter is to Muon (`plain`, `query`, `expert`), or None if it is Adam's.

    Args:
        name: in the model chunk.
        parameter: with megatron-core's attributes.
    """
    if parameter.dim() != 2 or getattr(parameter, "is_embedding_or_output_parameter", False):
        return None
    if ".experts." in name:
        return "expert"
    return "query" if "linear_qkv.weight" in name else "plain"


def _tp_group(kind: str) -> torch.distributed.ProcessGroup:
    if kind == "expert":
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def _named(model: list[DistributedDataParallel]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad:
                yield name, parameter


@dataclass
class _Kinds:
    """Kinds by parameter, also of the copies in fp32 that optimizers make later.

    Attributes:
        of_weights: kinds of the model's parameters.
    """

    of_weights: dict[torch.nn.Parameter, str]
    _known: dict[torch.Tensor, str] = field(default_factory=dict)

    def __call__(self, parameter: torch.Tensor) -> str:
        if parameter not in self._known:
            self._known = dict(self.of_weights)
            for weight, kind in self.of_weights.items():
                copied = getattr(weight, "main_param", None)
                if copied is not None:
                    self._known[copied] = kind
        return self._known[parameter]


def _group(
    config: OptimizerConfig, parameters: list[torch.nn.Parameter], *, expert_parallel: bool
) -> dict[str, Any]:
    """A parameter group with what megatron-core's scheduler and checkpoints look for."""
    return {
        "params": parameters,
        "is_expert_parallel": expert_parallel,
        "default_config": True,
        "is_decoupled_lr": False,
        "wd_mult": 1.0,
        "lr_mult": 1.0,
        "max_lr": config.lr,
        "min_lr": config.min_lr,
    }


def _init_momentum(optimizer: Muon, config: OptimizerConfig | None = None) -> None:
    """Make the state that a checkpoint is loaded into."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter].setdefault(
                "momentum_buffer", torch.zeros_like(parameter.data)
            )


def _init_moments(optimizer: torch.optim.Optimizer, config: OptimizerConfig | None = None) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for name in ("exp_avg", "exp_avg_sq"):
                optimizer.state[parameter].setdefault(name, torch.zeros_like(parameter.data))


class SharedOutOptimizer(LayerWiseDistributedOptimizer):
    """megatron-core's optimizer that updates each parameter on one replica.

    Updated parameters go around by broadcasts, one from each replica: the shares differ in size,
    which gloo's all-gather refuses.
    """

    @torch.no_grad()
    def allgather_params(self) -> None:
        """Give every replica the parameters that the others have updated."""
        groups = self.pg_collection
        for shares, group in (
            (self.dp_cp_params_list, groups.dp_cp),
            (self.expt_dp_params_list, groups.expt_dp),
        ):
            for owner, parameters in enumerate(shares or []):
                if parameters:
                    _broadcast(parameters, owner, group)


def _broadcast(
    parameters: list[torch.nn.Parameter], owner: int, group: torch.distributed.ProcessGroup
) -> None:
    flat = _flatten_dense_tensors([parameter.data for parameter in parameters])
    source = torch.distributed.get_global_rank(group, owner)
    torch.distributed.broadcast(flat, source, group=group)
    if group.rank() != owner:
        values = _unflatten_dense_tensors(flat, parameters)
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data.copy_(value)


def build_muon(
    config: Config, core: OptimizerConfig, model: list[DistributedDataParallel], gloo_groups: bool
) -> MegatronOptimizer:
    """Build Muon for the matrices of this rank and Adam for its other parameters.

    Args:
        config: the run's configuration.
        core: its megatron-core form, which names Adam and no distributed optimizer.
        model: wrapped chunks.
        gloo_groups: whether there are gloo groups beside NCCL's.

    Returns:
        Their chain; with `--optimizer dist_muon`, each replica updates some of the parameters
        and shares them.
    """
    shared_out = config.optimization.optimizer == "dist_muon"
    named = ((parameter, kind_of(name, parameter)) for name, parameter in _named(model))
    kinds = _Kinds({parameter: kind for parameter, kind in named if kind is not None})
    matrices = list(kinds.of_weights)
    experts = [each for each in matrices if not getattr(each, "allreduce", True)]
    others = [each for each in matrices if getattr(each, "allreduce", True)]
    groups = [_group(core, others, expert_parallel=False)]
    if experts:
        groups.append(_group(core, experts, expert_parallel=True))
    settings = muon_settings(config, model[0].config)

    def muon(part: list[dict[str, Any]]) -> Muon:
        return Muon(
            part,
            settings,
            lr=core.lr,
            weight_decay=core.weight_decay,
            kind_of=kinds,
            tp_group=_tp_group,
        )

    collection = ProcessGroupCollection.use_mpu_process_groups()
    if shared_out:
        # Parameters are shared out first; copies in fp32 are made of each replica's own.
        plain = dataclasses.replace(core, bf16=False)
        rule = muon(groups)
        first = rule if core.bf16 else FP32Optimizer(rule, core, _init_momentum)
        adam: list[Any] = list(_adam_for_others(config, plain, model, matrices, gloo_groups))
        if core.bf16:
            # megatron-core 0.19 takes bare optimizers alone; 0.16 would unwrap them itself.
            adam = [each.optimizer for each in adam]
        states = [_init_momentum] + [_init_moments] * len(adam)
        return SharedOutOptimizer([first, *adam], core, collection, init_state_fn_list=states)
    chain = [_wrapped(muon(groups[:1]), core, collection.mp)]
    if experts:
        chain.append(_wrapped(muon(groups[1:]), core, collection.tp_ep_pp))
    return ChainedOptimizer(chain + _adam_for_others(config, core, model, matrices, gloo_groups))


def _wrapped(
    rule: Muon, core: OptimizerConfig, stats_group: torch.distributed.ProcessGroup
) -> MegatronOptimizer:
    if core.bf16:
        wrapped = Float16OptimizerWithFloat16Params(rule, core, None, _init_momentum)
    else:
        wrapped = FP32Optimizer(rule, core, _init_momentum)
    wrapped.grad_stats_parallel_group = stats_group
    wrapped.tp_group = parallel_state.get_tensor_model_parallel_group()
    return wrapped


def _adam_for_others(
    config: Config,
    core: OptimizerConfig,
    model: list[DistributedDataParallel],
    matrices: list[torch.nn.Parameter],
    gloo_groups: bool,
) -> list[MegatronOptimizer]:
    """megatron-core's Adam, which passes over parameters that need no gradient."""
    for parameter in matrices:
        parameter.requires_grad = False
    try:
        adam = get_megatron_optimizer(
            core,
            model,
            config_overrides=optimizer_overrides(config, core),
            use_gloo_process_groups=gloo_groups,
        )
    finally:
        for parameter in matrices:
            parameter.requires_grad = True
    return list(adam.chained_optimizers)
