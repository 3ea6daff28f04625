"""From what was asked for to what will run: derived defaults, replacements, rules."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from megatron.packed.arguments.batch_sizes import BatchSizes, batch_sizes
from megatron.packed.arguments.config import DERIVED, REPLACED, Config, Replacement, all_specs
from megatron.packed.arguments.declare import KEEP
from megatron.packed.arguments.rules import (
    check_hardware_rules,
    check_rules,
    check_strictness,
    check_values,
)
from megatron.packed.errors import ConfigurationError


def validate(config: Config, *, accelerator: str | None = None) -> Config:
    """Fill derived defaults in, replace what the hardware lacks, and check every rule.

    Args:
        config: As parsed.
        accelerator: What `--accelerator auto` means on this machine (`cuda` or `cpu`), from a
            caller that has looked; None asks torch.

    Returns:
        A config whose derived fields hold values and whose `replacements` say what changed.

    Raises:
        ConfigurationError: With one message a broken rule: flag, value, rule, way out.
    """
    check_values(config)
    config = _follow_upstream(_derive(config))
    check_rules(config)  # on what was asked, and before torch is imported
    if config.runtime.accelerator == "auto":
        config = config.with_values({"accelerator": accelerator or _detect_accelerator()}, DERIVED)
    check_hardware_rules(config)
    config = _replace_dispatcher(_replace(config))
    check_strictness(config)
    return config


_UNTRIED = "a setting of this megatron-core that no test here covers"


def _detect_accelerator() -> str:
    import torch  # here, since a bad flag shall be answered without waiting for it

    return "cuda" if torch.cuda.is_available() else "cpu"


def _derive(config: Config) -> Config:
    defaults = _derived_defaults(config)
    return config.with_values({d: v for d, v in defaults.items() if config.get(d) is None}, DERIVED)


def _derived_defaults(config: Config) -> dict[str, Any]:
    model, training, optimization = config.model, config.training, config.optimization
    width, heads = model.hidden_size, model.num_attention_heads
    whole = config.packing.packs_documents or config.sft.sft
    sizes = _batch_sizes(config)
    train_iters = training.train_iters
    if train_iters is None:
        train_iters = sizes.iterations(config.schedule.train_samples or 0)
    ffn = int((4 * width * 2 / 3) / 64) * 64 if model.swiglu else 4 * width
    return {
        "ffn_hidden_size": ffn,
        "moe_ffn_hidden_size": model.ffn_hidden_size or ffn,
        "expert_tensor_parallel_size": config.parallel.tensor_model_parallel_size,
        "kv_channels": max(1, width // heads),
        "num_query_groups": 1 if model.group_query_attention else heads,
        "max_position_embeddings": config.data.seq_length,
        "train_iters": train_iters,
        "global_batch_size": sizes.last,
        "eval_global_batch_size": sizes.last,
        "eval_micro_batch_size": training.micro_batch_size,
        "lr_decay_iters": max(1, train_iters),
        "start_weight_decay": optimization.weight_decay,
        "end_weight_decay": optimization.weight_decay,
        "split": _default_split(config),
        "dataloader_type": "single",
        "document_boundaries": "index" if whole else "eod",
        "threads": max(1, len(os.sched_getaffinity(0)) // config.parallel.local_world_size),
    }


def _batch_sizes(config: Config) -> BatchSizes:
    try:
        return batch_sizes(config)
    except ConfigurationError:  # which a rule will raise again, by the flag's name
        return BatchSizes((0,), (config.training.micro_batch_size,))


def _default_split(config: Config) -> str | None:
    if config.data.has_one_blend:
        return "969,30,1"
    return "1,1,1" if config.data.mock_data else None


def _follow_upstream(config: Config) -> Config:
    """Apply what upstream's own validation decides from other flags."""
    config = _drop_what_has_no_effect(config)
    model, training = config.model, config.training
    if config.optimization.uses_muon and config.parallel.use_distributed_optimizer:
        why = "Muon needs its matrices whole: each replica keeps the state of some"
        config = _substitute(config, "use_distributed_optimizer", False, why, "dist_muon")
        config = config.with_values({"optimizer": "dist_muon"}, REPLACED)
        if config.parallel.overlap_param_gather:
            config = _substitute(config, "overlap_param_gather", False, why)
    implied: dict[str, Any] = {}
    if model.use_rotary_position_embeddings:
        implied["position_embedding_type"] = "rope"
    if config.sft.sft and not config.is_given("packing_strategy"):
        # Without --use-packed-sequence nothing reads it.
        implied["packing_strategy"] = "best_fit_decreasing"
    if model.add_bias_linear:
        implied["add_qkv_bias"] = True
    if model.apply_query_key_layer_scaling:
        implied["attention_softmax_in_fp32"] = True
    if training.bf16:
        implied[
            "accumulate_allreduce_grads_in_fp32"
        ] = not config.optimizer_options.grad_reduce_in_bf16
    if config.kernels.use_flash_attn and model.attention_backend == "auto":
        implied["attention_backend"] = "flash"
    config = _other_spellings(config)
    if training.recompute_activations:
        implied["recompute_granularity"] = "selective"
    if config.packing.use_packed_sequence:
        implied |= dict.fromkeys(
            (
                "calculate_per_token_loss",
                "reset_position_ids",
                "reset_attention_mask",
                "eod_mask_loss",
            ),
            True,
        )
    if config.loss.mtp_depths:
        # Its losses are divided by counts of the global batch, as the main loss then must be.
        implied["calculate_per_token_loss"] = True
    return config.with_values(
        {d: v for d, v in implied.items() if config.get(d) != v}, source=DERIVED
    )


