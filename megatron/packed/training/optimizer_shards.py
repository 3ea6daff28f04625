"""The state of megatron-core's distributed optimizer, each rank's part where it lies.

megatron-core's own way to a checkpoint that any layout can load gathers the whole state on every
data-parallel rank first. Here nothing is exchanged: what a rank holds of a parameter is a range of
it, flattened; cut into boxes, that is a few shards of the parameter like any others.

    a parameter [4, 4], range 3..10 of it flattened        . . . a
                                                           b b b b
                                                           c c c .      three boxes: a, b, c
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes, in elements of each axis."""


def boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Cut a range of a flattened tensor into boxes, in order, each of consecutive elements.

    Args:
        shape: of the tensor.
        start: first element of the range, row-major.
        stop: one past its last element.

    Returns:
        At most two a dimension.
    """
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows between
    if first > last:
        return _inside(shape, first - 1, start, stop)
    found = _inside(shape, first - 1, start, first * row)
    if first < last:
        found.append(((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])))
    return found + _inside(shape, last, last * row, stop)


def _inside(shape: tuple[int, ...], index: int, start: int, stop: int) -> list[Box]:
    """Boxes of a range that lies inside one row."""
    begin = index * math.prod(shape[1:])
    inner = boxes(shape[1:], start - begin, stop - begin)
    return [((index, *offsets), (1, *sizes)) for offsets, sizes in inner]


def sharded_optimizer_state(
    members: list[Any], whole: MegatronOptimizer, model: ShardedStateDict, metadata: dict[str, Any]
) -> ShardedStateDict:
    """What this rank saves of an optimizer; a collective call.

    Args:
        members: the optimizers that `whole` consists of.
        whole: the optimizer.
        model: sharded weights.
        metadata: how shards are named, as megatron-core takes it.
    """
    if not any(isinstance(member, DistributedOptimizer) for member in members):
        return whole.sharded_state_dict(model, metadata=metadata)
    if len(members) > 1:
        whole._synchronize_steps()
    states = [_state_of(member, model, metadata) for member in members]
    return states[0] if len(states) == 1 else dict(enumerate(states))


def _state_of(member: Any, model: ShardedStateDict, metadata: dict[str, Any]) -> ShardedStateDict:
    pieces = _pieces(member, model) if isinstance(member, DistributedOptimizer) else None
    if pieces is None:
        return member.sharded_state_dict(model, metadata=metadata)
    state = member.state_dict()
    shards = [
        shard
        for buckets_by_dtype in member.gbuf_ranges
        for buckets in buckets_by_dtype.values()
        for bucket in buckets
        for parameter, ranges in bucket["param_map"].items()
        for shard in _shards_of(member, parameter, pieces[parameter], ranges["param"])
    ]
    if shards:
        state["param_state"] = dict(enumerate(shards))
    state["param_state_sharding_type"] = metadata["distrib_optim_sharding_type"]
    return state


def _pieces(
    member: DistributedOptimizer, model: ShardedStateDict
) -> dict[torch.Tensor, list[tuple[int, ShardedTensor]]] | None:
    """Shards that each parameter is saved as, and where in it they begin.

    Returns:
        None, on all ranks that share the parameters, where some shard isn't a range of one.
    """
    weights, _ = extract_sharded_tensors_and_factories(model)
    by_parameter = {weight.data: weight for weight in nested_values(weights)}
    pieces: dict[torch.Tensor, list[tuple[int, ShardedTensor]]] = {}
    for parameter in (each for buffer in member.buffers for each in buffer.params):
        weight = by_parameter[parameter]
        if not isinstance(weight, ShardedTensorFactory):
            pieces[parameter] = [(0, weight)]
            continue
        built = list(nested_values(weight.build()))
        memory = parameter.untyped_storage().data_ptr()
        for shard in built:
            if shard.data.untyped_storage().data_ptr() != memory or not shard.data.is_contiguous():
                return None
        begin = parameter.storage_offset()
        pieces[parameter] = [(shard.data.storage_offset() - begin, shard) for shard in built]
    return pieces


def _shards_of(
    member: DistributedOptimizer,
    parameter: torch.Tensor,
    pieces: list[tuple[int, ShardedTensor]],
    held: Any,
) -> Iterator[ShardedTensor]:
    """Shards of the states of one parameter, of which this rank holds a range."""
    for name, values in member._get_main_param_and_optimizer_states(parameter).items():
        if name == "step":
            continue
        values = values.detach().float()  # as megatron-core saves it
        for begin, piece in pieces:
            first = max(held.start, begin)
            last = min(held.end, begin + math.prod(piece.local_shape))
            for offsets, sizes in boxes(piece.local_shape, first - begin, last - begin):
                own = values[first - held.start :][: math.prod(sizes)]
                yield _box_of(piece, f"optimizer.state.{name}", own, offsets, sizes, member)
                first += len(own)


def _box_of(
    piece: ShardedTensor,
    prefix: str,
    values: torch.Tensor,
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    member: DistributedOptimizer,
) -> ShardedTensor:
    """A state's shard of a box of a weight's shard."""
    axes = piece.prepend_axis_num
    shape = (*[1] * axes, *sizes)
    inside = (*[0] * axes, *offsets)
    return replace(
        piece,
        key=f"{prefix}.{piece.key}",
        data=values.view(shape),
        dtype=values.dtype,
        local_shape=shape,
        global_offset=tuple(a + b for a, b in zip(piece.global_offset, inside, strict=True)),
        axis_fragmentations=None,
        prepend_axis_num=0,
        # Of the ranks that hold this weight, one holds this part of its states.
        replica_id=(*piece.replica_id[:2], member.distributed_optimizer_instance_id),
    )
