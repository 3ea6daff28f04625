"""How the model and the batch are spread over processes, and what those processes run on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.packed.arguments.declare import Replaced, derived, flag, from_environment
from megatron.packed.context_parallel.capabilities import COMMUNICATIONS


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallel sizes, and this process's place as the launcher gave it."""

    SECTION: ClassVar[str] = "distributed"

    tensor_model_parallel_size: int = flag(
        "Processes that share each layer's weights.", default=1, at_least=1
    )
    pipeline_model_parallel_size: int = flag(
        "Stages that the layers are cut into.", default=1, at_least=1
    )
    context_parallel_size: int = flag("Processes that share each sequence.", default=1, at_least=1)
    cp_comm_type: tuple[str, ...] | None = flag(
        "What context-parallel processes exchange, for all layers or one value a layer; by default "
        "what --attention-backend implies: p2p, a2a for flex, dispatch for magi.",
        choices=tuple(COMMUNICATIONS),
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = flag(
        "For a2a+p2p: processes of a group that shares heads, then number of groups.", at_least=1
    )
    magi_attn_chunk_size: int | None = flag(
        "For dispatch: largest chunk, in tokens, that is handed to one process, as MagiAttention "
        "does; by default 16 or more a process, and documents are kept together.",
        at_least=1,
    )
    sequence_parallel: bool = flag(
        "Shard activations along the sequence between tensor-parallel regions.", default=False
    )
    use_distributed_optimizer: bool = flag(
        "Shard optimizer state over data-parallel processes.", default=False
    )
    num_distributed_optimizer_instances: int = flag(
        "Copies of the distributed optimizer's state over the data-parallel processes.",
        default=1,
        at_least=1,
    )
    use_tp_pp_dp_mapping: bool = flag(
        "Number processes by tensor, context, pipeline, then data parallelism; by default data "
        "before pipeline.",
        default=False,
    )
    overlap_grad_reduce: bool = flag(
        "Reduce gradients while the backward pass runs.",
        default=False,
        replaced=Replaced("the CPU does both jobs", "reduction after the backward pass", False),
    )
    overlap_param_gather: bool = flag(
        "Gather the distributed optimizer's parameters while the forward pass runs.",
        default=False,
        replaced=Replaced("the CPU does both jobs", "gather after the optimizer step", False),
    )
    ddp_num_buckets: int | None = flag(
        "Buckets of gradients that --overlap-grad-reduce reduces one by one.",
        at_least=1,
        replaced=Replaced(
            "buckets are for overlap, and a CPU reduces after the backward pass", "one bucket", None
        ),
    )
    distributed_backend: str = flag(
        "Communication library.",
        default="nccl",
        choices=("nccl", "gloo"),
        replaced=Replaced("nccl needs CUDA", "gloo", value="gloo"),
    )
    distributed_timeout_minutes: int = flag(
        "Minutes a collective waits before the job is given up.", default=10, at_least=1
    )

    world_size: int = from_environment("WORLD_SIZE", 1, "Processes in the job.", at_least=1)
    rank: int = from_environment("RANK", 0, "This process among all.")
    local_rank: int = from_environment("LOCAL_RANK", 0, "This process among those of its node.")
    local_world_size: int = from_environment(
        "LOCAL_WORLD_SIZE", 1, "Processes on this node.", at_least=1
    )

    @property
    def model_parallel_size(self) -> int:
        """Processes that hold one replica of the model, context parallelism included."""
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
        )

    @property
    def context_parallel_rank(self) -> int:
        """This process among those that share its sequences, in either order of ranks."""
        return self.rank // self.tensor_model_parallel_size % self.context_parallel_size

    @property
    def rank_order(self) -> str:
        """The order that processes are numbered in, in megatron-core's words."""
        return "tp-cp-ep-pp-dp" if self.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp"

    @property
    def data_parallel_size(self) -> int:
        """Replicas of the model, each fed its own samples."""
        return self.world_size // self.model_parallel_size


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """What this process computes on."""

    SECTION: ClassVar[str] = "runtime"

    accelerator: str = flag(
        "What to compute on; auto takes CUDA where there is one.",
        default="auto",
        choices=("auto", "cuda", "cpu"),
    )
    threads: int = derived(
        "cores / processes on the node", "Threads of each process on a CPU.", at_least=1
    )
    config_file: str | None = flag(
        "YAML file of settings by flag or field name; flags on the command line win."
    )
    print_config: bool = flag(
        "Print every setting and where it came from, and stop there.", default=False
    )
    strict_flags: bool = flag(
        "Stop if a flag is answered by an equivalent on this hardware.", default=False
    )
