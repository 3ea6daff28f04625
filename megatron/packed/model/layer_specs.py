"""Layer specifications: megatron-core's own, with the modules this project supplies."""

from __future__ import annotations

import importlib.util

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import (
    get_gpt_heterogeneous_layer_spec,
)
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.heterogeneous.heterogeneous_config import (
    HeterogeneousTransformerConfig,
)
from megatron.core.transformer.heterogeneous.linear_replacements import ColumnParallelLinearGathered
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron.packed.accelerator import Accelerator
from megatron.packed.accelerator.compat import builder_of, made_by
from megatron.packed.arguments import Config
from megatron.packed.attention.core_attention import PackedCoreAttention
from megatron.packed.errors import ConfigurationError
from megatron.packed.model.attention_engine import select_core_attention
from megatron.packed.model.gated_delta_net import GatedDeltaNet
from megatron.packed.model.latent_attention import PackedMLASelfAttention
from megatron.packed.model.linear_layer import GatheredLinear
from megatron.packed.model.moe import use_packed_experts
from megatron.packed.model.mtp import build_mtp_spec
from megatron.packed.model.norms import L2Norm, LayerNorm, RMSNorm


def uses_transformer_engine(config: Config, accelerator: Accelerator) -> bool:
    """Whether layers are TransformerEngine's (CUDA) or megatron-core's own with our modules.

    Raises:
        ConfigurationError: TransformerEngine was asked for on CUDA and isn't installed.
    """
    if accelerator.name == "cpu" or config.model.transformer_impl != "transformer_engine":
        return False
    if importlib.util.find_spec("transformer_engine") is None:
        raise ConfigurationError(
            "--transformer-impl transformer_engine: the package transformer_engine isn't "
            "installed; install megatron-packed[gpu] or pass --transformer-impl local"
        )
    return True


def _norm(config: Config) -> type[LayerNorm | RMSNorm]:
    return RMSNorm if config.model.normalization == "RMSNorm" else LayerNorm


def _local_layer_spec(config: Config, num_experts: int | None) -> ModuleSpec:
    latent = config.attention.multi_latent_attention
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts,
        qk_layernorm=config.model.qk_layernorm,
        normalization=config.model.normalization,
        multi_latent_attention=latent,
    )
    if num_experts is not None:
        use_packed_experts(spec)
    norm = _norm(config)
    layer = spec.submodules
    layer.input_layernorm = norm
    layer.pre_mlp_layernorm = norm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedCoreAttention
    head_norm = L2Norm if config.attention.qk_l2_norm else norm
    for name in ("q_layernorm", "kv_layernorm" if latent else "k_layernorm"):
        if config.attention.qk_l2_norm or getattr(attention, name) is not IdentityOp:
            setattr(attention, name, head_norm)
    if latent:
        layer.self_attention.module = PackedMLASelfAttention
    return spec


def _transformer_engine_norm() -> type:
    from megatron.core.extensions.transformer_engine import TENorm  # needs the package

    return TENorm


def _transformer_engine_layer_spec(config: Config, num_experts: int | None) -> ModuleSpec:
    latent = config.attention.multi_latent_attention
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=num_experts,
        moe_grouped_gemm=config.moe.moe_grouped_gemm,
        qk_layernorm=config.model.qk_layernorm,
        multi_latent_attention=latent,
        qk_l2_norm=config.attention.qk_l2_norm,
    )
    if num_experts is not None:
        use_packed_experts(spec)
    if latent:
        spec.submodules.self_attention.module = PackedMLASelfAttention
    return spec


def _layer_kinds(
    config: Config,
    transformer_config: TransformerConfig,
    accelerator: Accelerator,
    wanted: set[tuple[bool, bool]],
) -> dict[tuple[bool, bool], ModuleSpec]:
    """Layers by whether they hold experts and whether their attention is linear."""
    make, norm = _local_layer_spec, _norm(config)
    if uses_transformer_engine(config, accelerator):
        make, norm = _transformer_engine_layer_spec, _transformer_engine_norm()
    kinds = {
        (experts, is_linear): make(config, config.moe.num_experts if experts else None)
        for experts, is_linear in wanted
    }
    own = select_core_attention(config, transformer_config, accelerator)
    if own is not None:
        for spec in kinds.values():
            spec.submodules.self_attention.submodules.core_attention = own
    for (_, is_linear), spec in kinds.items():
        if is_linear:
            spec.submodules.self_attention = ModuleSpec(module=GatedDeltaNet)
            spec.submodules.input_layernorm = norm  # TransformerEngine's is part of its attention
    return kinds


