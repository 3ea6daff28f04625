"""The sharded part of a checkpoint, through megatron-core's torch_dist format.

Saving is cut in three, so that the middle can run beside training: `plan` (collective: who writes
what, and a copy of it on the host), `write` (this rank's file alone, in any thread) and `finish`
(collective: the index). Megatron-core's own asynchronous writer forks the training process, twice;
a fork beside running threads can deadlock, so here a thread writes. It spends its time in the
kernel, in SHA-256 and in memory copies, all outside Python's lock.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
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
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType

from megatron.packed.checkpoint.manifest import FileRecord, Manifest, record_of

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


class SnapshotBuffers:
    """Host memory for copies of what is saved, kept from one save to the next."""

    def __init__(self) -> None:
        self._buffers: dict[Any, torch.Tensor] = {}

    def copy(self, key: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the host; the result holds until the next copy under this key."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            pinned = tensor.device.type == "cuda"
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._buffers[key] = buffer
        return buffer.copy_(tensor.detach(), non_blocking=tensor.device.type == "cuda")


class ThreadWriter(FileSystemWriterAsync):
    """Writes this rank's shards to one file, from whichever thread calls `write_shards`."""

    def __init__(self, folder: Path, snapshots: SnapshotBuffers | None) -> None:
        super().__init__(folder, thread_count=1)
        self._folder = folder
        self._snapshots = snapshots
        self._items: list[tuple[Any, Any]] = []
        self._file_name = ""
        self.results: list[Any] = []

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Collect what this rank writes; copied, when training goes on before it is written."""
        self._file_name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        on_cuda = False
        for item in plan.items:
            data = planner.resolve_data(item)
            if item.type != WriteItemType.BYTE_IO:
                on_cuda |= data.device.type == "cuda"
                data = data.detach()
                data = self._snapshots.copy(item.index, data) if self._snapshots else data.cpu()
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
    _central: SavePlan | None = None
    _local: SavePlan | None = None
    _index: Any = None
    _spread: FullyParallelSaveStrategyWrapper | None = None

    def plan(self, sharded: ShardedStateDict, writer: ThreadWriter) -> Any:
        """Divide the writing and hand this rank's part to `writer`; a collective call.

        Returns:
            The index of the checkpoint on rank 0, still without places.
        """
        if self.parallel_group is not None:
            self._divide(sharded)
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
        known = self._known(flat)
        cached = (self._central, self._local, True) if known else None
        (_, index, _), self._central, self._local, _, _ = save_state_dict_async_plan(
            mcore_to_pyt_state_dict(flat, False),
            writer,
            None,
            0,
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            cached_ckpt_structure=cached,
        )
        if not known:
            self._index = index
            if index is not None:
                index.all_local_plans = None  # a second copy of all plans, for a cache we have
        return self._index

    def _divide(self, sharded: ShardedStateDict) -> None:
        if self._spread is None:
            self._spread = FullyParallelSaveStrategyWrapper(
                TorchDistSaveShardedStrategy("torch_dist", 1), self.parallel_group, True
            )
        self._spread.apply_saving_parallelization(sharded)

    def _known(self, flat: Mapping[str, list[Any]]) -> bool:
        """Whether every rank saves what it saved last time."""
        structure = tuple(
            (
                key,
                tuple((s.global_shape, s.global_offset, getattr(s, "dtype", None)) for s in shards),
            )
            for key, shards in flat.items()
        )
        same = torch.tensor([int(structure == self._structure)], device=collective_device())
        torch.distributed.all_reduce(same, torch.distributed.ReduceOp.MIN)
        self._structure = structure
        return bool(same.item())


@dataclass
class ShardedSave:
    """One checkpoint on its way to the disk.

    Attributes:
        folder: where it is written; exists, and is empty.
        iteration: of the checkpoint.
        small_files: contents by name, written by rank 0 beside the shards.
    """

    folder: Path
    iteration: int
    small_files: Mapping[str, bytes]
    _writer: ThreadWriter | None = None
    _index: Any = None
    _records: dict[str, FileRecord] = field(default_factory=dict)
    _error: str | None = None

    def begin(
        self, sharded: ShardedStateDict, plans: SavePlans, snapshots: SnapshotBuffers | None
    ) -> None:
        """Agree on who writes what, and copy it if there are buffers; a collective call."""
        self._writer = ThreadWriter(self.folder, snapshots)
        self._index = plans.plan(sharded, self._writer)

    def write(self) -> None:
        """Write this rank's files; an error waits for `finish`, where all ranks learn of it."""
        assert self._writer is not None
        try:
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

    def finish(self) -> None:
        """Write the index and the manifest, once every rank has written; a collective call.

        Raises:
            SaveError: on every rank, when one failed.
        """
        assert self._writer is not None
        gathered: list[Any] | None = None
        if torch.distributed.get_rank() == 0:
            gathered = [None] * torch.distributed.get_world_size()
        mine = (self._writer.results, self._records, self._error)
        torch.distributed.gather_object(mine, gathered)
        failure = None
        if gathered is not None:
            failure = "; ".join(error for _, _, error in gathered if error) or None
            if failure is None:
                failure = _reason(self._write_index, gathered)
        raise_together(failure)

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
    message = [failure]
    torch.distributed.broadcast_object_list(message, src=0)
    if message[0] is not None:
        raise SaveError(message[0])


def _reason(action: Any, *args: Any) -> str | None:
    try:
        action(*args)
    except Exception as error:
        where = getattr(error, "filename", None)
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        return f"{where}: {reason}" if where else reason
    return None
