"""Copies of what is saved, so that training can go on while files are written.

Most bytes of a checkpoint, weights and optimizer states, stay as they are until the next update.
They are copied in the background beside the next forward and backward pass, and the update waits
for whatever is left. Anything else (buffers that a forward pass counts in, states of generators)
is copied at once.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


class SnapshotBuffers:
    """Host memory for copies, kept from one save to the next: new memory costs page faults."""

    def __init__(self) -> None:
        self._buffers: dict[Any, torch.Tensor] = {}

    def get(self, key: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Memory for a copy of a tensor; holds it until the next copy under this key."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            pinned = tensor.device.type == "cuda"
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._buffers[key] = buffer
        return buffer


@dataclass
class Snapshot:
    """The copies of one save.

    Attributes:
        buffers: where they go.
        unchanging: storages, by `storage_of`, in which only an update changes anything.
    """

    buffers: SnapshotBuffers
    unchanging: frozenset[int] = frozenset()
    _later: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    _taken: threading.Event = field(default_factory=threading.Event)

    def add(self, key: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor, or see to it that `take` will.

        Args:
            key: names the tensor in every save.
            tensor: any shape, dtype and device.

        Returns:
            The copy on the host, not yet filled where `take` is to do it.
        """
        tensor = tensor.detach()
        buffer = self.buffers.get(key, tensor)
        if storage_of(tensor) in self.unchanging:
            self._later.append((buffer, tensor))
        else:
            buffer.copy_(tensor, non_blocking=tensor.device.type == "cuda")
        return buffer

    def take(self) -> None:
        """Make the remaining copies, in any thread."""
        try:
            for buffer, tensor in self._later:
                _copy(buffer, tensor)
        finally:  # an error is the save's, and training doesn't wait for it
            self._later.clear()
            self._taken.set()

    def wait(self) -> None:
        """Return once every copy is taken."""
        self._taken.wait()


def storage_of(tensor: torch.Tensor) -> int:
    """Address of the memory that a tensor lies in; 0 for none, and for memory of a device."""
    return tensor.untyped_storage().data_ptr() if tensor.device.type == "cpu" else 0


def _copy(buffer: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy in this thread alone: torch would start a team of threads beside training's."""
    source, target = (each.reshape(-1).view(torch.uint8).numpy() for each in (tensor, buffer))
    np.copyto(target, source)
