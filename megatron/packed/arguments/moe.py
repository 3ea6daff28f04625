"""Experts, their router and their dispatcher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.packed.arguments.declare import Replaced, derived, flag
from megatron.packed.arguments.patterns import parse_pattern
from megatron.packed.errors import ConfigurationError

_EVERYWHERE = ("cpu", "cuda")
_SEQUENTIAL = "one matrix product an expert"


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Experts, their router and their dispatcher."""

    SECTION: ClassVar[str] = "mixture of experts"

    num_experts: int | None = flag("Experts of each mixture-of-experts layer.", at_least=1)
    moe_layer_freq: str = flag(
        "Which layers have experts: every N-th from the first on, or a list of zeros and ones as "
        "in ([0]*1+[1]*3).",
        default="1",
    )
    moe_ffn_hidden_size: int = derived(
        "--ffn-hidden-size", "Width of each expert's feed-forward layer.", at_least=1
    )
    expert_model_parallel_size: int = flag(
        "Processes that the experts are spread over.", default=1, at_least=1
    )
    expert_tensor_parallel_size: int = derived(
        "--tensor-model-parallel-size", "Processes that share each expert's weights.", at_least=1
    )

    moe_router_load_balancing_type: tuple[str, ...] = flag(
        "How load is balanced; several losses may be named, each with its coefficient.",
        default=("aux_loss",),
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"),
    )
    moe_aux_loss_coeff: tuple[float, ...] = flag(
        "Coefficient of each load-balancing loss.", default=(0.0,), at_least=0.0
    )
    moe_z_loss_coeff: float | None = flag(
        "Coefficient of the z-loss, which keeps router logits small.", at_least=0.0
    )
    moe_router_topk: int = flag("Experts of each token.", default=2, at_least=1)
    moe_router_score_function: str = flag(
        "From logits to scores.", default="softmax", choices=("softmax", "sigmoid")
    )
    moe_router_pre_softmax: bool = flag(
        "Softmax over all experts, before the best are chosen.", default=False
    )
    moe_router_topk_scaling_factor: float | None = flag("Factor of the chosen scores.", above=0.0)
    moe_router_num_groups: int | None = flag(
        "Groups of experts, of which each token chooses some first.", at_least=1
    )
    moe_router_group_topk: int | None = flag("Groups that each token chooses.", at_least=1)
    moe_router_topk_limited_devices: int | None = flag(
        "Older spelling of group-limited routing.",
        refused="upstream renamed it; pass --moe-router-group-topk and --moe-router-num-groups",
    )
    moe_router_enable_expert_bias: bool = flag(
        "Balance by a bias of each expert on the choice, moved after every step.", default=False
    )
    moe_router_bias_update_rate: float = flag(
        "How far the bias moves a step.", default=1e-3, at_least=0.0
    )
    moe_router_dtype: str | None = flag("Precision of the router.", choices=("fp32", "fp64"))
    moe_router_force_load_balancing: bool = flag("Random logits, for benchmarks.", default=False)
    moe_input_jitter_eps: float | None = flag(
        "Multiply the router's input by noise of 1 - eps ... 1 + eps.", at_least=0.0
    )
    moe_enable_routing_replay: bool = flag(
        "Repeat a recorded routing.",
        default=False,
        refused="no recorded routing can be read here",
    )
    moe_router_fusion: bool = flag(
        "Fuse choice and scores of the router.",
        default=False,
        replaced=Replaced("the fused kernel needs CUDA", "PyTorch's top-k and softmax", False),
    )
    moe_router_padding_for_quantization: bool = flag(
        "Pad each expert's tokens for quantised matrix products.",
        default=False,
        replaced=Replaced("products aren't quantised", "no padding", False, _EVERYWHERE),
    )
    moe_router_padding_for_fp8: bool = flag(
        "Older spelling of --moe-router-padding-for-quantization.",
        default=False,
        replaced=Replaced("products aren't quantised", "no padding", False, _EVERYWHERE),
    )

    moe_shared_expert_intermediate_size: int | None = flag(
        "Width of the expert that sees every token; none without.", at_least=1
    )
    moe_shared_expert_gate: bool = flag(
        "Weight the shared expert by a sigmoid of the token.", default=False
    )
    moe_shared_expert_overlap: bool = flag(
        "Compute the shared expert while tokens travel.",
        default=False,
        replaced=Replaced("the CPU does both jobs", "one after the other", False),
    )
    moe_grouped_gemm: bool = flag(
        "Multiply all experts of a process in one kernel.",
        default=False,
        replaced=Replaced("the grouped kernel needs CUDA", _SEQUENTIAL),
    )
    moe_use_legacy_grouped_gemm: bool = flag(
        "Older grouped kernel.",
        default=False,
        replaced=Replaced("upstream retires it", "--moe-grouped-gemm's module", False, _EVERYWHERE),
    )
    moe_apply_probs_on_input: bool = flag(
        "Weight an expert's input, not its activation; for --moe-router-topk 1.", default=False
    )
    moe_latent_size: int | None = flag(
        "Width that experts work in.",
        refused="its projections are TransformerEngine's alone, without a path under packing",
    )

    moe_token_dispatcher_type: str = flag(
        "How tokens reach their experts.",
        default="allgather",
        choices=("allgather", "alltoall", "flex"),
    )
    moe_flex_dispatcher_backend: str = flag(
        "Library of the flex dispatcher.",
        default="deepep",
        choices=("deepep", "hybridep"),
        replaced=Replaced("the library needs CUDA", "alltoall"),
    )
    moe_enable_deepep: bool = flag(
        "Older spelling of --moe-flex-dispatcher-backend deepep.",
        default=False,
        replaced=Replaced("the library needs CUDA", "alltoall", False),
    )
    moe_deepep_num_sms: int = flag(
        "Multiprocessors of DeepEP.",
        default=20,
        at_least=1,
        replaced=Replaced("the library needs CUDA", "alltoall"),
    )
    moe_hybridep_num_sms: int = flag(
        "Multiprocessors of HybridEP.",
        default=16,
        at_least=1,
        replaced=Replaced("the library needs CUDA", "alltoall"),
    )
    moe_permute_fusion: bool = flag(
        "Fuse the permutation of tokens.",
        default=False,
        replaced=Replaced("the fused kernel needs CUDA", "PyTorch's gathers", False),
    )
    moe_expert_capacity_factor: float | None = flag(
        "Tokens an expert takes of a micro-batch, over an even share; negative for no limit."
    )
    moe_pad_expert_input_to_capacity: bool = flag(
        "Pad every expert's tokens to its capacity.",
        default=False,
        replaced=Replaced(
            "slots that pad an expert have weight zero", "no padding", False, _EVERYWHERE
        ),
    )
    moe_token_drop_policy: str = flag(
        "Which tokens an expert over its capacity keeps: the most probable, or the first.",
        default="probs",
        choices=("probs", "position"),
    )
    moe_token_dropping: bool = flag(
        "Drop and pad tokens.",
        default=False,
        refused="upstream doesn't support it either; pass --moe-expert-capacity-factor",
    )
    moe_layer_recompute: bool = flag(
        "Recompute whole mixture-of-experts layers in the backward pass.", default=False
    )
    moe_per_layer_logging: bool = flag("Log each layer's losses.", default=False)
    moe_use_upcycling: bool = flag(
        "Turn a dense checkpoint into experts.",
        default=False,
        refused="it converts checkpoints and trains nothing",
    )
    moe_upcycling_granularity: int = flag(
        "How many times smaller than the dense layer an upcycled expert is.",
        default=1,
        at_least=1,
        refused="it belongs to --moe-use-upcycling",
    )
    moe_extended_tp: bool = flag(
        "Older spelling of tensor parallelism for experts.",
        default=False,
        refused="upstream renamed it; pass --expert-tensor-parallel-size",
    )

    def expert_layers(self, num_layers: int) -> tuple[bool, ...]:
        """Which decoder layers of the whole model have experts.

        Args:
            num_layers: layers of the whole model.

        Raises:
            ConfigurationError: `--moe-layer-freq` can't be read, or doesn't fit the layers.
        """
        if self.num_experts is None:
            return (False,) * num_layers
        pattern = parse_pattern(self.moe_layer_freq)
        if isinstance(pattern, int):
            if pattern < 1:
                raise ConfigurationError(f"{pattern}: a frequency must be at least 1")
            return tuple(layer % pattern == 0 for layer in range(num_layers))
        if set(pattern) - {0, 1} or len(pattern) != num_layers:
            raise ConfigurationError(
                f"{self.moe_layer_freq}: must hold {num_layers} entries of 0 or 1, one a layer; "
                f"it holds {len(pattern)}"
            )
        return tuple(map(bool, pattern))

    @property
    def capacity_factor(self) -> float | None:
        """The capacity factor; None where experts take every token."""
        factor = self.moe_expert_capacity_factor
        return None if factor is None or factor < 0 else factor
