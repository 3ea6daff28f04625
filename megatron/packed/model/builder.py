"""Build this rank's model: chunks of GPT, initial weights, precision, data parallelism."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron.packed.accelerator import Accelerator
from megatron.packed.arguments import Config
from megatron.packed.model import patches
from megatron.packed.model.gpt import PackedGPTModel
from megatron.packed.model.initialization import (
    InitializationConfig,
    initialize_weights,
    is_routed_expert,
)
from megatron.packed.model.layer_specs import build_layer_spec, build_mtp_block_spec
from megatron.packed.model.rotary import (
    PositionIndexedRotaryEmbedding,
    Yarn,
    YarnPositionIndexedRotaryEmbedding,
)
from megatron.packed.model.transformer_config import build_transformer_config
from megatron.packed.model.width_transfer import multiply_ends


def build_gpt_model(
    config: Config,
    transformer_config: TransformerConfig,
    accelerator: Accelerator,
    *,
    vocab_size: int,
    padded_vocab_size: int,
    vp_stage: int | None = None,
) -> PackedGPTModel:
    """Build a pipeline stage of this rank with its initial weights.

    Args:
        config: the run's configuration.
        transformer_config: its megatron-core form.
        accelerator: where the weights live.
        vocab_size: ids of the tokenizer.
        padded_vocab_size: rows of the embedding over all tensor-parallel ranks.
        vp_stage: which of this rank's stages, when it has several.

    Returns:
        The unwrapped model, in the parameter dtype, on the accelerator.
    """
    patches.install()
    model_flags = config.model
    model = PackedGPTModel(
        real_vocab_size=vocab_size,
        config=transformer_config,
        transformer_layer_spec=build_layer_spec(config, transformer_config, accelerator, vp_stage),
        vocab_size=padded_vocab_size,
        max_sequence_length=model_flags.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        parallel_output=True,
        share_embeddings_and_output_weights=not model_flags.untie_embeddings_and_output_weights,
        # YaRN is RoPE with other frequencies: core's own class for it is not built.
        position_embedding_type=(
            "rope"
            if model_flags.position_embedding_type == "yarn"
            else model_flags.position_embedding_type
        ),
        rotary=build_rotary_embedding(config),
        mtp_block_spec=build_mtp_block_spec(config, transformer_config, accelerator, vp_stage),
        vp_stage=vp_stage,
    )
    initialize_weights(
        model,
        InitializationConfig(
            seed=config.training.seed,
            std=model_flags.init_method_std,
            num_layers=model_flags.num_layers,
            gated_linear_unit=transformer_config.gated_linear_unit,
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            tp_size=parallel_state.get_tensor_model_parallel_world_size(),
            vocab_size=vocab_size,
            expert_tp_rank=parallel_state.get_expert_tensor_parallel_rank(),
            expert_tp_size=parallel_state.get_expert_tensor_parallel_world_size(),
            first_expert=first_expert(transformer_config),
            embedding_std=model_flags.embedding_init_method_std,
            xavier=model_flags.init_method_xavier_uniform,
            width_mult=model_flags.width_mult,
        ),
        layer_offset=get_transformer_layer_offset(transformer_config, vp_stage),
    )
    reduce_experts_over_their_replicas(model, transformer_config)
    multiply_ends(config, model)
    return model.to(accelerator.device)


def build_rotary_embedding(config: Config) -> PositionIndexedRotaryEmbedding | None:
    """The rotary embedding that all layers of a stage share; None where nothing is rotated.

    Args:
        config: the run's configuration.
    """
    model, attention = config.model, config.attention
    latent = attention.multi_latent_attention
    if not latent and model.position_embedding_type not in ("rope", "yarn"):
        return None
    cp_group = parallel_state.get_context_parallel_group()
    width = attention.qk_pos_emb_head_dim if latent else model.kv_channels
    if attention.rotates_by_yarn if latent else model.position_embedding_type == "yarn":
        yarn = Yarn(
            factor=attention.rotary_scaling_factor,
            original_length=attention.yarn_original_max_position_embeddings,
            beta_fast=attention.yarn_beta_fast,
            beta_slow=attention.yarn_beta_slow,
            mscale=attention.mscale,
            mscale_all_dim=attention.mscale_all_dim,
            round_to_int=attention.yarn_correction_range_round_to_int,
        )
        return YarnPositionIndexedRotaryEmbedding(
            width, yarn=yarn, rotary_base=model.rotary_base, cp_group=cp_group
        )
    return PositionIndexedRotaryEmbedding(
        kv_channels=width,
        rotary_percent=model.rotary_percent,
        rotary_interleaved=model.rotary_interleaved,
        seq_len_interpolation_factor=model.rotary_seq_len_interpolation_factor,
        rotary_base=model.rotary_base,
        rope_scaling=model.use_rope_scaling,
        rope_scaling_factor=model.rope_scaling_factor,
        cp_group=cp_group,
    )


def first_expert(config: TransformerConfig) -> int:
    """Number of this rank's first expert in each layer."""
    experts = config.num_moe_experts or 0
    rank = parallel_state.get_expert_model_parallel_rank()
    return experts // config.expert_model_parallel_size * rank


