"""`build_attention_plan`: the one way from boundaries to a rank's plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.packed.attention.plans import (
    all_gather,
    dispatch,
    local,
    ring,
    striped,
    ulysses,
)
from megatron.packed.attention.plans.plan import AttentionPlan, Step
from megatron.packed.attention.plans.schedule import schedule_steps
from megatron.packed.attention.task_graph import Mask, build_blocks
from megatron.packed.errors import ConfigurationError
from megatron.packed.packing import checks
from megatron.packed.packing.partition import Partition, make_partition

Exchanges = Callable[[int, int | None], NDArray[np.int64]]


@dataclass(frozen=True)
class Algorithm:
    """What tells one algorithm from another.

    Attributes:
        partition: the token partition it takes by default.
        exchanges: ring size and stages -> number of the exchange that covers each offset.
        heads: "none", "all" (one head-exchange group) or "groups".
    """

    partition: str
    exchanges: Exchanges
    heads: str = "none"


_ALGORITHMS = {
    "local": Algorithm(local.DEFAULT_PARTITION, local.exchange_of_offset),
    "p2p": Algorithm(ring.DEFAULT_PARTITION, ring.exchange_of_offset),
    "striped": Algorithm(striped.DEFAULT_PARTITION, striped.exchange_of_offset),
    "all_gather": Algorithm(all_gather.DEFAULT_PARTITION, all_gather.exchange_of_offset),
    "dispatch": Algorithm(dispatch.DEFAULT_PARTITION, dispatch.exchange_of_offset),
    "a2a": Algorithm(ulysses.DEFAULT_PARTITION_A2A, ring.exchange_of_offset, "all"),
    "a2a+p2p": Algorithm(ulysses.DEFAULT_PARTITION_HIERARCHICAL, ring.exchange_of_offset, "groups"),
}
PLAN_KINDS = tuple(_ALGORITHMS)


def default_partition(kind: str) -> str:
    """Token partition that a plan of this kind takes unless told otherwise."""
    return _algorithm(kind).partition


def _algorithm(kind: str) -> Algorithm:
    if kind not in _ALGORITHMS:
        raise ValueError(f"kind: {kind!r} must be one of {', '.join(PLAN_KINDS)}")
    return _ALGORITHMS[kind]


def build_attention_plan(
    kind: str,
    cu_seqlens: Any,
    cu_seqlens_padded: Any = None,
    *,
    cp_size: int = 1,
    cp_rank: int = 0,
    mask: str = "causal",
    window: int | None = None,
    partition: Partition | str | None = None,
    chunk_size: int | None = None,
    hierarchical_sizes: Sequence[int] | None = None,
    stages: int | None = None,
) -> AttentionPlan:
    """Plan one rank's share of the attention over a pack.

    Args:
        kind: one of `PLAN_KINDS`.
        cu_seqlens: integers `[n + 1]`, real boundaries of the segments.
        cu_seqlens_padded: integers `[n + 1]`, where they start in the pack; the real ones where
            nothing is padded.
        cp_size: context-parallel ranks.
        cp_rank: this rank.
        mask: "causal" or "full", inside segments.
        window: tokens to the left that stay visible next to the query itself; None for all.
        partition: who holds which token: a partition of this pack, also one whose own boundaries
            differ from the segments (rows that hold several), or its kind; the algorithm's own
            by default.
        chunk_size: tokens per dispatched chunk, see `make_partition`.
        hierarchical_sizes: for a2a+p2p: ranks of a head-exchange group (neighbours), then number
            of groups. Their product is `cp_size`.
        stages: exchanges of a dispatch plan; None for one a peer.

    Returns:
        The plan. It needs no process group, holds plain integers and can be pickled.

    Raises:
        ConfigurationError: for hierarchical sizes that don't multiply to `cp_size`.
        ValueError: for an unknown name, or boundaries that the partition can't split exactly.
    """
    algorithm = _algorithm(kind)
    cp_size = checks.integer("cp_size", cp_size, 1)
    cp_rank = checks.integer("cp_rank", cp_rank, 0)
    if cp_rank >= cp_size:
        raise ValueError(f"cp_rank: must be below cp_size = {cp_size}, got {cp_rank}")
    if stages is not None:
        checks.integer("stages", stages, 1)
        if kind != "dispatch":
            raise ValueError(f"stages: only dispatch has them, got it with {kind!r}")
    group_size = _group_size(kind, algorithm, cp_size, hierarchical_sizes)
    wanted = Mask(mask, window)
    real = checks.boundary_array("cu_seqlens", cu_seqlens)
    padded = real
    if cu_seqlens_padded is not None:
        padded = checks.boundary_array("cu_seqlens_padded", cu_seqlens_padded)
        if len(real) != len(padded) or np.any(np.diff(real) > np.diff(padded)):
            raise ValueError("cu_seqlens: must have the padded segments, none of them longer")
    if not isinstance(partition, Partition):
        partition = make_partition(
            partition or algorithm.partition,
            padded,
            cp_size,
            cu_seqlens=real,
            chunk_size=chunk_size,
        )
    elif partition.cp_size != cp_size or partition.total_tokens != int(padded[-1]):
        raise ValueError(
            f"partition: made for {partition.total_tokens} tokens on {partition.cp_size} ranks, "
            f"the pack has {int(padded[-1])} on {cp_size}"
        )

    ring_size = cp_size // group_size
    exchanges = algorithm.exchanges(ring_size, stages)
    blocks = build_blocks(partition, padded[:-1], np.diff(real), group_size)
    ring_rank = cp_rank // group_size
    steps = schedule_steps(blocks, wanted, ring_rank, ring_size, exchanges)
    exchange = None
    if group_size > 1:
        exchange = ulysses.head_exchange(partition, cp_rank, group_size)
        steps = tuple(_to_cp_ranks(step, group_size, exchange.place) for step in steps)
    return AttentionPlan(
        kind=kind,
        partition=partition.kind,
        mask=wanted,
        cp_size=cp_size,
        cp_rank=cp_rank,
        rows=partition.local_tokens * group_size,
        real_rows=int(blocks.count[blocks.rank == ring_rank].sum()),
        ring_size=ring_size,
        steps=steps,
        head_exchange=exchange,
        is_pairwise=len(np.unique(exchanges[1:])) == ring_size - 1,
    )


def _group_size(kind: str, algorithm: Algorithm, cp_size: int, sizes: Sequence[int] | None) -> int:
    """Ranks that exchange heads with each other."""
    if algorithm.heads != "groups":
        if sizes is not None:
            raise ConfigurationError(
                f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes))} needs "
                f"--cp-comm-type a2a+p2p, not {kind}"
            )
        return cp_size if algorithm.heads == "all" else 1
    if sizes is None or len(sizes) != 2:
        raise ConfigurationError(
            "--cp-comm-type a2a+p2p needs two --hierarchical-context-parallel-sizes: ranks of a "
            "head-exchange group, then number of groups"
        )
    inner, outer = (checks.integer("hierarchical_sizes", size, 1) for size in sizes)
    if inner * outer != cp_size:
        raise ConfigurationError(
            f"--hierarchical-context-parallel-sizes {inner} {outer} multiply to {inner * outer}, "
            f"not to --context-parallel-size {cp_size}"
        )
    return inner


def _to_cp_ranks(step: Step, group_size: int, place: int) -> Step:
    """Peers numbered by group become the rank at the same place in that group."""
    return replace(
        step,
        sends=tuple(replace(s, peer=s.peer * group_size + place) for s in step.sends),
        receives=tuple(replace(r, peer=r.peer * group_size + place) for r in step.receives),
    )