def _heterogeneous_layer_specs(
    config: Config,
    transformer_config: HeterogeneousTransformerConfig,
    accelerator: Accelerator,
    vp_stage: int | None,
) -> TransformerBlockSubmodules:
    """Layers that differ, each as its entry of the file says."""
    engine = uses_transformer_engine(config, accelerator)
    block = get_gpt_heterogeneous_layer_spec(transformer_config, use_te=engine, vp_stage=vp_stage)
    core_attention = select_core_attention(config, transformer_config, accelerator)
    norm = _norm(config)
    for spec in block.layer_specs:
        layer = spec.submodules
        if not engine:
            for name in ("input_layernorm", "pre_mlp_layernorm"):
                if getattr(layer, name) is not IdentityOp:
                    setattr(layer, name, norm)
            for name in ("self_attention", "mlp"):
                part = getattr(layer, name)
                if builder_of(part) is ColumnParallelLinearGathered:
                    setattr(layer, name, made_by(part, GatheredLinear))
        attention = layer.self_attention.submodules
        if not isinstance(attention, SelfAttentionSubmodules):
            continue
        if not engine:
            attention.core_attention = PackedCoreAttention
            if config.model.qk_layernorm:
                attention.q_layernorm = attention.k_layernorm = norm
        if config.attention.qk_l2_norm:
            attention.q_layernorm = attention.k_layernorm = L2Norm
        if core_attention is not None:
            attention.core_attention = core_attention
    if not engine:
        block.layer_norm = norm
    return block


def build_layer_spec(
    config: Config,
    transformer_config: TransformerConfig,
    accelerator: Accelerator,
    vp_stage: int | None = None,
) -> ModuleSpec | TransformerBlockSubmodules:
    """The specification that GPTModel builds one pipeline stage's decoder from."""
    if isinstance(transformer_config, HeterogeneousTransformerConfig):
        return _heterogeneous_layer_specs(config, transformer_config, accelerator, vp_stage)
    pattern = config.moe.expert_layers(config.model.num_layers)
    linear = config.linear_attention.linear_layers(config.model.num_layers)
    layers = tuple(zip(pattern, linear, strict=True))
    kinds = _layer_kinds(config, transformer_config, accelerator, set(layers))
    norm: type = _norm(config)
    if uses_transformer_engine(config, accelerator):
        if set(layers) == {layers[0]} and not linear[0]:
            return kinds[layers[0]]
        norm = _transformer_engine_norm()
    first = get_transformer_layer_offset(transformer_config, vp_stage=vp_stage)
    count = get_num_layers_to_build(transformer_config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(
        layer_specs=[kinds[kind] for kind in layers[first : first + count]],
        layer_norm=norm,
    )


def build_mtp_block_spec(
    config: Config,
    transformer_config: TransformerConfig,
    accelerator: Accelerator,
    vp_stage: int | None = None,
) -> MultiTokenPredictionBlockSubmodules | None:
    """The specification of a stage's multi-token prediction.

    Its layers hold experts if the decoder's last one does; their attention is never linear. None
    where the stage predicts no further tokens.
    """
    if not config.loss.mtp_num_layers:
        return None
    kind = config.moe.expert_layers(config.model.num_layers)[-1], False
    layer = _layer_kinds(config, transformer_config, accelerator, {kind})[kind]
    if uses_transformer_engine(config, accelerator):
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        norm, backend = _transformer_engine_norm(), TESpecProvider()
        return build_mtp_spec(transformer_config, layer, norm, backend, vp_stage)
    return build_mtp_spec(transformer_config, layer, _norm(config), vp_stage=vp_stage)
