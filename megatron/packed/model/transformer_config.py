"""Our configuration -> megatron-core's TransformerConfig."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.heterogeneous.heterogeneous_config import (
    HeterogeneousTransformerConfig,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron.packed.accelerator.compat import dispatcher_settings
from megatron.packed.arguments import Config
from megatron.packed.arguments.stages import virtual_size
from megatron.packed.model.activations import quick_gelu, squared_relu
from megatron.packed.model.width_transfer import attention_scale


def _keep(weight: torch.Tensor) -> torch.Tensor:
    """Leave a weight as allocated: `initialize_weights` fills it once the model is built."""
    return weight


def params_dtype(config: Config) -> torch.dtype:
    """The dtype of the weights that the model computes with."""
    dtype: torch.dtype = getattr(torch, config.training.params_dtype_name)
    return dtype


def _attention_backend(name: str) -> AttnBackend:
    """Upstream's enum value; backends that only this project has count as `auto` for core."""
    return AttnBackend[name] if name in AttnBackend.__members__ else AttnBackend.auto


def _activation(config: Config) -> dict[str, Any]:
    if config.model.swiglu:
        return {"activation_func": F.silu, "gated_linear_unit": True}
    if config.model.squared_relu:
        return {"activation_func": squared_relu}
    if config.model.quick_geglu:
        return {
            "activation_func": quick_gelu,
            "gated_linear_unit": True,
            "glu_linear_offset": config.model.glu_linear_offset,
            "activation_func_clamp_value": config.model.activation_func_clamp_value,
        }
    return {"activation_func": F.gelu}


def _fuses_activation(config: Config) -> bool:
    """Whether core's fused bias-activation kernel exists for this model and is wanted."""
    kernels = config.kernels
    if config.model.squared_relu or config.model.quick_geglu:
        return False
    if config.model.swiglu:
        return kernels.bias_swiglu_fusion
    return kernels.bias_gelu_fusion and config.model.add_bias_linear


def _attention(config: Config) -> dict[str, Any]:
    """How attention projects and masks, as far as layers read it."""
    model, attention = config.model, config.attention
    fields: dict[str, Any] = {
        "softmax_scale": attention_scale(config),
        "softmax_type": attention.softmax_type,
        "qk_l2_norm": attention.qk_l2_norm,
        "attention_output_gate": attention.attention_output_gate,
        "window_size": attention.window,
        "window_attn_skip_freq": attention.window_skip,
        "no_rope_freq": attention.no_rope_layers(model.num_layers),
    }
    if attention.multi_latent_attention:
        fields |= {
            "q_lora_rank": attention.q_lora_rank,
            "kv_lora_rank": attention.kv_lora_rank,
            "qk_head_dim": attention.qk_head_dim,
            "qk_pos_emb_head_dim": attention.qk_pos_emb_head_dim,
            "v_head_dim": attention.v_head_dim,
            "rope_type": "yarn" if attention.rotates_by_yarn else "rope",
            "rotary_base": model.rotary_base,
            "rotary_percent": model.rotary_percent,
            "rotary_scaling_factor": attention.rotary_scaling_factor,
            "mscale": attention.mscale,
            "mscale_all_dim": attention.mscale_all_dim,
        }
    return fields


def _linear_attention(config: Config) -> dict[str, Any]:
    """Which layers are linear; their sizes are megatron-core's own settings."""
    linear = config.linear_attention
    if linear.experimental_attention_variant is None:
        return {}
    layers = linear.linear_layers(config.model.num_layers)
    return {
        "experimental_attention_variant": linear.experimental_attention_variant,
        "linear_attention_freq": [int(each) for each in layers],
    }


def _pipeline(config: Config) -> dict[str, Any]:
    """How layers are laid over stages, and how stages exchange tensors."""
    pipeline, virtual = config.pipeline, virtual_size(config)
    overlap = virtual is not None and pipeline.overlap_p2p_comm
    return {
        "virtual_pipeline_model_parallel_size": virtual,
        "pipeline_model_parallel_layout": pipeline.pipeline_model_parallel_layout,
        "num_layers_in_first_pipeline_stage": pipeline.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": pipeline.decoder_last_pipeline_num_layers,
        "account_for_embedding_in_pipeline_split": pipeline.account_for_embedding_in_pipeline_split,
        "account_for_loss_in_pipeline_split": pipeline.account_for_loss_in_pipeline_split,
        "microbatch_group_size_per_vp_stage": pipeline.microbatch_group_size_per_vp_stage,
        "overlap_p2p_comm": overlap,
        "overlap_p2p_comm_warmup_flush": overlap and pipeline.overlap_p2p_comm_warmup_flush,
        # Batches of sends and receives are NCCL's; gloo has none.
        "batch_p2p_comm": config.device_type == "cuda" and not overlap,
    }


def _one_or_list(values: tuple[Any, ...]) -> Any:
    """As megatron-core takes the kinds of balancing: one by itself, several as a list."""
    return values[0] if len(values) == 1 else list(values)


