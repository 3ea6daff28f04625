"""Whole-document packers: which pieces share a pack.

Source: best-fit packing of Ding et al. 2024 (Fewer Truncations Improve Language Modeling).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.packed.errors import DataError
from megatron.packed.packing import checks
from megatron.packed.packing.documents import DocumentStream
from megatron.packed.packing.native import core
from megatron.packed.packing.packer_base import DocumentPacker, as_pieces, split_by_bin
from megatron.packed.packing.packer_workload import GreedyWorkload

Int64 = NDArray[np.int64]

STRATEGIES = ("rows", "next_fit", "best_fit_decreasing", "windowed_best_fit", "greedy_workload")
# A window's open bins get this many further windows to fill up, then go out as they are.
WINDOWS_OPEN = 4


class NextFit(DocumentPacker):
    """Documents in stream order; a pack closes when the next one doesn't fit."""

    strategy = "next_fit"
    _documents_per_step = 1024

    def __init__(self, stream: DocumentStream, *, alignment: int = 1) -> None:
        super().__init__(stream, alignment=alignment)
        self._open = as_pieces([])

    def _advance(self) -> list[Int64]:
        pieces = self.stream.take(self._documents_per_step)
        used = int(self.costs(self._open).sum())
        bins = core.next_fit(self.costs(pieces), self.capacity, used)
        pieces = np.concatenate([self._open, pieces])
        bins = np.concatenate([np.zeros(len(self._open), dtype=np.int64), bins])
        packs = split_by_bin(pieces, bins, int(bins[-1]) + 1 if len(bins) else 0)
        self._open = as_pieces([])
        if packs and not self.stream.epoch_ended:
            self._open = packs.pop()
        return packs

    def _has_open(self) -> bool:
        return len(self._open) > 0

    def _own_state(self) -> dict[str, Any]:
        return {"open": self._open.tolist()}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        self._open = as_pieces(state["open"])


class Alone(DocumentPacker):
    """Each piece by itself, in stream order: what rows of one document are made of."""

    strategy = "alone"

    def _advance(self) -> list[Int64]:
        pieces = self.stream.take(1024)
        return [pieces[i : i + 1] for i in range(len(pieces))]


class BestFitDecreasing(DocumentPacker):
    """A whole epoch at once, longest document first, each into the fullest pack with room."""

    strategy = "best_fit_decreasing"

    def _advance(self) -> list[Int64]:
        pieces = self.stream.take(self.stream.epoch_documents)
        bins = core.best_fit_decreasing(self.costs(pieces), self.capacity)
        packs = split_by_bin(pieces, bins, int(bins.max()) + 1 if len(bins) else 0)
        # Packs come out longest documents first: hand them out in an order of their own.
        return [packs[i] for i in _shuffle(self.stream, len(packs), 0)]

    def _ready_state(self) -> list[Any]:
        return []  # the epoch gives its packs again: only how many are left is stored

    def _own_state(self) -> dict[str, Any]:
        return {"packs_left": len(self._ready)}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        left = int(state["packs_left"])
        if left == 0:
            return
        # The same epoch gives the same packs; counting its documents again would be wrong.
        self.stream.seek(self._ready_epoch, 0)
        packs = self._advance()
        self._ready = deque(packs[len(packs) - left :])
        self.stream.restore(state["stream"])


def _shuffle(stream: DocumentStream, count: int, salt: int) -> list[int]:
    if stream.seed is None:
        return list(range(count))
    generator = np.random.Generator(np.random.PCG64([stream.seed, stream.epoch, salt, 1]))
    return generator.permutation(count).tolist()


