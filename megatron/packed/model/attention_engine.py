"""Which attention the layers get: this project's, TransformerEngine's or Magi's."""

from __future__ import annotations

import warnings

import torch
from megatron.core import parallel_state
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.packed.accelerator import Accelerator
from megatron.packed.arguments import Config
from megatron.packed.arguments.exchange import select_for
from megatron.packed.attention import magi, transformer_engine
from megatron.packed.attention.core_attention import PackedCoreAttention
from megatron.packed.attention.transformer_engine import TransformerEngineCoreAttention
from megatron.packed.context_parallel.capabilities import (
    AttentionShape,
    magi_lacks,
    transformer_engine_lacks,
)
from megatron.packed.errors import ConfigurationError
from megatron.packed.model.transformer_config import build_transformer_config

_PACKED = ModuleSpec(module=PackedCoreAttention)


def _has_cut_rows(config: Config) -> bool:
    return config.data.reset_attention_mask and not config.packing.use_packed_sequence


def attention_shape(config: Config, transformer_config: TransformerConfig) -> AttentionShape:
    """What an engine has to compute on one tensor-parallel rank."""
    attention, tp_size = config.attention, transformer_config.tensor_model_parallel_size
    width = value_width = int(transformer_config.kv_channels or 0)
    if attention.multi_latent_attention:
        width, value_width = attention.query_width, attention.v_head_dim
    return AttentionShape(
        heads=transformer_config.num_attention_heads // tp_size,
        kv_heads=max(1, int(transformer_config.num_query_groups or 0) // tp_size),
        width=width,
        value_width=value_width,
        cp_size=transformer_config.context_parallel_size,
        windows=transformer_config.window_size is not None,
        sinks=transformer_config.softmax_type != "vanilla",
        cut_rows=_has_cut_rows(config),
        fp8=transformer_config.fp8 is not None,
        half=transformer_config.bf16 or transformer_config.fp16,
    )


def select_core_attention(
    config: Config, transformer_config: TransformerConfig, accelerator: Accelerator
) -> ModuleSpec | None:
    """The core attention of every layer.

    Args:
        config: the run's configuration.
        transformer_config: its megatron-core form.
        accelerator: where the layers run.

    Returns:
        The module; None where TransformerEngine's layers may keep the one they come with, as
        they do with one context-parallel rank: batches are not cut then.

    Raises:
        ConfigurationError: for `--attention-backend fused` without the package.
    """
    if accelerator.name == "cpu":
        return _PACKED
    if transformer_config.context_parallel_size == 1:
        # Their attention takes masks, and rows come with the boundaries of their documents.
        return _PACKED if _has_cut_rows(config) else None
    if config.model.attention_backend != "fused":
        return _PACKED
    if not transformer_engine.is_installed():
        raise ConfigurationError(
            "--attention-backend fused: with --context-parallel-size "
            f"{transformer_config.context_parallel_size} it is TransformerEngine's, and the "
            "package transformer_engine isn't installed; install megatron-packed[gpu], or use "
            "--attention-backend flash"
        )
    selection = select_for(config)
    lacks = transformer_engine_lacks(selection, attention_shape(config, transformer_config))
    if lacks is None:
        exchanges = {"exchanges": selection.communications}
        return ModuleSpec(module=TransformerEngineCoreAttention, params=exchanges)
    warnings.warn(
        f"--attention-backend fused: TransformerEngine's attention can't run this layout, {lacks}; "
        "this project's own does",
        stacklevel=2,
    )
    return _PACKED


def magi_shape(config: Config, accelerator: Accelerator) -> magi.MagiShape | None:
    """What MagiAttention's own engine computes in this run; None where our plans do.

    Args:
        config: the run's configuration.
        accelerator: where the layers run.
    """
    parallel = config.parallel
    cp_size = parallel.context_parallel_size
    if accelerator.name != "cuda" or config.model.attention_backend != "magi" or cp_size == 1:
        return None
    transformer_config = build_transformer_config(config)
    shape = attention_shape(config, transformer_config)
    lacks = magi_lacks(select_for(config), shape, config.packing.packing_alignment)
    if not magi.is_installed():
        lacks = f"the package {magi.PACKAGE} isn't installed"
    elif torch.cuda.get_device_capability(accelerator.device) < magi.COMPUTE_CAPABILITY:
        lacks = "its kernels need a Hopper GPU or a newer one"
    if lacks is not None:
        warnings.warn(
            f"--attention-backend magi: {lacks}; this project's own dispatch runs", stacklevel=2
        )
        return None
    return magi.MagiShape(
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        width=shape.width,
        cp_size=cp_size,
        chunk_size=parallel.magi_attn_chunk_size,
        windows=tuple(dict.fromkeys(config.attention.layer_windows(config.model.num_layers))),
    )


def magi_engine(config: Config, accelerator: Accelerator) -> magi.MagiEngine | None:
    """MagiAttention's own engine on this run's ranks; None where our plans run.

    Raises:
        ConfigurationError: if the package is of another version.
    """
    shape = magi_shape(config, accelerator)
    if shape is None:
        return None
    return magi.MagiEngine(shape, parallel_state.get_context_parallel_group())
