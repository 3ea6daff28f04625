"""One flat buffer for all arrays of a micro-batch.

One allocation, one copy to a device, one broadcast: the buffer starts with a header of int64
words, so that whoever receives the bytes knows the sizes. Each array begins at a multiple of 64
bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.packed.packing.records import INTEGER_FIELDS

HEADER_WORDS = 32
_MAGIC = 0x4B434150  # "PACK"
_ALIGN = 64
_HEADER = struct.Struct(f"={HEADER_WORDS}q")
# Arrays in the order in which they lie behind the header: dtype, and dimensions, which are
# t tokens, d depths, n segments, m boundaries, f fields of segment records, b rows.
KINDS: dict[str, tuple[type, str]] = {
    "tokens": (np.int64, "t"),
    "position_ids": (np.int64, "t"),
    "labels": (np.int64, "dt"),
    "loss_masks": (np.float32, "dt"),
    "document_ids": (np.int32, "t"),
    "valid_mask": (np.bool_, "t"),
    "cu_seqlens": (np.int32, "m"),
    "cu_seqlens_padded": (np.int32, "m"),
    "valid_tokens_per_row": (np.int64, "b"),
    "segment_records": (np.int64, "fn"),
    "segment_targets": (np.int64, "dn"),
    "segment_weights": (np.float64, "n"),
    "token_weights": (np.float64, "n"),
}
_NUMBER_OF = {name: number for number, name in enumerate(KINDS)}


def _up(size: int) -> int:
    return size + -size % _ALIGN


@dataclass(frozen=True)
class BufferLayout:
    """Sizes of a micro-batch, and where each of its arrays lies in the buffer.

    Attributes:
        num_tokens: T of this rank.
        depths: target depths, 1 for the main loss alone.
        num_segments: n.
        num_rows: B.
    """

    num_tokens: int
    depths: int
    num_segments: int
    num_rows: int

    @cached_property
    def places(self) -> tuple[int, ...]:
        """First byte of each array of `KINDS`, in that order, and the end."""
        # Arithmetic and no loop: this runs for every micro-batch.
        t, d, n = self.num_tokens, self.depths, self.num_segments
        words, halves, bounds = _up(8 * t), _up(4 * t), _up(4 * n + 4)
        tokens = 8 * HEADER_WORDS
        positions = tokens + words
        labels = positions + words
        weights = labels + (words if d == 1 else _up(8 * t * d))
        documents = weights + (halves if d == 1 else _up(4 * t * d))
        valid = documents + halves
        real = valid + _up(t)
        padded = real + bounds
        rows = padded + bounds
        records = rows + _up(8 * self.num_rows)
        targets = records + _up(8 * len(INTEGER_FIELDS) * n)
        of_segments = targets + _up(8 * n * d)
        of_tokens = of_segments + _up(8 * n)
        first = tokens, positions, labels, weights, documents, valid, real, padded, rows
        return *first, records, targets, of_segments, of_tokens, of_tokens + _up(8 * n)

    @property
    def num_bytes(self) -> int:
        """Length of the buffer."""
        return self.places[-1]

    def arrays(self, buffer: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        """Views into a buffer by name; nothing is copied."""
        if buffer.dtype != np.uint8 or buffer.ndim != 1 or len(buffer) < self.num_bytes:
            raise ValueError(
                f"buffer: needs {self.num_bytes} bytes, got {buffer.dtype} of {buffer.shape}"
            )
        return {name: self.array(buffer, name) for name in KINDS}

    def array(self, buffer: NDArray[np.uint8], name: str) -> NDArray[Any]:
        """One array of a buffer of the right size."""
        dtype, dimensions = KINDS[name]
        shape = tuple([self._sizes[dimension] for dimension in dimensions])
        return np.ndarray(shape, dtype, buffer, self.places[_NUMBER_OF[name]])

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return {
            "t": self.num_tokens,
            "d": self.depths,
            "n": self.num_segments,
            "m": self.num_segments + 1,
            "f": len(INTEGER_FIELDS),
            "b": self.num_rows,
        }

    def write_header(self, buffer: NDArray[np.uint8], numbers: list[int]) -> None:
        """Write sizes and `numbers` (at most 24) into the header."""
        sizes = self.num_tokens, self.depths, self.num_segments, self.num_rows
        spare = HEADER_WORDS - 1 - len(sizes) - len(numbers)
        if spare < 0:
            raise ValueError(f"numbers: {len(numbers)} don't fit in the header")
        _HEADER.pack_into(buffer.data, 0, _MAGIC, *sizes, *numbers, *(0,) * spare)

    @classmethod
    def read_header(cls, buffer: NDArray[np.uint8]) -> tuple[BufferLayout, list[int]]:
        """Read the sizes and the numbers back.

        Raises:
            ValueError: when the bytes are not such a buffer, or it is cut short.
        """
        if buffer.dtype != np.uint8 or buffer.ndim != 1 or len(buffer) < 8 * HEADER_WORDS:
            raise ValueError("buffer: too short for a packed batch")
        words = np.ndarray((HEADER_WORDS,), np.int64, buffer, 0).tolist()
        if words[0] != _MAGIC or min(words[1:5]) < 0:
            raise ValueError("buffer: these bytes are no packed batch")
        layout = cls(*words[1:5])
        if len(buffer) < layout.num_bytes:
            raise ValueError(f"buffer: {len(buffer)} bytes, the batch needs {layout.num_bytes}")
        return layout, words[5:]
