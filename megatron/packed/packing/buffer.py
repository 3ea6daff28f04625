"""One flat buffer for all arrays of a micro-batch.

One allocation, one copy to a device, one broadcast: the buffer starts with a header of int64
words, so that whoever receives the bytes knows the sizes. Each array begins at a multiple of 64
bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.packed.packing.records import INTEGER_FIELDS

HEADER_WORDS = 32
_MAGIC = 0x4B434150  # "PACK"
_ALIGN = 64
_INT64, _INT32, _BOOL = map(np.dtype, (np.int64, np.int32, np.bool_))
_FLOAT32, _FLOAT64 = map(np.dtype, (np.float32, np.float64))


class Section(NamedTuple):
    """Place of one array: byte offset, dtype, shape, length in bytes."""

    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    num_bytes: int


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
    def sections(self) -> dict[str, Section]:
        """Where each array lies."""
        t, d, n = self.num_tokens, self.depths, self.num_segments
        wanted: list[tuple[str, np.dtype[Any], tuple[int, ...]]] = [
            ("header", _INT64, (HEADER_WORDS,)),
            ("tokens", _INT64, (t,)),
            ("position_ids", _INT64, (t,)),
            ("labels", _INT64, (d, t)),
            ("loss_masks", _FLOAT32, (d, t)),
            ("document_ids", _INT32, (t,)),
            ("valid_mask", _BOOL, (t,)),
            ("cu_seqlens", _INT32, (n + 1,)),
            ("cu_seqlens_padded", _INT32, (n + 1,)),
            ("segment_records", _INT64, (len(INTEGER_FIELDS), n)),
            ("segment_targets", _INT64, (d, n)),
            ("segment_weights", _FLOAT64, (n,)),
            ("token_weights", _FLOAT64, (n,)),
            ("valid_tokens_per_row", _INT64, (self.num_rows,)),
        ]
        result = {}
        at = 0
        for name, dtype, shape in wanted:
            section = Section(at, dtype, shape, math.prod(shape) * dtype.itemsize)
            result[name] = section
            at += section.num_bytes + -section.num_bytes % _ALIGN
        return result

    @cached_property
    def num_bytes(self) -> int:
        """Length of the buffer."""
        last = self.sections["valid_tokens_per_row"]
        return last.offset + last.num_bytes + -last.num_bytes % _ALIGN

    def arrays(self, buffer: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        """Views into a buffer by name; nothing is copied."""
        if buffer.dtype != np.uint8 or buffer.ndim != 1 or len(buffer) < self.num_bytes:
            raise ValueError(
                f"buffer: needs {self.num_bytes} bytes, got {buffer.dtype} of {buffer.shape}"
            )
        return {
            name: np.ndarray(section.shape, section.dtype, buffer, section.offset)
            for name, section in self.sections.items()
        }

    def write_header(self, buffer: NDArray[np.uint8], numbers: list[int]) -> None:
        """Write sizes and `numbers` (at most 24) into the header."""
        header = np.ndarray((HEADER_WORDS,), np.int64, buffer, 0)
        sizes = self.num_tokens, self.depths, self.num_segments, self.num_rows
        words = [_MAGIC, *sizes, *numbers]
        if len(words) > HEADER_WORDS:
            raise ValueError(f"numbers: {len(numbers)} don't fit in the header")
        header[: len(words)] = words
        header[len(words) :] = 0

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
