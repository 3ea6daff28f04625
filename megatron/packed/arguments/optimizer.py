"""Loss scaling, learning rates apart from the rest, Muon, and checks among replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.packed.arguments.declare import EVERYWHERE, Replaced, flag

_MIXED = "mixed precision"
_MUON = "muon"
_FEWER_BITS = (
    "fewer bits train another model, and the optimizer that keeps them, TransformerEngine's, needs "
    "CUDA; leave it out"
)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """What the optimizer does beside its update rule."""

    SECTION: ClassVar[str] = "learning rate"

    loss_scale: float | None = flag(
        "Multiply losses by this constant; without it --fp16 adapts the scale.",
        above=0.0,
        section=_MIXED,
    )
    initial_loss_scale: float = flag(
        "First scale of --fp16.", default=2.0**32, above=0.0, section=_MIXED
    )
    min_loss_scale: float = flag(
        "Smallest scale of --fp16.", default=1.0, above=0.0, section=_MIXED
    )
    loss_scale_window: float = flag(
        "Updates in a row without overflow after which the scale of --fp16 doubles.",
        default=1000,
        at_least=1,
        section=_MIXED,
    )
    hysteresis: int = flag(
        "Overflows after which the scale of --fp16 is halved.",
        default=2,
        at_least=1,
        section=_MIXED,
    )
    grad_reduce_in_bf16: bool = flag(
        "With --bf16, accumulate and reduce gradients in bf16.", default=False, section=_MIXED
    )
    use_precision_aware_optimizer: bool = flag(
        "Keep gradients, weights and states of Adam in the types of the flags below.",
        default=False,
        section=_MIXED,
        replaced=Replaced(
            "with all of them in fp32 it computes what the plain optimizer does",
            "the plain distributed optimizer",
            False,
        ),
    )
    main_grads_dtype: str = flag(
        "Type of gradients for --use-precision-aware-optimizer.",
        default="fp32",
        choices=("fp32", "bf16"),
        section=_MIXED,
        refused=_FEWER_BITS,
        refused_on=("cpu",),
    )
    main_params_dtype: str = flag(
        "Type of the optimizer's own weights for --use-precision-aware-optimizer.",
        default="fp32",
        choices=("fp32", "fp16"),
        section=_MIXED,
        refused=_FEWER_BITS,
        refused_on=("cpu",),
    )
    exp_avg_dtype: str = flag(
        "Type of Adam's first moment for --use-precision-aware-optimizer.",
        default="fp32",
        choices=("fp32", "fp16", "bf16", "fp8"),
        section=_MIXED,
        refused=_FEWER_BITS,
        refused_on=("cpu",),
    )
    exp_avg_sq_dtype: str = flag(
        "Type of Adam's second moment for --use-precision-aware-optimizer.",
        default="fp32",
        choices=("fp32", "fp16", "bf16", "fp8"),
        section=_MIXED,
        refused=_FEWER_BITS,
        refused_on=("cpu",),
    )

    decoupled_lr: float | None = flag(
        "Peak learning rate of the embedding and the output layer.", at_least=0.0
    )
    decoupled_min_lr: float | None = flag(
        "Smallest learning rate of the embedding and the output layer.", at_least=0.0
    )
    apply_wd_to_qk_layernorm: bool = flag(
        "Decay the weights of the norms of queries and keys, too.",
        default=False,
        section="regularization",
    )

    check_weight_hash_across_dp_replicas_interval: int | None = flag(
        "Iterations between comparisons of the weights of all data-parallel replicas.",
        at_least=1,
        section="training",
    )

    muon_momentum: float = flag(
        "Momentum of Muon.", default=0.9, at_least=0.0, below=1.0, section=_MUON
    )
    muon_split_qkv: bool = flag(
        "Let Muon take the queries', keys' and values' projection as one matrix.",
        "--muon-no-split-qkv",
        default=True,
        negative=True,
        section=_MUON,
    )
    muon_use_nesterov: bool = flag(
        "Nesterov's momentum in Muon.",
        "--muon-use-nesterov",
        "--muon-nesterov",
        default=False,
        section=_MUON,
    )
    muon_scale_mode: str = flag(
        "Scale of Muon's update by the matrix's shape.",
        default="spectral",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
        section=_MUON,
    )
    muon_fp32_matmul_prec: str = flag(
        "Precision of Muon's matrix products: medium is bf16.",
        default="medium",
        choices=("low", "medium", "high", "highest"),
        section=_MUON,
        replaced=Replaced("a CPU multiplies fp32 as fast", "fp32", value="highest"),
    )
    muon_num_ns_steps: int = flag(
        "Newton-Schulz iterations of Muon.", default=5, at_least=1, section=_MUON
    )
    muon_tp_mode: str = flag(
        "How Muon treats matrices that tensor-parallel processes share.",
        default="blockwise",
        choices=("blockwise", "duplicated", "distributed"),
        section=_MUON,
        replaced=Replaced(
            "orthogonalising each share by itself would train another model on another layout",
            "duplicated: the whole matrix, on every process",
            "duplicated",
            EVERYWHERE,
        ),
    )
    muon_extra_scale_factor: float = flag(
        "Factor on Muon's update.", default=1.0, above=0.0, section=_MUON
    )
