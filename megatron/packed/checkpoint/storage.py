"""The sharded part of a checkpoint, through megatron-core's torch_dist format.

Saving is cut, so that most of it can run beside training: `begin` (collective: who writes what),
`write` (this rank's copies and its file, in any thread), `gather` (collective: what was written),
`complete` (rank 0: index, manifest and name, in any thread) and `settle` (collective: how it went).
Megatron-core's own asynchronous writer forks the training process, twice; a fork beside running
threads can deadlock, so here threads write, and never in a collective, which an end of the process
would break off. They spend their time in the kernel, in SHA-256 and in memory copies, all outside
Python's lock.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.state_dict_saver import (
    save_state_dict_async_plan,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import (
    DEFAULT_SUFFIX,
    SerializationFormat,
    _write_item,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from megatron.packed.checkpoint.manifest import FileRecord, Manifest, record_of
from megatron.packed.checkpoint.snapshot import Snapshot

COMMON = "common.pt"
INDEX = ".metadata"
FORMAT = "metadata.json"


class SaveError(Exception):
    """A checkpoint could not be written; the same on every rank, so all go on together."""


class HashingStream(io.RawIOBase):
    """A binary file for writing that knows the digest of what went through it."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb", buffering=1 << 20)  # noqa: SIM115 closed by close()
        self._state = hashlib.sha256()
        self._bytes = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._bytes

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._state.update(view)
        self._bytes += len(view)
        return len(view)

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def settle(self) -> FileRecord:
        """Bring everything to the disk, close, and return the record."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileRecord(self._bytes, self._state.hexdigest())

    def close(self) -> None:
        self._file.close()
        super().close()


class ThreadWriter(FileSystemWriterAsync):
    """Writes this rank's shards to one file, from whichever thread calls `write_shards`."""

    def __init__(self, folder: Path, snapshot: Snapshot | None) -> None:
        super().__init__(folder, thread_count=1)
        self._folder = folder
        self._snapshot = snapshot
        self._items: list[tuple[Any, Any]] = []
        self._file_name = ""
        self.results: list[Any] = []

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Nothing: `collect` is told what a plan means in this save."""

    def collect(self, plan: SavePlan, shards: Sequence[ShardedBase]) -> None:
        """Take what this rank writes; copied, when training goes on before it is written.

        Args:
            plan: this rank's part of the writing.
            shards: what each of its items is in this save.
        """
        self._file_name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        on_cuda = False
        for item, shard in zip(plan.items, shards, strict=True):
            if isinstance(shard, ShardedObject):
                self._items.append((item, io.BytesIO(_serialized(shard.data))))
                continue
            data = shard.data.detach().view(item.tensor_data.chunk.sizes)  # with prepended axes
            on_cuda |= data.device.type == "cuda"
            data = self._snapshot.add(item.index, data) if self._snapshot else data.cpu()
            if data.untyped_storage().size() != data.numel() * data.itemsize:
                data = data.clone()  # torch.save writes whole storages, not views
            self._items.append((item, data))
        if on_cuda:
            torch.cuda.synchronize()

    def write_shards(self) -> dict[str, FileRecord]:
        """Write, hash and sync this rank's file; nothing where it holds nothing."""
        items, self._items = self._items, []
        if not items:
            return {}
        with HashingStream(self._folder / self._file_name) as stream:
            for item, data in items:
                result = _write_item(
                    self.transforms,
                    stream,
                    data,
                    item,
                    self._file_name,
                    SerializationFormat.TORCH_SAVE,
                )
                self.results.append(result)
            return {self._file_name: stream.settle()}


@dataclass
class SavePlans:
    """What is the same in every save of a run, so that it is agreed on once.

    Attributes:
        parallel_group: ranks that hold the same shards and divide the writing (data parallel).
    """

    parallel_group: torch.distributed.ProcessGroup | None = None
    _structure: tuple[Any, ...] | None = None
    _plan: SavePlan | None = None
    _places: tuple[int, ...] = ()
    _index: Any = None

    def plan(self, sharded: ShardedStateDict, writer: ThreadWriter) -> Any:
        """Divide the writing and hand this rank's part to `writer`; a collective call.

        Returns:
            The index of the checkpoint on rank 0, still without places.
        """
        shards = list(nested_values(sharded))
        if not self._known(shards):
            self._agree(sharded, shards, writer)
        assert self._plan is not None
        writer.collect(self._plan, [shards[place] for place in self._places])
        return self._index

    def _agree(
        self, sharded: ShardedStateDict, shards: list[ShardedBase], writer: ThreadWriter
    ) -> None:
        """Decide with all ranks who writes which shard."""
        if self.parallel_group is not None:
            FullyParallelSaveStrategyWrapper(
                TorchDistSaveShardedStrategy("torch_dist", 1), self.parallel_group
            ).apply_saving_parallelization(sharded)
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
        (_, index, _), self._plan, _, _, _ = save_state_dict_async_plan(
            mcore_to_pyt_state_dict(flat, False),
            writer,
            None,
            0,
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )
        if index is not None:
            index.all_local_plans = None  # a second copy of all plans, for a cache we have
        self._index = index
        written = (each for each in enumerate(shards) if is_main_replica(each[1].replica_id))
        names = {_name(shard): place for place, shard in written}
        self._places = tuple(
            names[item.index.fqn, tuple(item.index.offset or ())] for item in self._plan.items
        )

    def _known(self, shards: list[ShardedBase]) -> bool:
        """Whether every rank saves what it saved last time."""
        structure = tuple(_description(shard) for shard in shards)
        same = torch.tensor([int(structure == self._structure)], device=collective_device())
        torch.distributed.all_reduce(same, torch.distributed.ReduceOp.MIN)
        self._structure = structure
        return bool(same.item())


