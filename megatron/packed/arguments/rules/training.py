"""Rules on precision, recomputation and the schedules."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.packed.arguments.config import Config
from megatron.packed.arguments.stages import LayoutError, stages_of


def precision(config: Config) -> Iterator[str]:
    training, scale = config.training, config.optimizer_options
    half = training.bf16 or training.fp16
    if config.model.fp32_residual_connection and not half:
        yield (
            "--fp32-residual-connection: needs --bf16 or --fp16; in fp32 the residual is fp32 "
            "already"
        )
    if training.bf16 and training.fp16:
        yield "--bf16 and --fp16: exclude each other; keep one"
    if scale.grad_reduce_in_bf16 and not training.bf16:
        yield "--grad-reduce-in-bf16: needs --bf16; leave it out"
    elif scale.grad_reduce_in_bf16 and config.is_given("accumulate_allreduce_grads_in_fp32"):
        yield (
            "--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32: exclude each other; "
            "keep one"
        )


def optimizer_precision(config: Config) -> Iterator[str]:
    options = config.optimizer_options
    name = "--use-precision-aware-optimizer"
    if not options.use_precision_aware_optimizer:
        for dest in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            if (value := getattr(options, dest)) != "fp32":
                yield f"--{dest.replace('_', '-')} {value}: needs {name}; add it or leave this out"
        return
    if not config.parallel.use_distributed_optimizer and config.optimization.optimizer != "adam":
        yield (
            f"{name}: is an Adam, and --optimizer is {config.optimization.optimizer}; leave one out"
        )
    elif not config.parallel.use_distributed_optimizer:
        yield f"{name}: needs --use-distributed-optimizer; add it or leave this out"
    if options.main_grads_dtype == "bf16" and not options.grad_reduce_in_bf16:
        yield (
            "--main-grads-dtype bf16: needs --bf16 and --grad-reduce-in-bf16, or gradients are "
            "accumulated in fp32"
        )


def loss_scale(config: Config) -> Iterator[str]:
    scale = config.optimizer_options
    if scale.loss_scale is not None and not (config.training.fp16 or config.training.bf16):
        yield (
            f"--loss-scale {scale.loss_scale:g}: needs --fp16 or --bf16; gradients in fp32 don't "
            "underflow"
        )
    if scale.min_loss_scale > scale.initial_loss_scale:
        yield (
            f"--min-loss-scale {scale.min_loss_scale:g}: must be at most --initial-loss-scale "
            f"{scale.initial_loss_scale:g}"
        )


def _largest_stage(config: Config) -> int:
    try:
        return max(stages_of(config).layers)
    except LayoutError:  # which another rule reports
        return config.model.num_layers


def recompute(config: Config) -> Iterator[str]:
    training = config.training
    granularity, method = training.recompute_granularity, training.recompute_method
    layers = training.recompute_num_layers
    if granularity == "full":
        if method is None or layers is None:
            yield (
                "--recompute-granularity full: needs --recompute-method and "
                "--recompute-num-layers; 'uniform' and 1 save the most memory"
            )
        else:
            stage = _largest_stage(config)
            if layers > stage:
                yield (
                    f"--recompute-num-layers {layers}: a pipeline stage has {stage} layers; "
                    "use at most that many"
                )
    elif granularity is not None and (method is not None or layers is not None):
        yield (
            "--recompute-method and --recompute-num-layers: need --recompute-granularity full, "
            f"not {granularity}; leave them out or ask for full"
        )


def recomputed_modules(config: Config) -> Iterator[str]:
    modules = config.training.recompute_modules
    if modules is None:
        return
    if config.training.recompute_granularity != "selective":
        yield (
            f"--recompute-modules {' '.join(modules)}: needs --recompute-granularity selective; "
            "add it or leave the modules out"
        )
    for names, flag, given in (
        (("mla_up_proj",), "--multi-latent-attention", config.attention.multi_latent_attention),
        (("moe", "shared_experts"), "--num-experts", config.moe.num_experts is not None),
        (("moe_act",), "--moe-grouped-gemm", config.moe.moe_grouped_gemm),
    ):
        for name in names:
            if name in modules and not given:
                yield f"--recompute-modules {name}: needs {flag}; add it or leave {name} out"


def learning_rate(config: Config) -> Iterator[str]:
    optimization = config.optimization
    if optimization.min_lr > optimization.lr:
        yield f"--min-lr {optimization.min_lr:g}: must be at most --lr {optimization.lr:g}"
    if optimization.lr_warmup_init > optimization.lr:
        yield (
            f"--lr-warmup-init {optimization.lr_warmup_init:g}: must be at most --lr "
            f"{optimization.lr:g}; warm-up rises"
        )


def decoupled_learning_rate(config: Config) -> Iterator[str]:
    apart = config.optimizer_options
    peak = config.optimization.lr if apart.decoupled_lr is None else apart.decoupled_lr
    if apart.decoupled_min_lr is None:
        least = config.optimization.min_lr
        if apart.decoupled_lr is not None and least > peak:
            yield (
                f"--decoupled-lr {peak:g}: must be at least --min-lr {least:g}; give "
                "--decoupled-min-lr"
            )
    elif apart.decoupled_lr is None:
        yield f"--decoupled-min-lr {apart.decoupled_min_lr:g}: needs --decoupled-lr"
    elif apart.decoupled_min_lr > peak:
        yield (
            f"--decoupled-min-lr {apart.decoupled_min_lr:g}: must be at most --decoupled-lr "
            f"{peak:g}"
        )


def warmup(config: Config) -> Iterator[str]:
    optimization = config.optimization
    fraction, iterations = optimization.lr_warmup_fraction, optimization.lr_warmup_iters
    if fraction is not None and iterations:
        yield (
            f"--lr-warmup-fraction {fraction:g} and --lr-warmup-iters {iterations}: "
            "exclude each other; keep one"
        )
    elif optimization.warmup_iters >= optimization.lr_decay_iters:
        yield (
            f"warm-up of {optimization.warmup_iters:g} iterations: must be shorter than "
            f"--lr-decay-iters {optimization.lr_decay_iters} (default --train-iters); shorten "
            "--lr-warmup-iters or --lr-warmup-fraction"
        )


def final_decay(config: Config) -> Iterator[str]:
    optimization = config.optimization
    final = optimization.lr_wsd_decay_iters
    if optimization.lr_decay_style != "WSD":
        if final is not None:
            yield f"--lr-wsd-decay-iters {final}: needs --lr-decay-style WSD"
    elif final is None:
        yield "--lr-decay-style WSD: needs --lr-wsd-decay-iters, the length of its final phase"
    elif final > optimization.lr_decay_iters:
        yield (
            f"--lr-wsd-decay-iters {final}: must be at most --lr-decay-iters "
            f"{optimization.lr_decay_iters}"
        )


def weight_decay(config: Config) -> Iterator[str]:
    start, end = config.optimization.start_weight_decay, config.optimization.end_weight_decay
    given = [dest for dest in ("start_weight_decay", "end_weight_decay") if config.is_given(dest)]
    if config.optimization.weight_decay_incr_style == "constant":
        if given:
            yield (
                "--start-weight-decay and --end-weight-decay: need --weight-decay-incr-style "
                "linear or cosine; for a constant one give --weight-decay"
            )
    elif len(given) < 2:
        yield (
            f"--weight-decay-incr-style {config.optimization.weight_decay_incr_style}: needs "
            "--start-weight-decay and --end-weight-decay"
        )
    elif end < start:
        yield f"--end-weight-decay {end:g}: must be at least --start-weight-decay {start:g}"


RULES = (
    precision,
    optimizer_precision,
    loss_scale,
    recompute,
    recomputed_modules,
    learning_rate,
    decoupled_learning_rate,
    warmup,
    final_decay,
    weight_decay,
)
