"""Optimizer and schedules, through megatron-core."""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.packed.accelerator import Accelerator
from megatron.packed.arguments import Config
from megatron.packed.errors import ConfigurationError
from megatron.packed.model.transformer_config import params_dtype
from megatron.packed.model.width_transfer import optimizer_overrides
from megatron.packed.training.groups import tell_groups_apart
from megatron.packed.training.loss_scale import share_loss_scale
from megatron.packed.training.muon_chain import build_muon

# fp8 is bytes with a scale beside them.
_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.uint8,
}


def build_optimizer(
    config: Config, model: list[DistributedDataParallel], accelerator: Accelerator
) -> MegatronOptimizer:
    """Build megatron-core's optimizer for the wrapped model chunks of this rank."""
    core = core_optimizer_config(config)
    gloo_groups = accelerator.name == "cuda" and config.acceleration.use_gloo_process_groups
    if config.optimization.uses_muon:
        optimizer = build_muon(config, core, model, gloo_groups)
    else:
        optimizer = get_megatron_optimizer(
            core,
            model,
            config_overrides=optimizer_overrides(config, core),
            use_gloo_process_groups=gloo_groups,
        )
    _fuse_updates(optimizer)
    share_loss_scale(optimizer)
    tell_groups_apart(optimizer)
    return optimizer


def core_optimizer_config(config: Config) -> OptimizerConfig:
    """Our configuration -> megatron-core's OptimizerConfig."""
    flags, options = config.optimization, config.optimizer_options
    return OptimizerConfig(
        optimizer="adam" if flags.uses_muon else flags.optimizer,
        lr=flags.lr,
        min_lr=flags.min_lr,
        decoupled_lr=options.decoupled_lr,
        decoupled_min_lr=options.decoupled_min_lr,
        weight_decay=flags.weight_decay,
        apply_wd_to_qk_layernorm=options.apply_wd_to_qk_layernorm,
        clip_grad=flags.clip_grad,
        adam_beta1=flags.adam_beta1,
        adam_beta2=flags.adam_beta2,
        adam_eps=flags.adam_eps,
        sgd_momentum=flags.sgd_momentum,
        bf16=config.training.bf16,
        fp16=config.training.fp16,
        loss_scale=options.loss_scale,
        initial_loss_scale=options.initial_loss_scale,
        min_loss_scale=options.min_loss_scale,
        loss_scale_window=options.loss_scale_window,
        hysteresis=options.hysteresis,
        params_dtype=params_dtype(config),
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
        overlap_param_gather=config.parallel.overlap_param_gather,
        log_num_zeros_in_grad=config.logging.log_num_zeros_in_grad,
        **_precision(config),
        **config.core_values(field.name for field in dataclasses.fields(OptimizerConfig)),
    )


def _precision(config: Config) -> dict[str, Any]:
    """Types of what the optimizer keeps; none where they are fp32.

    Raises:
        ConfigurationError: They need TransformerEngine's optimizer, which isn't installed.
    """
    options = config.optimizer_options
    if not options.use_precision_aware_optimizer:
        return {}
    if importlib.util.find_spec("transformer_engine") is None:
        raise ConfigurationError(
            "--use-precision-aware-optimizer: the package transformer_engine isn't installed; "
            "install megatron-packed[gpu], or leave the flag out to keep every state in fp32"
        )
    names = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    types = {name: _DTYPES[getattr(options, name)] for name in names}
    return {"use_precision_aware_optimizer": True, **types}


def _fuse_updates(optimizer: MegatronOptimizer) -> None:
    """Let PyTorch's Adam update each parameter in one pass.

    megatron-core constructs torch's AdamW with its default, an unfused sequence of a dozen passes
    over the weights, when neither TransformerEngine nor apex supplies a fused one.
    """
    for member in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(member, "optimizer", None)
        if isinstance(inner, (torch.optim.AdamW, torch.optim.Adam)):
            inner.defaults["fused"] = True
            for group in inner.param_groups:
                group["fused"] = True
                group["foreach"] = False


@dataclass(frozen=True)
class ScheduleLengths:
    """Phases of the schedules, in samples.

    Attributes:
        run: the whole run, over which weight decay goes from start to end.
        decay: of the learning rate, warm-up included.
        warmup: until the peak learning rate.
        final_decay: WSD's last phase; None for other shapes.
    """

    run: int
    decay: int
    warmup: float
    final_decay: int | None


def schedule_lengths(config: Config) -> ScheduleLengths:
    """Return the phases in samples, whichever unit the flags have.

    Args:
        config: a validated configuration.
    """
    flags, schedule = config.optimization, config.schedule
    if schedule.train_samples is not None:
        run = schedule.train_samples
        decay, final_decay = schedule.lr_decay_samples or run, schedule.lr_wsd_decay_samples
        warmup: float = schedule.lr_warmup_samples
    else:
        batch = config.training.global_batch_size
        run = config.training.train_iters * batch
        decay = (flags.lr_decay_iters or config.training.train_iters) * batch
        final = flags.lr_wsd_decay_iters
        final_decay = None if final is None else final * batch
        warmup = flags.lr_warmup_iters * batch
    if flags.lr_warmup_fraction is not None:
        warmup = flags.lr_warmup_fraction * decay
    return ScheduleLengths(run, decay, warmup, final_decay)


def build_scheduler(config: Config, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Learning-rate and weight-decay schedules in samples, as upstream counts them."""
    flags, length = config.optimization, schedule_lengths(config)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=flags.lr_warmup_init,
        max_lr=flags.lr,
        min_lr=flags.min_lr,
        lr_warmup_steps=length.warmup,
        lr_decay_steps=length.decay,
        lr_decay_style=flags.lr_decay_style,
        start_wd=flags.start_weight_decay,
        end_wd=flags.end_weight_decay,
        wd_incr_steps=length.run,
        wd_incr_style=flags.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=config.checkpoint.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=config.checkpoint.override_opt_param_scheduler,
        wsd_decay_steps=length.final_decay,
        lr_wsd_decay_style=flags.lr_wsd_decay_style,
    )