def _experts(config: Config) -> dict[str, Any]:
    """Fields of a mixture of experts; empty for a dense model."""
    moe = config.moe
    if moe.num_experts is None:
        return {}
    same_name = (
        "moe_ffn_hidden_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "moe_z_loss_coeff",
        "moe_router_topk",
        "moe_router_score_function",
        "moe_router_pre_softmax",
        "moe_router_topk_scaling_factor",
        "moe_router_num_groups",
        "moe_router_group_topk",
        "moe_router_enable_expert_bias",
        "moe_router_bias_update_rate",
        "moe_router_dtype",
        "moe_router_force_load_balancing",
        "moe_input_jitter_eps",
        "moe_router_fusion",
        "moe_shared_expert_intermediate_size",
        "moe_shared_expert_gate",
        "moe_shared_expert_overlap",
        "moe_grouped_gemm",
        "moe_apply_probs_on_input",
        "moe_token_dispatcher_type",
        "moe_flex_dispatcher_backend",
        "moe_enable_deepep",
        "moe_permute_fusion",
        "moe_token_drop_policy",
        "moe_layer_recompute",
        "moe_per_layer_logging",
    )
    processors = {"deepep": moe.moe_deepep_num_sms, "hybridep": moe.moe_hybridep_num_sms}
    settings = dispatcher_settings(moe.moe_flex_dispatcher_backend, processors)
    if config.is_given("moe_flex_dispatcher_num_sms"):  # the one spelling of newer generations
        settings = {}
    return {
        **{name: getattr(moe, name) for name in same_name},
        **settings,
        "num_moe_experts": moe.num_experts,
        "moe_layer_freq": [int(each) for each in moe.expert_layers(config.model.num_layers)],
        "moe_router_load_balancing_type": _one_or_list(moe.moe_router_load_balancing_type),
        "moe_aux_loss_coeff": _one_or_list(moe.moe_aux_loss_coeff),
        "moe_expert_capacity_factor": moe.capacity_factor,
    }


def _recomputed_modules(config: Config) -> list[str] | None:
    """What selective recomputation drops; expert by expert, there is no grouped activation."""
    modules = config.training.recompute_modules
    if modules is None:
        return None
    return [name for name in modules if name != "moe_act" or config.moe.moe_grouped_gemm]


def build_transformer_config(config: Config) -> TransformerConfig:
    """Translate a validated configuration.

    Args:
        config: the run's configuration; on a CPU its kernel flags are off already.

    Returns:
        The TransformerConfig that every layer and schedule of megatron-core reads.
    """
    model, parallel, training = config.model, config.parallel, config.training
    config_class: type[TransformerConfig] = TransformerConfig
    if config.attention.multi_latent_attention:
        config_class = MLATransformerConfig
    text = config.heterogeneous.text
    layers: dict[str, Any] = {}
    if text is not None:
        config_class = HeterogeneousTransformerConfig
        layers["heterogeneous_layers_config_encoded_json"] = text
    return config_class(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        normalization=model.normalization,
        layernorm_epsilon=model.norm_epsilon,
        layernorm_zero_centered_gamma=model.apply_layernorm_1p,
        add_bias_linear=model.add_bias_linear,
        add_qkv_bias=model.add_qkv_bias,
        qk_layernorm=model.qk_layernorm,
        attention_dropout=model.attention_dropout,
        hidden_dropout=model.hidden_dropout,
        attention_softmax_in_fp32=model.attention_softmax_in_fp32,
        apply_query_key_layer_scaling=model.apply_query_key_layer_scaling,
        apply_residual_connection_post_layernorm=model.apply_residual_connection_post_layernorm,
        fp32_residual_connection=model.fp32_residual_connection,
        rotary_interleaved=model.rotary_interleaved,
        attention_backend=_attention_backend(model.attention_backend),
        init_method=_keep,
        output_layer_init_method=_keep,
        embedding_init_method=_keep,
        init_method_std=model.init_method_std,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        **_pipeline(config),
        context_parallel_size=parallel.context_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        params_dtype=params_dtype(config),
        pipeline_dtype=params_dtype(config),
        bf16=training.bf16,
        fp16=training.fp16,
        calculate_per_token_loss=training.calculate_per_token_loss,
        deterministic_mode=training.deterministic_mode,
        mtp_num_layers=config.loss.mtp_num_layers,
        mtp_loss_scaling_factor=config.loss.mtp_loss_scaling_factor,
        recompute_granularity=training.recompute_granularity,
        recompute_method=training.recompute_method,
        recompute_num_layers=training.recompute_num_layers,
        recompute_modules=_recomputed_modules(config),
        bias_activation_fusion=_fuses_activation(config),
        bias_dropout_fusion=config.kernels.bias_dropout_fusion,
        masked_softmax_fusion=config.kernels.masked_softmax_fusion,
        persist_layer_norm=config.kernels.persist_layer_norm,
        gradient_accumulation_fusion=config.kernels.gradient_accumulation_fusion,
        # Our rotary lookup is already one fused pass per micro-batch.
        apply_rope_fusion=False,
        **_activation(config),
        **_attention(config),
        **layers,
        **_experts(config),
        **_linear_attention(config),
        **config.core_values(field.name for field in dataclasses.fields(config_class)),
    )
