"""Which parallel dimensions of a large run fit into a few processes, and at what sizes.

Every dimension that is larger than 1 becomes 2, in this order as long as it fits: tensor, context,
pipeline (first where the run places its stages by hand), experts, experts' tensors, data. Two
levels of context parallelism (a2a+p2p) need four processes and come first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.packed.cases.case import Value

PROCESSES = 4
TENSOR = "--tensor-model-parallel-size"
PIPELINE = "--pipeline-model-parallel-size"
CONTEXT = "--context-parallel-size"
EXPERT = "--expert-model-parallel-size"
EXPERT_TENSOR = "--expert-tensor-parallel-size"
INSTANCES = "--num-distributed-optimizer-instances"

# Flags that mean little without replicas of the model.
_WANT_REPLICAS = (
    "--use-distributed-optimizer",
    "--overlap-grad-reduce",
    "--use-megatron-fsdp",
    "--use-torch-fsdp2",
    "--check-weight-hash-across-dp-replicas-interval",
    "--use-tp-pp-dp-mapping",
)
_HAND_PLACED_STAGES = (
    "--pipeline-model-parallel-layout",
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
)


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of a small run.

    Attributes:
        tensor: Tensor-parallel size.
        context: Context-parallel size.
        pipeline: Pipeline-parallel size.
        expert: Expert-parallel size; expert ranks are taken from the others.
        expert_tensor: Tensor-parallel size of experts.
        data: Replicas.
        dropped: Dimensions of the large run that didn't fit, by their flags.
        alone: Flags that mean little without replicas, where none fit.
    """

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1
    data: int = 1
    dropped: tuple[str, ...] = field(default=())
    alone: tuple[str, ...] = field(default=())

    @property
    def processes(self) -> int:
        """All processes of the run."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def fits(self) -> bool:
        """Whether experts find their ranks among the others, in few enough processes."""
        shared = self.tensor * self.context * self.data
        return self.processes <= PROCESSES and shared % (self.expert * self.expert_tensor) == 0


def size(args: Mapping[str, Value], name: str, default: int = 1) -> int:
    """Return a flag's whole number.

    Args:
        args: Value of each flag.
        name: The flag.
        default: Its value where the flag isn't given.
    """
    return int(str(args.get(name, default)))


def shrink_parallel_sizes(args: Mapping[str, Value]) -> ParallelSizes:
    """Choose the sizes of the small run.

    Args:
        args: The large run's flags.
    """
    chosen: dict[str, Any] = {}
    dropped = []
    for name, flag, wanted in _dimensions(args):
        for larger in (wanted, 2):
            attempt = _with_replicas({**chosen, name: larger})
            if attempt is not None:
                chosen[name] = larger
                break
        else:
            dropped.append(flag)
    wishes = _wish_for_replicas(args)
    sizes = _with_replicas(chosen, replicas=bool(wishes))
    assert sizes is not None
    alone = wishes if sizes.data == 1 else ()
    return replace(sizes, dropped=tuple(dropped), alone=alone)


def exchanges_heads(args: Mapping[str, Value]) -> bool:
    """Return whether context parallelism needs a head on every rank.

    Args:
        args: Value of each flag.
    """
    return "a2a" in str(args.get("--cp-comm-type", "")) or args.get("--attention-backend") == "flex"


def _dimensions(args: Mapping[str, Value]) -> list[tuple[str, str, int]]:
    """(field, flag, size) of every dimension larger than 1, in the order they are kept."""
    context = 4 if "a2a+p2p" in str(args.get("--cp-comm-type", "")) else 2
    order = [("tensor", TENSOR, 2), ("context", CONTEXT, context), ("pipeline", PIPELINE, 2)]
    if any(name in args for name in _HAND_PLACED_STAGES):
        order.insert(0, order.pop())
    if context == 4:
        order.sort(key=lambda dimension: dimension[0] != "context")
    kept = [dimension for dimension in order if size(args, dimension[1]) > 1]
    if "--num-experts" in args:
        kept += [("expert", EXPERT, 2)] * (size(args, EXPERT) > 1)
        tensors = size(args, EXPERT_TENSOR, size(args, TENSOR))
        kept += [("expert_tensor", EXPERT_TENSOR, 2)] * (tensors > 1)
    return kept


def _wish_for_replicas(args: Mapping[str, Value]) -> tuple[str, ...]:
    wishes = tuple(name for name in _WANT_REPLICAS if name in args)
    return wishes + (INSTANCES,) * (size(args, INSTANCES) > 1)


def _with_replicas(chosen: Mapping[str, Any], replicas: bool = False) -> ParallelSizes | None:
    """The sizes with the fewest replicas that fit (two, where they are wanted and fit)."""
    attempts = [replace(ParallelSizes(), **chosen, data=data) for data in (1, 2, 4)]
    fitting = [sizes for sizes in attempts if sizes.fits]
    if replicas and len(fitting) > 1 and fitting[0].data == 1:
        return fitting[1]
    return fitting[0] if fitting else None