def _drop_what_has_no_effect(config: Config) -> Config:
    """Undo what means nothing beside other flags, saying so to who asked for it."""
    model, training = config.model, config.training
    if not model.group_query_attention and model.num_query_groups != model.num_attention_heads:
        config = _substitute(
            config,
            "num_query_groups",
            model.num_attention_heads,
            "without --group-query-attention every head has its own keys and values",
        )
    if config.parallel.sequence_parallel and config.parallel.tensor_model_parallel_size == 1:
        config = _substitute(
            config, "sequence_parallel", False, "with one tensor-parallel process nothing is shared"
        )
    if training.recompute_granularity is None and not training.recompute_activations:
        for dest in ("recompute_method", "recompute_num_layers"):
            if config.get(dest) is not None:
                why = "without --recompute-granularity there is nothing to recompute"
                config = _substitute(config, dest, None, why, "no recomputation")
    return config


def _other_spellings(config: Config) -> Config:
    """Follow flags that are spelled otherwise elsewhere, and say so."""
    elsewhere = config.elsewhere
    means_packing = {
        "use_packed_sequences": elsewhere.use_packed_sequences,
        "packed_seq_cu_seqlens_style": elsewhere.packed_seq_cu_seqlens_style is not None,
        "dataloader_inter_document_masking": elsewhere.dataloader_inter_document_masking,
    }
    spelled = {dest: "--use-packed-sequence" for dest, asked in means_packing.items() if asked}
    if spelled:
        config = config.with_values({"use_packed_sequence": True}, DERIVED)
    if config.kernels.use_flash_attn:
        spelled["use_flash_attn"] = "--attention-backend flash"
    rows = tuple(
        Replacement(
            all_specs()[dest].name, show(config.get(dest)), meaning, "the same, spelled here", True
        )
        for dest, meaning in spelled.items()
    )
    kept = tuple(row for row in config.replacements if row not in rows)
    return dataclasses.replace(config, replacements=kept + rows)


def _substitute(config: Config, dest: str, value: Any, why: str, used: str | None = None) -> Config:
    """Set a field and, where the user had asked for another value, say so in `replacements`."""
    spec = all_specs()[dest]
    row = Replacement(spec.name, show(config.get(dest)), used or show(value), why)
    rows = config.replacements + ((row,) if config.is_given(dest) else ())
    config = dataclasses.replace(config, replacements=rows)
    return config if value == KEEP else config.with_values({dest: value}, REPLACED)


def _replace(config: Config) -> Config:
    """Swap what this hardware answers by an exact equivalent, listing what the user asked for."""
    for dest, spec in all_specs().items():
        replaced = spec.replaced
        if spec.passed_on and config.is_given(dest) and config.get(dest) != spec.default:
            config = _substitute(config, dest, KEEP, _UNTRIED, "as megatron-core does")
        if replaced is None or config.runtime.accelerator not in replaced.accelerators:
            continue
        value = config.get(dest)
        turned_off = spec.value_type is bool and not value
        if config.is_given(dest) and value != replaced.value and not turned_off:
            config = _substitute(config, dest, replaced.value, replaced.why, replaced.used)
        elif replaced.value not in (KEEP, value):
            config = config.with_values({dest: replaced.value}, REPLACED)
    return config


def _replace_dispatcher(config: Config) -> Config:
    """Take the dispatcher that moves tokens here; all of them compute the same function."""
    moe, packing = config.moe, config.packing
    if moe.num_experts is None:
        return config
    if moe.moe_token_dispatcher_type == "flex" and config.runtime.accelerator == "cpu":
        why = "the libraries of flex need CUDA"
        return _substitute(config, "moe_token_dispatcher_type", "alltoall", why)
    lengths_vary = (
        packing.use_packed_sequence
        and packing.packed_sequence_capacity is None
        and (packing.packing_alignment == "segment" or config.parallel.context_parallel_size > 1)
    )
    exchange = moe.expert_model_parallel_size * moe.expert_tensor_parallel_size > 1
    if moe.moe_token_dispatcher_type == "allgather" and lengths_vary and exchange:
        why = "packs of different processes differ in length"
        return _substitute(config, "moe_token_dispatcher_type", "alltoall", why)
    return config


def show(value: Any) -> str:
    """Write a config value the way a user would: on/off, lists by spaces, numbers short."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