def reduce_experts_over_their_replicas(model: torch.nn.Module, config: TransformerConfig) -> None:
    """Mark experts' parameters for the data-parallel group of experts, where it is another one.

    megatron-core marks them with expert parallelism only; ranks of a tensor-parallel group that
    hold whole experts see other tokens, too.
    """
    same_groups = config.expert_tensor_parallel_size == config.tensor_model_parallel_size
    if config.expert_model_parallel_size == 1 and same_groups:
        return
    for name, parameter in model.named_parameters():
        if is_routed_expert(name):
            parameter.allreduce = False  # type: ignore[attr-defined]


def wrap_for_training(
    config: Config,
    transformer_config: TransformerConfig,
    model: torch.nn.Module,
    chunk: int = 0,
) -> DistributedDataParallel:
    """Wrap a stage in precision conversion and megatron-core's DistributedDataParallel.

    Args:
        config: the run's configuration.
        transformer_config: its megatron-core form.
        model: the stage of `build_gpt_model`.
        chunk: which of this rank's stages it is.

    Returns:
        The wrapped stage, ready for `get_megatron_optimizer`.
    """
    if config.training.bf16 or config.training.fp16:
        model = Float16Module(transformer_config, model)
    overlap = config.parallel.overlap_grad_reduce
    fields = dataclasses.fields(DistributedDataParallelConfig)
    core = config.core_values(field.name for field in fields)
    buckets = config.parallel.ddp_num_buckets
    if buckets is not None:
        core["bucket_size"] = sum(p.numel() for p in model.parameters()) // buckets
    return DistributedDataParallel(
        config=transformer_config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=not config.optimizer_options.grad_reduce_in_bf16,
            num_distributed_optimizer_instances=(
                config.parallel.num_distributed_optimizer_instances
            ),
            overlap_grad_reduce=overlap,
            overlap_param_gather=config.parallel.overlap_param_gather,
            use_distributed_optimizer=config.parallel.use_distributed_optimizer,
            # The training step looks itself, and tells every rank: core's own check raises on the
            # rank that has the NaN while its peers wait in a collective.
            check_for_nan_in_grad=False,
            **core,
        ),
        module=model,
        # Backward ends with the first chunk, the only one whose gradients come in pieces.
        disable_bucketing=not overlap or chunk > 0,
    )


def count_parameters(model: list[DistributedDataParallel], device: torch.device) -> int:
    """Parameters of the whole model, tied copies and tensor-parallel replicas counted once."""
    return int(sum_over_parameters(model, lambda parameter: parameter.numel(), device))


def sum_over_parameters(
    model: list[DistributedDataParallel],
    value: Callable[[torch.Tensor], Any],
    device: torch.device,
) -> float:
    """Add a number of each parameter over the whole model; a collective call.

    Tied copies and replicas count once: those of tensor-parallel ranks, and for routed experts
    those of the ranks that share an expert.

    Args:
        model: this rank's stages.
        value: of one rank's part of a parameter.
        device: where collectives run.
    """
    dense_rank = parallel_state.get_tensor_model_parallel_rank()
    expert_rank = parallel_state.get_expert_tensor_parallel_rank()
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    named = itertools.chain.from_iterable(chunk.module.named_parameters() for chunk in model)
    for name, parameter in named:
        expert = is_routed_expert(name)
        split = getattr(parameter, "tensor_model_parallel", False)
        first = (expert_rank if expert else dense_rank) == 0
        if (split or first) and not getattr(parameter, "shared", False):
            totals[int(expert)] += value(parameter)
    dense, experts = totals.split(1)
    torch.distributed.all_reduce(dense, group=parallel_state.get_model_parallel_group())
    group = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    torch.distributed.all_reduce(experts, group=group)
    return float(totals.sum())


def build_model(
    config: Config, accelerator: Accelerator, *, vocab_size: int, padded_vocab_size: int
) -> tuple[list[DistributedDataParallel], TransformerConfig]:
    """Build and wrap this rank's stages.

    Returns:
        The stages in the order that tokens pass them, and the TransformerConfig they run under.
    """
    transformer_config = build_transformer_config(config)
    virtual = transformer_config.virtual_pipeline_model_parallel_size
    chunks = []
    for number in range(virtual or 1):
        model = build_gpt_model(
            config,
            transformer_config,
            accelerator,
            vocab_size=vocab_size,
            padded_vocab_size=padded_vocab_size,
            vp_stage=number if virtual else None,
        )
        chunks.append(wrap_for_training(config, transformer_config, model, number))
    return chunks, transformer_config
