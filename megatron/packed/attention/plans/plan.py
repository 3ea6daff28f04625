"""What one rank does in one attention call: plain integers, made on the host, sent by pickle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron.packed.attention.row_runs import RowRuns
from megatron.packed.attention.task_graph import Mask, Tiles, expand
from megatron.packed.attention.tile_calls import TileCall, tile_calls
from megatron.packed.attention.tile_lists import TileList, tile_lists

Int64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Send:
    """Rows of this rank's keys and values that another rank needs.

    Attributes:
        peer: context-parallel rank that gets them.
        starts, counts: int64 `[r]`, runs of local rows, ascending.
    """

    peer: int
    starts: Int64
    counts: Int64

    @cached_property
    def rows(self) -> int:
        """Rows sent."""
        return int(self.counts.sum())

    @cached_property
    def runs(self) -> RowRuns:
        """From local rows to those of the message."""
        return RowRuns.gather(self.starts, self.counts)


@dataclass(frozen=True)
class Receive:
    """Rows that arrive from another rank; those of one step lie end to end in its buffer.

    Attributes:
        peer: context-parallel rank that sends them.
        rows: how many.
    """

    peer: int
    rows: int


@dataclass(frozen=True, eq=False)
class Step:
    """One exchange, and the tasks that can run once it has ended.

    Attributes:
        index: number of the exchange, the same on every rank; 0 is the local step, which exchanges
            nothing. A rank without part in an exchange has no step for it.
        sends: rows to send, one entry a peer.
        receives: rows to receive, one entry a peer, in the order of the step's buffer.
        tiles: tasks; key rows count in the step's buffer, or local ones in step 0.
    """

    index: int
    sends: tuple[Send, ...]
    receives: tuple[Receive, ...]
    tiles: Tiles

    @cached_property
    def calls(self) -> tuple[TileCall, ...]:
        """Kernel calls that compute the tiles; the same for every layer."""
        return tile_calls(self.tiles)

    @cached_property
    def lists(self) -> tuple[TileList, ...]:
        """The tiles for variable-length kernels; the same for every layer."""
        return tile_lists(self.tiles, is_first=self.index == 0)

    @property
    def rows_sent(self) -> int:
        """Key-value rows that leave."""
        return sum(send.rows for send in self.sends)

    @property
    def rows_received(self) -> int:
        """Key-value rows that arrive."""
        return sum(receive.rows for receive in self.receives)


@dataclass(frozen=True, eq=False)
class HeadExchange:
    """The a2a of Ulysses inside a subgroup of neighbouring ranks, around the other steps.

    ```
    before   rank 0: tokens A, heads 0 1      after   rank 0: tokens A B, head 0
             rank 1: tokens B, heads 0 1              rank 1: tokens A B, head 1
    ```

    Attributes:
        members: context-parallel ranks of the subgroup, ascending, this rank included.
        place: this rank's index among them.
        member_rows: tokens that each member holds.
        order: int64 `[len(members) * member_rows]`, which row of the members' rows laid end to end
            comes next in ascending order of position; None where that is their own order.
    """

    members: tuple[int, ...]
    place: int
    member_rows: int
    order: Int64 | None

    @property
    def size(self) -> int:
        """Ranks that exchange heads."""
        return len(self.members)

    @cached_property
    def runs(self) -> tuple[RowRuns, ...]:
        """For each member, from rows in ascending order of position to those that it holds."""
        rows = self.member_rows
        if self.order is None:
            start, count = np.array([rows]), np.array([rows])
            return tuple(RowRuns.gather(start * place, count) for place in range(self.size))
        return tuple(map(RowRuns.of_index, np.argsort(self.order).reshape(self.size, rows)))


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """One rank's schedule of an exact attention over a pack.

    Attributes:
        kind: one of `PLAN_KINDS`.
        partition: kind of the token partition.
        mask: what a query sees of its segment.
        cp_size: context-parallel ranks.
        cp_rank: this rank.
        rows: query and key rows while the steps run: local tokens, or those of the subgroup.
        real_rows: those of `rows` that hold a token of a segment; the others are padding.
        ring_size: ranks, or subgroups, that share the steps.
        steps: what to do, in order. Step 0 is local.
        head_exchange: the exchange of heads for tokens around the steps, or None.
        is_pairwise: whether on no rank several others take part in one step.
    """

    kind: str
    partition: str
    mask: Mask
    cp_size: int
    cp_rank: int
    rows: int
    real_rows: int
    ring_size: int
    steps: tuple[Step, ...]
    head_exchange: HeadExchange | None = None
    is_pairwise: bool = True

    @property
    def local_tokens(self) -> int:
        """Tokens that this rank brings, padding included."""
        exchange = self.head_exchange
        return self.rows if exchange is None else exchange.member_rows

    @cached_property
    def padding(self) -> Int64:
        """Rows that hold no token of a segment, which no tile touches: int64 `[p]`."""
        tiles = self.steps[0].tiles
        starts, counts = tiles.bands[: tiles.fresh, :2].T
        is_padding = np.ones(self.rows, np.bool_)
        is_padding[expand(starts, counts)[1]] = False
        return np.flatnonzero(is_padding)

    @cached_property
    def area(self) -> int:
        """Unmasked query-key pairs that this rank computes, per head."""
        return sum(step.tiles.area for step in self.steps)

    @property
    def rows_sent(self) -> int:
        """Key-value rows sent in forward."""
        return sum(step.rows_sent for step in self.steps)

    @property
    def rows_received(self) -> int:
        """Key-value rows received in forward."""
        return sum(step.rows_received for step in self.steps)

    @property
    def full_ring_rows(self) -> int:
        """Key-value rows that a ring which passes everything on would bring to this rank."""
        return (self.ring_size - 1) * self.rows

    def kv_bytes_sent(
        self, kv_heads: int, key_width: int, value_width: int, element_size: int
    ) -> int:
        """Bytes of keys and values that this rank sends in forward, head exchanges left out.

        Args:
            kv_heads: key-value heads of one rank while the steps run.
            key_width: width of a key head.
            value_width: width of a value head.
            element_size: bytes of one number.
        """
        return self.rows_sent * kv_heads * (key_width + value_width) * element_size

    def bytes_sent(
        self, heads: int, kv_heads: int, key_width: int, value_width: int, element_size: int
    ) -> int:
        """All bytes that this rank sends in forward, head exchanges included.

        Args:
            heads: query heads of one tensor-parallel rank.
            kv_heads: key-value heads of one tensor-parallel rank.
            key_width: width of a key head.
            value_width: width of a value head.
            element_size: bytes of one number.
        """
        exchange = self.head_exchange
        if exchange is None:
            return self.kv_bytes_sent(kv_heads, key_width, value_width, element_size)
        mine, mine_kv = heads // exchange.size, max(kv_heads // exchange.size, 1)
        width = key_width + value_width  # queries go in, outputs come back
        rows = (exchange.size - 1) * exchange.member_rows
        swapped = rows * (mine + mine_kv) * width * element_size
        return swapped + self.kv_bytes_sent(mine_kv, key_width, value_width, element_size)


@dataclass(frozen=True)
class PlanReport:
    """What all ranks of a plan cost together.

    Attributes:
        areas: unmasked pairs of each rank.
        rows_sent: key-value rows that each rank sends.
        balance: largest area over the mean one; 1 is perfect.
        kv_share: key-value rows that travel, as a share of a full ring.
    """

    areas: tuple[int, ...]
    rows_sent: tuple[int, ...]
    balance: float
    kv_share: float


def report(plans: Sequence[AttentionPlan]) -> PlanReport:
    """Sum up the plans of all ranks."""
    areas = tuple(plan.area for plan in plans)
    full = sum(plan.full_ring_rows for plan in plans)
    return PlanReport(
        areas=areas,
        rows_sent=tuple(plan.rows_sent for plan in plans),
        balance=max(areas) * len(areas) / sum(areas) if sum(areas) else 1.0,
        kv_share=sum(plan.rows_received for plan in plans) / full if full else 0.0,
    )
