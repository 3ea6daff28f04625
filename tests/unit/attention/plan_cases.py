"""Packs and plans that tests of plans and of the executor share."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.packed.attention.plans import AttentionPlan, build_attention_plan, default_partition
from megatron.packed.context_parallel import Partition, make_partition
from megatron.packed.packing import Alignment, PackPlan


@dataclass(frozen=True)
class Algorithm:
    """One line of the conformance suite.

    Attributes:
        kind: plan kind.
        sizes: context-parallel sizes it is tested with.
        partition: token partition, where it is not the default one.
        options: further options of `build_attention_plan`.
        layout: further options of `make_partition`.
    """

    kind: str
    sizes: tuple[int, ...] = (1, 2, 3, 4)
    partition: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    layout: tuple[tuple[str, Any], ...] = ()


# A new plan, or a new layout of an old one, is tested by adding one line.
ALGORITHMS = {
    "local": Algorithm("local", sizes=(1,)),
    "p2p": Algorithm("p2p"),
    "p2p-contiguous": Algorithm("p2p", sizes=(2, 3), partition="contiguous"),
    "p2p-zigzag_pack": Algorithm("p2p", sizes=(2, 3), partition="zigzag_pack"),
    "striped": Algorithm("striped"),
    "all_gather": Algorithm("all_gather"),
    "all_gather-dispatch": Algorithm("all_gather", sizes=(2, 3), partition="dispatch"),
    "dispatch": Algorithm("dispatch"),
    "dispatch-affinity": Algorithm("dispatch", sizes=(2, 3, 4), layout=(("affinity", True),)),
    "dispatch-2-stages": Algorithm("dispatch", sizes=(4,), options=(("stages", 2),)),
    "a2a": Algorithm("a2a"),
    "a2a-zigzag": Algorithm("a2a", sizes=(2, 3), partition="zigzag"),
    "a2a-striped": Algorithm("a2a", sizes=(2, 3), partition="striped"),
    "a2a+p2p": Algorithm("a2a+p2p", sizes=(4,), options=(("hierarchical_sizes", (2, 2)),)),
    "a2a+p2p-dispatch": Algorithm(
        "a2a+p2p", sizes=(4,), partition="dispatch", options=(("hierarchical_sizes", (2, 2)),)
    ),
}
CASES = [(name, size) for name, a in ALGORITHMS.items() for size in a.sizes]


@dataclass(frozen=True)
class Case:
    """A pack, its partition, and every rank's plan."""

    pack: PackPlan
    partition: Partition
    plans: list[AttentionPlan]

    @property
    def positions(self) -> list[np.ndarray]:
        """Pack position of each row that a rank's steps see, padding included."""
        local = [self.partition.indices(rank) for rank in range(len(self.plans))]
        result = []
        for rank, plan in enumerate(self.plans):
            exchange = plan.head_exchange
            if exchange is None:
                result.append(local[rank])
                continue
            together = np.concatenate([local[member] for member in exchange.members])
            result.append(together if exchange.order is None else together[exchange.order])
        return result


def make_case(
    name: str,
    cp_size: int,
    lengths: Any,
    *,
    mask: str = "causal",
    window: int | None = None,
    extra_alignment: int = 1,
    **changes: Any,
) -> Case:
    """Pack documents as the algorithm needs them, and plan every rank."""
    algorithm = ALGORITHMS[name]
    kind = algorithm.partition or default_partition(algorithm.kind)
    needed = Alignment.for_layout(partition=kind, cp_size=cp_size)
    alignment = Alignment(
        segment=int(np.lcm(needed.segment, extra_alignment)), pack=needed.pack_multiple
    )
    pack = PackPlan.from_documents(lengths, 0, alignment=alignment)
    partition = make_partition(
        kind,
        pack.cu_seqlens_padded,
        cp_size,
        cu_seqlens=pack.cu_seqlens,
        **dict(algorithm.layout) | changes,
    )
    plans = [
        build_attention_plan(
            algorithm.kind,
            pack.cu_seqlens,
            pack.cu_seqlens_padded,
            cp_size=cp_size,
            cp_rank=rank,
            mask=mask,
            window=window,
            partition=partition,
            **dict(algorithm.options),
        )
        for rank in range(cp_size)
    ]
    return Case(pack, partition, plans)


def corpus_lengths() -> np.ndarray:
    """Tokens of each file of the standard library (0.3 a byte), in a fixed random order."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    sizes = [
        path.stat().st_size
        for path in sorted(folder.rglob("*.py"))
        if "site-packages" not in path.parts
    ]
    lengths = np.array([int(size * 0.3) + 1 for size in sizes])
    return np.random.default_rng(0).permutation(lengths)


def log_normal_lengths(count: int = 4000) -> np.ndarray:
    """Long-tailed lengths: log-normal with mu 5.95 and sigma 1.26."""
    return np.exp(np.random.default_rng(0).normal(5.95, 1.26, count)).astype(np.int64) + 1


def packs_of(lengths: np.ndarray, tokens: int, count: int) -> list[list[int]]:
    """Documents of `count` packs of `tokens` tokens: cut from an endless stream, as rows are."""
    ends = np.cumsum(np.resize(lengths, 1 << 16))
    packs = []
    for start in range(0, count * tokens, tokens):
        inside = ends[(ends > start) & (ends < start + tokens)]
        packs.append(np.diff(np.concatenate([[start], inside, [start + tokens]])).tolist())
    return packs
