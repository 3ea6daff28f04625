"""Batches, precision, the optimizer with its schedules, and evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.packed.arguments.declare import derived, flag, required


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How long to train, on what batches and in which precision."""

    SECTION: ClassVar[str] = "training"

    micro_batch_size: int = required("Rows in one forward pass of one replica.", at_least=1)
    global_batch_size: int = derived(
        "micro batch size * data-parallel size",
        "Rows of one optimizer step over all replicas and micro-batches.",
        at_least=1,
    )
    train_iters: int = required(
        "Optimizer steps of the whole run.", at_least=1, instead="train_samples"
    )
    exit_interval: int | None = flag(
        "Stop after the first iteration divisible by this.", at_least=1
    )
    seed: int = flag(
        "Seed of weights, dropout and data order.",
        default=1234,
        section="initialization",
        at_least=1,
        at_most=(1 << 32) - 1,  # of numpy's generators, which order the data
    )
    deterministic_mode: bool = flag("Only kernels that repeat bit by bit.", default=False)
    bf16: bool = flag("Train in bfloat16.", default=False, section="mixed precision")
    fp16: bool = flag(
        "Train in float16 with dynamic loss scaling.",
        default=False,
        section="mixed precision",
    )
    accumulate_allreduce_grads_in_fp32: bool = flag(
        "Accumulate and reduce gradients in fp32; always so but with --grad-reduce-in-bf16.",
        default=False,
        section="mixed precision",
    )
    calculate_per_token_loss: bool = flag(
        "Divide the summed loss once by the supervised tokens of the global batch; "
        "always so with --use-packed-sequence.",
        default=False,
    )
    check_for_nan_in_loss_and_grad: bool = flag(
        "Do not stop at a NaN or infinity in loss or gradients.",
        "--no-check-for-nan-in-loss-and-grad",
        default=True,
        negative=True,
    )
    recompute_activations: bool = flag(
        "Older spelling of --recompute-granularity selective.", default=False
    )
    recompute_granularity: str | None = flag(
        "Recompute activations in the backward pass: whole layers, or attention alone.",
        choices=("full", "selective"),
    )
    recompute_method: str | None = flag(
        "With full granularity: units of equal size, or the first layers of each stage.",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = flag(
        "Layers of one unit (uniform), or recomputed layers of each stage (block).", at_least=1
    )

    recompute_modules: tuple[str, ...] | None = flag(
        "With selective granularity: what is recomputed; by default core_attn.",
        choices=(
            "core_attn",
            "layernorm",
            "mla_up_proj",
            "mlp",
            "moe",
            "moe_act",
            "shared_experts",
        ),
    )

    @property
    def params_dtype_name(self) -> str:
        """`bfloat16`, `float16` or `float32`: the attribute of torch that parameters use."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else "float32"


@dataclass(frozen=True, kw_only=True)
class OptimizationConfig:
    """The optimizer, the learning-rate schedule and weight decay."""

    SECTION: ClassVar[str] = "learning rate"

    optimizer: str = flag(
        "Update rule; muon for matrices, adam for the rest; dist_muon is muon over replicas.",
        default="adam",
        choices=("adam", "sgd", "muon", "dist_muon"),
        section="training",
    )
    lr: float = required("Peak learning rate.", at_least=0.0)
    min_lr: float = flag("Smallest learning rate of the schedule.", default=0.0, at_least=0.0)
    lr_decay_style: str = flag(
        "Shape of the decay.",
        default="linear",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int = derived(
        "--train-iters", "Iterations the decay stretches over.", at_least=1
    )
    lr_warmup_fraction: float | None = flag(
        "Warm-up as a share of --lr-decay-iters.", at_least=0.0, at_most=1.0
    )
    lr_warmup_iters: int = flag("Iterations of linear warm-up.", default=0, at_least=0)
    lr_warmup_init: float = flag("Learning rate the warm-up starts at.", default=0.0, at_least=0.0)
    lr_wsd_decay_style: str = flag(
        "Shape of WSD's final phase.",
        default="exponential",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )
    lr_wsd_decay_iters: int | None = flag("Iterations of WSD's final phase.", at_least=1)
    weight_decay: float = flag(
        "Decoupled weight decay.", default=0.01, section="regularization", at_least=0.0
    )
    start_weight_decay: float = derived(
        "--weight-decay",
        "Weight decay at the first iteration.",
        section="regularization",
        at_least=0.0,
    )
    end_weight_decay: float = derived(
        "--weight-decay",
        "Weight decay at the last iteration.",
        section="regularization",
        at_least=0.0,
    )
    weight_decay_incr_style: str = flag(
        "How weight decay goes from start to end.",
        default="constant",
        choices=("constant", "linear", "cosine"),
        section="regularization",
    )
    clip_grad: float = flag(
        "Clip gradients to this global L2 norm; 0 leaves them.",
        default=1.0,
        section="regularization",
        at_least=0.0,
    )
    adam_beta1: float = flag(
        "Adam's decay of the mean.",
        default=0.9,
        section="regularization",
        at_least=0.0,
        below=1.0,
    )
    adam_beta2: float = flag(
        "Adam's decay of the square.",
        default=0.999,
        section="regularization",
        at_least=0.0,
        below=1.0,
    )
    adam_eps: float = flag(
        "Adam's term for stability.", default=1e-8, section="regularization", above=0.0
    )
    sgd_momentum: float = flag(
        "Momentum of SGD.", default=0.9, section="regularization", at_least=0.0, below=1.0
    )

    @property
    def uses_muon(self) -> bool:
        """Whether matrices are updated by Muon."""
        return self.optimizer in ("muon", "dist_muon")

    @property
    def warmup_iters(self) -> float:
        """Iterations of warm-up, whichever flag gave them."""
        if self.lr_warmup_fraction is not None:
            return self.lr_warmup_fraction * self.lr_decay_iters
        return self.lr_warmup_iters


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """When to look at held-out data, and at how much of it."""

    SECTION: ClassVar[str] = "validation"

    eval_iters: int = flag(
        "Global batches of each evaluation; 0 turns evaluation off.", default=100, at_least=0
    )
    eval_interval: int = flag("Iterations between evaluations.", default=1000, at_least=1)
    eval_global_batch_size: int = derived(
        "--global-batch-size", "Rows of one iteration of an evaluation.", at_least=1
    )
    eval_micro_batch_size: int = derived(
        "--micro-batch-size",
        "Rows in one forward pass of an evaluation on one replica.",
        at_least=1,
    )
    full_validation: bool = flag(
        "Evaluate on all validation data each time, whatever --eval-iters says.", default=False
    )
    multiple_validation_sets: bool = flag(
        "Evaluate each corpus of --valid-data-path by itself.", default=False
    )
    validation_set_names: tuple[str, ...] | None = flag(
        "Names of --multiple-validation-sets in logs, instead of numbers from 0."
    )