class WindowedBestFit(DocumentPacker):
    """Best-fit-decreasing over a window of documents, into bins carried over between windows.

    Args:
        stream: the documents.
        window: documents to look ahead.
        alignment: see `DocumentPacker`.
    """

    strategy = "windowed_best_fit"

    def __init__(self, stream: DocumentStream, *, window: int = 4096, alignment: int = 1) -> None:
        super().__init__(stream, alignment=alignment)
        self.window = checks.integer("window", window, 1)
        self._open: list[Int64] = []
        self._ages: list[int] = []

    def _advance(self) -> list[Int64]:
        pieces = self.stream.take(self.window)
        costs = self.costs(pieces)
        order = np.argsort(-costs, kind="stable")
        rooms = self.capacity - np.array(
            [self.costs(pack).sum() for pack in self._open], dtype=np.int64
        )
        bins = core.best_fit(costs[order], self.capacity, rooms)
        carried = len(self._open)
        count = max(carried, int(bins.max()) + 1 if len(bins) else 0)
        new = split_by_bin(pieces[order], bins, count)
        packs = [
            np.concatenate([self._open[i], pack]) if i < carried else pack
            for i, pack in enumerate(new)
        ]
        ages = [age + 1 for age in self._ages] + [0] * (count - carried)
        done = [
            self.stream.epoch_ended
            or age >= WINDOWS_OPEN
            or self.capacity - int(self.costs(pack).sum()) < self.alignment
            for pack, age in zip(packs, ages, strict=True)
        ]
        self._open = [pack for pack, out in zip(packs, done, strict=True) if not out]
        self._ages = [age for age, out in zip(ages, done, strict=True) if not out]
        finished = [pack for pack, out in zip(packs, done, strict=True) if out]
        return [finished[i] for i in _shuffle(self.stream, len(finished), self.stream.position)]

    def _has_open(self) -> bool:
        return bool(self._open)

    def _own_state(self) -> dict[str, Any]:
        return {
            "window": self.window,
            "open": [pack.tolist() for pack in self._open],
            "ages": list(self._ages),
        }

    def _load_own_state(self, state: dict[str, Any]) -> None:
        if state["window"] != self.window:
            raise DataError(
                f"packing state: saved with --packing-window {state['window']}, this run has "
                f"{self.window}"
            )
        self._open = [as_pieces(pack) for pack in state["open"]]
        self._ages = [int(age) for age in state["ages"]]


def build_document_packer(
    strategy: str,
    lengths: Any,
    capacity: int,
    *,
    seed: int | None = 0,
    overlong: str = "split",
    lookahead: int = 1,
    alignment: int = 1,
    window: int = 4096,
    micro_batches: int = 8,
    workload_block: int = 8192,
    order: Callable[[int], Int64] | None = None,
) -> DocumentPacker:
    """Make the packer of a `--packing-strategy`.

    Args:
        strategy: one of `STRATEGIES` but "rows", which packs dataset rows, not documents; or
            "alone".
        lengths: integers `[n]`, tokens of each document of the corpus.
        capacity: tokens of a pack.
        seed: of the order; None keeps the corpus order.
        overlong: for documents longer than `capacity`: split, truncate, drop or error.
        lookahead: tokens to hold after a cut: 1, plus one for each multi-token-prediction depth.
        alignment: multiple to which each segment is padded.
        window: documents that windowed_best_fit looks ahead.
        micro_batches: packs that greedy_workload balances against each other.
        workload_block: tokens at which a document's attention costs as much as the rest.
        order: see `DocumentStream`.

    Raises:
        ValueError: for an unknown strategy or a size that can't be.
        DataError: for a corpus without tokens, or an over-long document under "error".
    """
    if strategy == "rows":
        raise ValueError("strategy: 'rows' packs the rows of a dataset and needs no packer")
    if strategy not in (*STRATEGIES, Alone.strategy):
        raise ValueError(f"strategy: {strategy!r} must be one of {', '.join(STRATEGIES)}")
    stream = DocumentStream(
        lengths, capacity, seed=seed, overlong=overlong, lookahead=lookahead, order=order
    )
    match strategy:
        case "alone":
            return Alone(stream, alignment=alignment)
        case "next_fit":
            return NextFit(stream, alignment=alignment)
        case "best_fit_decreasing":
            return BestFitDecreasing(stream, alignment=alignment)
        case "windowed_best_fit":
            return WindowedBestFit(stream, window=window, alignment=alignment)
    return GreedyWorkload(
        stream,
        micro_batches=micro_batches,
        workload_block=workload_block,
        alignment=alignment,
    )
