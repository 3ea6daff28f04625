"""Memory that ranks of one host share: anonymous, handed over as a file descriptor.

A segment has no name, so that nothing is left behind however its processes end.
"""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

from megatron.packed.attention.communicator import Form

_ROUNDING = 1 << 20


class Segment:
    """Memory that this rank writes messages to.

    Attributes:
        number: names it to others.
        descriptor: what others map.
        size: bytes.
        known_to: ranks that have the descriptor.
        is_lent: an exchange is going to send from it.
        unread: messages in it that their receivers have not released.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.descriptor = os.memfd_create("context-parallel-rows", os.MFD_CLOEXEC)
        self.size = 0
        self.known_to: set[int] = set()
        self.is_lent = False
        self.unread = 0
        self._bytes = torch.empty(0, dtype=torch.uint8)

    @property
    def is_free(self) -> bool:
        """Whether nobody reads it or is going to write it."""
        return not self.is_lent and self.unread == 0

    def grow(self, size: int) -> None:
        """Make room for `size` bytes. Tensors that lie in it keep their memory."""
        self.size = -(-size // _ROUNDING) * _ROUNDING
        os.ftruncate(self.descriptor, self.size)
        self._bytes = _map(self.descriptor, self.size)

    def rows(self, rows: int, form: Form) -> Tensor:
        """`[rows, columns]` at its start."""
        return _rows(self._bytes, 0, rows, form)

    def offset(self, tensor: Tensor) -> int | None:
        """Bytes from its start to a tensor's; None for one that lies elsewhere."""
        offset = tensor.data_ptr() - self._bytes.data_ptr()
        return offset if 0 <= offset < self.size else None


class Mapping:
    """Another rank's segment.

    Args:
        descriptor: of the segment; this object closes it.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def rows(self, size: int, offset: int, rows: int, form: Form) -> Tensor:
        """`[rows, columns]` at an offset in bytes of a segment that has `size` bytes by now."""
        if size > self._bytes.numel():
            self._bytes = _map(self.descriptor, size)
        return _rows(self._bytes, offset, rows, form)


def _map(descriptor: int, size: int) -> Tensor:
    """Its bytes; the mapping ends with the last tensor that uses it."""
    # All pages at once: one by one, as they are touched, they cost as much as copying them.
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    return torch.frombuffer(mmap.mmap(descriptor, size, flags=flags), dtype=torch.uint8)


def _rows(memory: Tensor, offset: int, rows: int, form: Form) -> Tensor:
    typed = memory.view(form.dtype)
    return typed.as_strided((rows, form.columns), (form.columns, 1), offset // typed.itemsize)
