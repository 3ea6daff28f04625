"""What a plan holds: the integers that views gather by, and the raw rows that fit them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.packed.packing import checks
from megatron.packed.packing.alignment import Alignment

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class PlanFields:
    """All boundaries of one pack: plain integers, made on the host, without torch.

    Attributes:
        rows: int64 `[n]`, source row of each segment.
        offsets: int64 `[n]`, first column of each segment in its row.
        lengths: int64 `[n]`, real tokens of each segment.
        extents: int64 `[n]`, tokens of the document that the data holds from there on.
        cu_seqlens: int32 `[n + 1]`, real boundaries.
        cu_seqlens_padded: int32 `[n + 1]`, aligned boundaries; the last is `total_tokens`. The
            same object as `cu_seqlens` when nothing is padded.
        total_tokens: T, length of the padded pack.
        max_seqlen: longest real segment.
        max_seqlen_padded: longest padded segment.
        valid_tokens_per_row: int64 `[B]`.
        row_width: S, columns of a source row without the extra label token.
        pad_id: token written into padding.
        extra_token: int64 `[B]` or None.
        alignment: the multiples the layout obeys.
        whole_pack_valid_tokens: real tokens of the whole pack, also in a chunk of it.

    A pack without a single real token still has a shape: one empty segment over the padding.
    """

    rows: Int64
    offsets: Int64
    lengths: Int64
    extents: Int64
    cu_seqlens: Int32
    cu_seqlens_padded: Int32
    total_tokens: int
    max_seqlen: int
    max_seqlen_padded: int
    valid_tokens_per_row: Int64
    row_width: int
    pad_id: int
    extra_token: Int64 | None = None
    alignment: Alignment = field(default_factory=Alignment)
    whole_pack_valid_tokens: int = 0

    @property
    def num_segments(self) -> int:
        """Segments in `cu_seqlens`, empty ones included."""
        return len(self.lengths)

    def check_source(self, rows: Any) -> Int64:
        """Return `rows` as int64 `[B, S]` or `[B, S + 1]`, refusing any other shape."""
        array = np.asarray(rows)
        source = checks.integer_array("rows", array[None] if array.ndim == 1 else array, 2)
        num_rows = len(self.valid_tokens_per_row)
        if source.shape[0] != num_rows or source.shape[1] not in (
            self.row_width,
            self.row_width + 1,
        ):
            raise ValueError(
                f"rows: shape {source.shape}, but the plan was made for {num_rows} row(s) of "
                f"{self.row_width} tokens, or one more with the extra label token"
            )
        return source