def _serialized(value: Any) -> bytes:
    """A shard that is no tensor, as megatron-core writes it."""
    return _serialized_none() if value is None else _saved([value])


@functools.cache
def _serialized_none() -> bytes:
    """What most modules give as their extra state, many a save."""
    return _saved([None])


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _name(shard: ShardedBase) -> tuple[str, tuple[int, ...]]:
    """What a plan calls a shard."""
    if isinstance(shard, ShardedObject):
        return shard.unique_key, ()
    return shard.key, tuple(shard.global_offset)


def _description(shard: ShardedBase) -> tuple[Any, ...]:
    """Whatever of a shard can matter to a plan."""
    place = (shard.key, shard.replica_id, shard.global_shape, shard.global_offset)
    if isinstance(shard, ShardedObject):
        return place
    return (*place, shard.local_shape, shard.dtype, shard.prepend_axis_num)


@dataclass
class ShardedSave:
    """One checkpoint on its way to the disk.

    Attributes:
        folder: where it is written; exists, and is empty.
        iteration: of the checkpoint.
        small_files: contents by name, written by rank 0 beside the shards.
        snapshot: copies of what is written; None where nothing changes meanwhile.
    """

    folder: Path
    iteration: int
    small_files: Mapping[str, bytes]
    snapshot: Snapshot | None = None
    _writer: ThreadWriter | None = None
    _index: Any = None
    _records: dict[str, FileRecord] = field(default_factory=dict)
    _error: str | None = None
    _gathered: list[Any] | None = None
    _failure: str | None = None

    def begin(self, sharded: ShardedStateDict, plans: SavePlans) -> None:
        """Agree on who writes what, and copy what may change at once; a collective call."""
        self._writer = ThreadWriter(self.folder, self.snapshot)
        self._index = plans.plan(sharded, self._writer)

    def write(self) -> None:
        """Write this rank's files; an error waits for `finish`, where all ranks learn of it."""
        assert self._writer is not None
        try:
            if self.snapshot is not None:
                self.snapshot.take()
            self._records.update(self._writer.write_shards())
            if torch.distributed.get_rank() == 0:
                for name, content in self.small_files.items():
                    with HashingStream(self.folder / name) as stream:
                        stream.write(content)
                        self._records[name] = stream.settle()
        except Exception as error:
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            where = getattr(error, "filename", None) or self.folder
            self._error = f"rank {torch.distributed.get_rank()}: {where}: {reason}"

    def gather(self) -> None:
        """Tell rank 0 what every rank has written; a collective call."""
        assert self._writer is not None
        if torch.distributed.get_rank() == 0:
            self._gathered = [None] * torch.distributed.get_world_size()
            self._failure = "broken off before it had its name"
        mine = (self._writer.results, self._records, self._error)
        torch.distributed.gather_object(mine, self._gathered)

    def complete(self, publish: Callable[[int], None]) -> None:
        """Write index and manifest; on rank 0 alone, in any thread.

        An error waits for `settle`, where all ranks learn of it.

        Args:
            publish: makes a checkpoint of the iteration's folder.
        """
        assert self._gathered is not None
        self._failure = (
            "; ".join(error for _, _, error in self._gathered if error)
            or _reason(self._write_index, self._gathered)
            or _reason(publish, self.iteration)
        )

    def settle(self) -> None:
        """Learn what became of the save; a collective call.

        Raises:
            SaveError: on every rank, when one failed.
        """
        raise_together(self._failure)

    def _write_index(self, gathered: list[Any]) -> None:
        assert self._writer is not None
        self._writer.finish(self._index, [results for results, _, _ in gathered])
        save_config(CheckpointingConfig("torch_dist", 1), str(self.folder))
        records = {name: record for _, files, _ in gathered for name, record in files.items()}
        for name in (INDEX, FORMAT):
            records[name] = record_of(self.folder / name)
        Manifest(self.iteration, records).write(self.folder)


def collective_device() -> torch.device:
    """Where small tensors for collectives of the default group live."""
    if torch.distributed.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def on_rank_0(action: Any, *args: Any) -> None:
    """Run a disk operation on rank 0; a collective call.

    Raises:
        SaveError: on every rank, when it failed.
    """
    failure = _reason(action, *args) if torch.distributed.get_rank() == 0 else None
    raise_together(failure)


def raise_together(failure: str | None) -> None:
    """Raise rank 0's failure on every rank; a collective call.

    Raises:
        SaveError: if rank 0 gave a message.
    """
    failed = torch.tensor([int(failure is not None)], device=collective_device())
    torch.distributed.broadcast(failed, src=0)
    if not failed.item():
        return  # as nearly always: objects take several exchanges
    message = [failure]
    torch.distributed.broadcast_object_list(message, src=0)
    raise SaveError(message[0])


def _reason(action: Any, *args: Any) -> str | None:
    try:
        action(*args)
    except Exception as error:
        where = getattr(error, "filename", None)
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        return f"{where}: {reason}" if where else reason
    return None
