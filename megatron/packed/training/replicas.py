"""Do all data-parallel replicas hold the same weights, bit for bit?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import unwrap_model

from megatron.packed.errors import TrainingError
from megatron.packed.model.initialization import global_parameter_name

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# An odd factor: any flipped bit changes the sum, and so does an exchange of two elements.
_STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)


def parameter_hash(parameter: torch.Tensor) -> torch.Tensor:
    """A 64-bit hash of a parameter's bits and their places.

    Args:
        parameter: any shape, any dtype.

    Returns:
        int64 scalar on the parameter's device.
    """
    bits = parameter.detach().contiguous().view(_BITS[parameter.element_size()]).flatten().long()
    places = torch.arange(1, 2 * bits.numel(), 2, device=bits.device, dtype=torch.int64)
    return (bits * (places * _STRIDE)).sum()


def _named(model: list[DistributedDataParallel]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for wrapped in model:
        chunk = unwrap_model(wrapped)
        offset = get_transformer_layer_offset(chunk.config, chunk.vp_stage)
        for name, parameter in chunk.named_parameters():
            yield global_parameter_name(name, offset), parameter


def _differences(
    named: list[tuple[str, torch.nn.Parameter]], group: torch.distributed.ProcessGroup
) -> list[str]:
    """What differs on this rank from the group's first one, or on others if this is the first."""
    if not named or group.size() == 1:
        return []
    hashes = torch.stack([parameter_hash(parameter) for _, parameter in named])
    everyone = [torch.empty_like(hashes) for _ in range(group.size())]
    torch.distributed.all_gather(everyone, hashes, group=group)
    ranks = torch.distributed.get_process_group_ranks(group)
    return [
        f"{name} on rank {rank} differs from rank {ranks[0]}"
        for rank, other in zip(ranks[1:], everyone[1:], strict=True)
        for (name, _), equal in zip(named, (other == everyone[0]).tolist(), strict=True)
        if not equal
    ]


@contextlib.contextmanager
def gathered_parameters(model: list[DistributedDataParallel]) -> Iterator[None]:
    """Inside, every weight is the one that the last update made, wherever weights are read.

    With `--overlap-param-gather`, the distributed optimizer's shards only reach the other replicas
    while the next forward pass runs; whoever reads weights between steps comes through here.

    Args:
        model: wrapped chunks of this rank.
    """
    overlapped = [chunk for chunk in model if chunk.ddp_config.overlap_param_gather]
    for chunk in overlapped:
        chunk.disable_forward_pre_hook()  # gathers what is still to come
    try:
        yield
    finally:
        for chunk in overlapped:
            chunk.enable_forward_pre_hook()


def check_replicas(model: list[DistributedDataParallel], iteration: int) -> None:
    """Compare the weights of all data-parallel and context-parallel replicas; a collective call.

    Args:
        model: wrapped chunks of this rank.
        iteration: for the message.

    Raises:
        TrainingError: on every rank, naming the parameters and ranks that differ.
    """
    named = list(_named(model))
    experts = [each for each in named if not getattr(each[1], "allreduce", True)]
    others = [each for each in named if getattr(each[1], "allreduce", True)]
    everyone = parallel_state.get_data_parallel_group(with_context_parallel=True)
    with gathered_parameters(model):
        found = _differences(others, everyone)
        if experts:
            found += _differences(experts, parallel_state.get_expert_data_parallel_group())
    device = named[0][1].device if named else None
    count = torch.tensor(len(found), device=device)
    torch.distributed.all_reduce(count)
    if not count:
        return
    lists: list[list[str]] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(lists, found[:3])
    listed = "; ".join(dict.fromkeys(text for each in lists for text in each))
    raise TrainingError(
        f"replicas differ after iteration {iteration}: {listed}; a process has computed or "
        "received something else than its replicas: restart from a checkpoint, and look at that "
        "rank's hardware if it happens again"
    )
