"""What a plan hands out: gathers over all of its positions, or over one rank's share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.packed.packing import checks
from megatron.packed.packing.buffer import BufferLayout
from megatron.packed.packing.native import core
from megatron.packed.packing.plan_fields import PlanFields

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]


class PartitionLike(Protocol):
    """What a plan needs to know of a partition: the runs of positions that a rank holds."""

    @property
    def total_tokens(self) -> int:
        """Tokens of the padded pack."""

    def runs(self, rank: int) -> tuple[Int64, Int64, int]:
        """Ascending disjoint runs: starts `[r]`, counts `[r]`, step inside a run."""


@dataclass(frozen=True, eq=False)
class PackView:
    """Some positions of a pack, in a given order, and every gather over them.

    Attributes:
        plan: the plan the positions belong to.
        pieces: int64 `[m, 4]`, see `reference.py`.
        step: position step inside a piece.
        num_tokens: T, or T / CP for one rank's share.
    """

    plan: PlanFields
    pieces: Int64
    step: int
    num_tokens: int

    @cached_property
    def position_ids(self) -> Int64:
        """Position in the segment, 0 in padding: int64 `[T]`."""
        return core.position_ids(self.pieces, self.step, self.num_tokens)

    @cached_property
    def document_ids(self) -> Int32:
        """Segment number in the pack, -1 in padding: int32 `[T]`."""
        return core.document_ids(self.pieces, self.num_tokens)

    @cached_property
    def valid_mask(self) -> NDArray[np.bool_]:
        """Tokens of a segment, as opposed to padding: bool `[T]`."""
        return core.held_mask(self.plan.lengths, self.pieces, self.step, 0, self.num_tokens)

    @property
    def num_valid(self) -> int:
        """Real tokens in this view."""
        return int(self.pieces[:, 3].sum())

    def loss_mask(self, depth: int = 0) -> NDArray[np.bool_]:
        """Supervised positions of a depth (0 is the main loss): bool `[T]`."""
        shift = 1 + checks.integer("depth", depth, 0)
        return core.held_mask(self.plan.extents, self.pieces, self.step, shift, self.num_tokens)

    def target_mask(self, supervised: Any, depth: int = 0) -> NDArray[np.bool_]:
        """Positions of a depth whose target exists and is supervised: bool `[T]`.

        Args:
            supervised: integers shaped as the raw rows, not 0 where a token may be a target.
            depth: 0 for the main loss.
        """
        return self.gather_labels(supervised, depth, fill=0) != 0

    def gather_tokens(self, rows: Any, *, fill: int | None = None) -> Int64:
        """Gather input tokens: int64 `[T]`.

        Args:
            rows: the raw rows the plan was built from, `[B, S]` or with the extra label token
                `[B, S + 1]`; for whole-document plans the flat token buffer.
            fill: token of padding positions; the pad id, or 0 where that is negative.

        Raises:
            ValueError: for rows of another shape than the plan's.
        """
        if fill is None:
            fill = max(self.plan.pad_id, 0)
        return self._gather(rows, 0, fill)

    def gather_labels(self, rows: Any, depth: int = 0, *, fill: int = 0) -> Int64:
        """Gather the targets of a depth, `fill` where unsupervised: int64 `[T]`.

        Args:
            rows: as in `gather_tokens`. The extra label token is taken from the plan when the
                rows don't hold it.
            depth: 0 for the main loss, k for the k-th multi-token prediction depth.
            fill: label of unsupervised positions.
        """
        return self._gather(rows, 1 + checks.integer("depth", depth, 0), fill)

    def write(
        self,
        rows: Any,
        layout: BufferLayout,
        buffer: NDArray[np.uint8],
        *,
        token_fill: int | None = None,
        label_fill: int = 0,
    ) -> None:
        """Write all that a step reads into one buffer, in one walk.

        Args:
            rows: as in `gather_tokens`.
            layout: where each array lies; made for this view's sizes.
            buffer: uint8 `[layout.num_bytes]` or longer.
            token_fill: token of padding positions; the pad id, or 0 where that is negative.
            label_fill: label of unsupervised positions.
        """
        plan = self.plan
        source = plan.check_source(rows)
        if layout.num_tokens != self.num_tokens:
            raise ValueError(
                f"layout: made for {layout.num_tokens} tokens, the view has {self.num_tokens}"
            )
        core.materialise(
            source,
            plan.extra_token if source.shape[1] == plan.row_width else None,
            plan.rows,
            plan.offsets,
            plan.extents,
            self.pieces,
            self.step,
            max(plan.pad_id, 0) if token_fill is None else token_fill,
            label_fill,
            plan.cu_seqlens,
            plan.cu_seqlens_padded,
            plan.valid_tokens_per_row,
            self.num_tokens,
            layout.depths,
            layout.places[:9],
            buffer,
        )

    def _gather(self, rows: Any, shift: int, fill: int) -> Int64:
        plan = self.plan
        source = plan.check_source(rows)
        extra = plan.extra_token if source.shape[1] == plan.row_width else None
        return core.gather(
            source,
            extra,
            plan.rows,
            plan.offsets,
            plan.extents,
            self.pieces,
            self.step,
            shift,
            self.num_tokens,
            fill,
        )


@dataclass(frozen=True)
class PackStatistics:
    """Counts of one pack, for logs and FLOP accounting.

    Attributes:
        num_segments: segments that hold at least one token.
        real_tokens: tokens of segments.
        padded_tokens: alignment and capacity padding.
        supervised_tokens: positions with a depth-0 target.
        sum_squared_lengths: sum of squared real lengths; causal attention costs half of it.
    """

    num_segments: int
    real_tokens: int
    padded_tokens: int
    supervised_tokens: int
    sum_squared_lengths: int
