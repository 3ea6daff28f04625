"""Build this rank's model: chunks of GPT, initial weights, precision, data parallelism."""

from __future__ import annotations

import dataclasses
import itertools

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
from megatron.packed.model.initialization import InitializationConfig, initialize_weights
from megatron.packed.model.layer_specs import build_layer_spec
from megatron.packed.model.rotary import (
    PositionIndexedRotaryEmbedding,
    Yarn,
    YarnPositionIndexedRotaryEmbedding,
)
from megatron.packed.model.transformer_config import build_transformer_config


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
        ),
        layer_offset=get_transformer_layer_offset(transformer_config, vp_stage),
    )
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
    return DistributedDataParallel(
        config=transformer_config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=overlap,
            overlap_param_gather=config.parallel.overlap_param_gather,
            use_distributed_optimizer=config.parallel.use_distributed_optimizer,
            # The training step looks itself, and tells every rank: core's own check raises on the
            # rank that has the NaN while its peers wait in a collective.
            check_for_nan_in_grad=False,
            **config.core_values(
                field.name for field in dataclasses.fields(DistributedDataParallelConfig)
            ),
        ),
        module=model,
        # Backward ends with the first chunk, the only one whose gradients come in pieces.
        disable_bucketing=not overlap or chunk > 0,
    )


def count_parameters(model: list[DistributedDataParallel], device: torch.device) -> int:
    """Parameters of the whole model, tied copies and tensor-parallel replicas counted once."""
    local = 0
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    for parameter in itertools.chain.from_iterable(chunk.parameters() for chunk in model):
        if getattr(parameter, "shared", False):
            continue
        if tp_rank == 0 or getattr(parameter, "tensor_model_parallel", False):
            local += parameter.numel()
    total = torch.tensor([local], dtype=torch.int64, device=device)
    torch.distributed.all_reduce(total, group=parallel_state.get_model_parallel_group())
    return int(total.item())


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
