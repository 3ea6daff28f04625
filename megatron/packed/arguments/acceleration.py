"""What makes upstream's jobs faster or leaner without changing what they compute.

Launch scripts carry these flags by the dozen. Here they parse, and the start-up table says what
runs in their place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.packed.arguments.declare import EVERYWHERE, KEEP, Replaced, flag

_SHARDING = "replicas compute the same, however they share memory"
_BUFFERS = "TransformerEngine's user buffers aren't set up here"
_GRAPHS = "CUDA graphs replay the same kernels faster"


def _everywhere(why: str, used: str, value: Any = KEEP) -> Replaced:
    return Replaced(why, used, value, EVERYWHERE)


_DDP = "DistributedDataParallel, with or without --use-distributed-optimizer"


@dataclass(frozen=True, kw_only=True)
class AccelerationConfig:
    """Sharding of replicas, overlap, graphs, and how checkpoints are written."""

    SECTION: ClassVar[str] = "acceleration"

    use_torch_fsdp2: bool = flag(
        "Shard parameters over replicas by torch's FSDP2.",
        default=False,
        replaced=_everywhere(_SHARDING, _DDP, False),
    )
    use_megatron_fsdp: bool = flag(
        "Shard parameters over replicas by Megatron-FSDP.",
        default=False,
        replaced=_everywhere(_SHARDING, _DDP, False),
    )
    data_parallel_sharding_strategy: str = flag(
        "What Megatron-FSDP shards.",
        default="optim_grads_params",
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"),
        replaced=_everywhere(_SHARDING, _DDP),
    )
    outer_dp_sharding_strategy: str = flag(
        "What Megatron-FSDP shards over its outer replicas.",
        default="no_shard",
        choices=("no_shard", "optim"),
        replaced=_everywhere(_SHARDING, _DDP),
    )
    megatron_fsdp_main_params_dtype: str = flag(
        "Type of Megatron-FSDP's main weights.",
        default="fp32",
        choices=("fp32", "bf16", "fp16", "auto"),
        replaced=_everywhere("main weights are fp32", "fp32"),
    )
    megatron_fsdp_main_grads_dtype: str = flag(
        "Type of Megatron-FSDP's gradients.",
        default="auto",
        choices=("fp32", "bf16", "fp16", "auto"),
        replaced=_everywhere("gradients are accumulated in fp32", "fp32"),
    )
    megatron_fsdp_grad_comm_dtype: str = flag(
        "Type in which Megatron-FSDP sends gradients.",
        default="auto",
        choices=("fp32", "bf16", "fp16", "auto"),
        replaced=_everywhere("gradients are reduced in fp32", "fp32"),
    )
    use_layer_wise_param_layout: bool = flag(
        "Do not lay parameters out for the layer-wise optimizer.",
        "--no-use-layer-wise-param-layout",
        default=True,
        negative=True,
        replaced=_everywhere("it is a layout in memory", "megatron-core's buffers"),
    )
    use_gloo_process_groups: bool = flag(
        "Make no gloo groups beside nccl's.",
        "--disable-gloo-process-groups",
        default=True,
        negative=True,
        replaced=Replaced("gloo is a CPU's only library", "gloo"),
    )
    tp_comm_overlap_cfg: str | None = flag(
        "File that tunes --tp-comm-overlap.",
        replaced=_everywhere(_BUFFERS, "plain collectives", None),
    )
    cuda_graph_modules: tuple[str, ...] = flag(
        "Modules whose kernels CUDA graphs capture.",
        "--cuda-graph-modules",
        "--cuda-graph-scope",
        default=(),
        replaced=_everywhere(_GRAPHS, "kernel by kernel", ()),
    )
    use_transformer_engine_op_fuser: bool = flag(
        "Fuse operations by TransformerEngine's sequences.",
        default=False,
        replaced=_everywhere("the fused sequences aren't used here", "one module after another"),
    )
