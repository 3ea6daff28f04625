"""One batch for all tensor-parallel ranks: a tiny header, the batch's one buffer, its plans.

It goes over a host group before the batch moves to the device, so sizes are known without waiting
for one. What the reading rank met instead of a batch, the end of the data or data that can't be
used, its peers learn the same way and raise the same.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron.packed.data.bshd import BshdBatch
from megatron.packed.errors import DataError
from megatron.packed.packing import PackedBatch

HostBatch = PackedBatch | BshdBatch
Value = TypeVar("Value")


class _Kind(IntEnum):
    """What follows the header."""

    PACK = 0
    ROWS = 1
    END = 2
    FAILURE = 3


def first_on_rank_0(action: Callable[[], Value]) -> Value:
    """Run an action on rank 0 while the others wait, then on them; a collective call.

    Args:
        action: what leaves files that the other ranks find, and gives the same on all of them.

    Raises:
        DataError: on every rank what rank 0 met, else what a rank met itself.
    """
    if dist.get_world_size() == 1:
        return action()
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            value = action()
        except DataError as error:
            outcome = [str(error)]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise DataError(outcome[0])
    # The files may be on another machine's disk: every rank looks for itself.
    return value if dist.get_rank() == 0 else action()


def next_shared(
    loader: Iterator[HostBatch] | None, group: dist.ProcessGroup, *, pin_memory: bool
) -> HostBatch:
    """The next batch, equal on all ranks of the group; a collective call.

    Args:
        loader: batches on rank 0 of the group; None on its peers.
        group: a gloo group.
        pin_memory: receive into page-locked memory, for copies that don't wait.

    Raises:
        StopIteration: at the end of the data, on every rank.
        DataError: when rank 0 met one, on every rank.
    """
    if group.size() == 1:
        assert loader is not None  # the group's only rank reads
        return next(loader)
    source = dist.get_global_rank(group, 0)
    if loader is not None:
        return _send(loader, source, group)
    return _receive(source, group, pin_memory)


def _send(loader: Iterator[HostBatch], source: int, group: dist.ProcessGroup) -> HostBatch:
    try:
        batch = next(loader)
    except StopIteration:
        dist.broadcast(torch.tensor([_Kind.END, 0, 0]), src=source, group=group)
        raise
    except DataError as error:
        message = torch.tensor(list(str(error).encode()), dtype=torch.uint8)
        dist.broadcast(torch.tensor([_Kind.FAILURE, len(message), 0]), src=source, group=group)
        dist.broadcast(message, src=source, group=group)
        raise
    kind = _Kind.PACK if isinstance(batch, PackedBatch) else _Kind.ROWS
    plans = _plans_of(batch)
    header = torch.tensor([kind, len(batch.buffer), len(plans)])
    dist.broadcast(header, src=source, group=group)
    dist.broadcast(batch.buffer, src=source, group=group)
    if len(plans):
        dist.broadcast(plans, src=source, group=group)
    return batch


def _plans_of(batch: HostBatch) -> torch.Tensor:
    """What a context-parallel rank's batch has beside its buffer, as bytes; none with one rank."""
    plans: dict[str, Any] = {}
    if isinstance(batch, PackedBatch):
        params = batch.packed_seq_params
        if params.partition is not None:
            plans = {"partition": params.partition, "attention": params.attention}
    elif batch.attention is not None:
        plans = {"attention": batch.attention}
    if not plans:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(pickle.dumps(plans)), dtype=torch.uint8)


def _receive(source: int, group: dist.ProcessGroup, pin_memory: bool) -> HostBatch:
    header = torch.empty(3, dtype=torch.int64)
    dist.broadcast(header, src=source, group=group)
    kind, size, plan_size = header.tolist()
    if kind == _Kind.END:
        raise StopIteration
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pin_memory)
    dist.broadcast(buffer, src=source, group=group)
    plans: dict[str, Any] = {}
    if plan_size:
        pickled = torch.empty(plan_size, dtype=torch.uint8)
        dist.broadcast(pickled, src=source, group=group)
        plans = pickle.loads(pickled.numpy().tobytes())  # of a process of this job
    match kind:
        case _Kind.PACK:
            return PackedBatch.from_buffer(buffer, **plans)
        case _Kind.ROWS:
            return BshdBatch.from_buffer(buffer, **plans)
    raise DataError(bytes(buffer.tolist()).decode())
