"""Whole-document packers: which pieces share a pack.

Every packer hands out packs of at most `capacity` tokens (alignment included), in an order that
depends on the seed and the epoch only. Packs never mix epochs. `state_dict()` is small and made
of plain numbers; a packer that loads it goes on with the same packs.

Sources: best-fit packing of Ding et al. 2024 (Fewer Truncations Improve Language Modeling);
workload-balanced variable-length packing with outlier queues of Wang et al. 2025 (WLB-LLM).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.packed.errors import DataError
from megatron.packed.packing import checks
from megatron.packed.packing.documents import (
    LENGTH,
    DocumentPack,
    DocumentStream,
    PackerCounters,
)
from megatron.packed.packing.native import core

Int64 = NDArray[np.int64]

STRATEGIES = ("rows", "next_fit", "best_fit_decreasing", "windowed_best_fit", "greedy_workload")
# A window's open bins get this many further windows to fill up, then go out as they are.
WINDOWS_OPEN = 4
# Steps that a document may wait in the workload packer before it goes out regardless.
MAX_WAIT_STEPS = 16


def _split_by_bin(pieces: Int64, bins: Int64, count: int) -> list[Int64]:
    """Pieces of each bin 0 .. count - 1, in their given order."""
    order, edges = core.group(bins, count)
    ordered = pieces[order]
    at = edges.tolist()
    return [ordered[a:b] for a, b in zip(at[:-1], at[1:], strict=True)]


class DocumentPacker(ABC):
    """Base of all packers: an endless stream of packs over epochs.

    Args:
        stream: the documents.
        alignment: multiple to which each segment is padded; must divide the capacity.
    """

    strategy = ""

    def __init__(self, stream: DocumentStream, *, alignment: int = 1) -> None:
        self.stream = stream
        self.capacity = stream.capacity
        self.alignment = checks.integer("alignment", alignment, 1)
        if self.capacity % self.alignment:
            raise ValueError(
                f"capacity: {self.capacity} is no multiple of the segment alignment "
                f"{self.alignment}"
            )
        self._ready: deque[Int64] = deque()
        self._ready_epoch = 0

    @property
    def counters(self) -> PackerCounters:
        """What was packed, cut and lost so far."""
        return self.stream.counters

    def costs(self, pieces: Int64) -> Int64:
        """Tokens that pieces take in a pack, padding included."""
        return np.ascontiguousarray(
            pieces[:, LENGTH] + (-pieces[:, LENGTH]) % self.alignment, dtype=np.int64
        )

    def next_pack(self) -> DocumentPack:
        """Hand out the next pack."""
        while not self._ready:
            if self.stream.epoch_ended and not self._has_open():
                self.stream.next_epoch()
            self._ready_epoch = self.stream.epoch
            self._ready.extend(pack for pack in self._advance() if len(pack))
        pieces = self._ready.popleft()
        counters = self.stream.counters
        counters.packs += 1
        counters.real_tokens += sum(pieces[:, LENGTH].tolist())
        counters.capacity_tokens += self.capacity
        return DocumentPack(pieces, self._ready_epoch)

    def epoch_packs(self) -> list[DocumentPack]:
        """All packs up to the end of the current epoch."""
        first = self.next_pack()
        packs = [first]
        while self._ready or self._has_open() or not self.stream.epoch_ended:
            packs.append(self.next_pack())
        return packs

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on, as plain numbers and lists."""
        return {
            "strategy": self.strategy,
            "alignment": self.alignment,
            "fingerprint": self.stream.fingerprint(),
            "stream": self.stream.state(),
            "ready": [pack.tolist() for pack in self._ready],
            "ready_epoch": self._ready_epoch,
            **self._own_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another packer of the same corpus and settings stopped.

        Raises:
            DataError: when the corpus or a setting differs; the stream could not be the same.
        """
        ours = {
            "strategy": self.strategy,
            "alignment": self.alignment,
            **self.stream.fingerprint(),
        }
        theirs = {
            "strategy": state.get("strategy"),
            "alignment": state.get("alignment"),
            **state.get("fingerprint", {}),
        }
        for name, value in ours.items():
            if theirs.get(name) != value:
                raise DataError(
                    f"packing state: saved with {name} = {theirs.get(name)}, this run has "
                    f"{value}; resume with the same corpus and packing settings"
                )
        self.stream.restore(state["stream"])
        self._ready = deque(_as_pieces(pack) for pack in state["ready"])
        self._ready_epoch = int(state["ready_epoch"])
        self._load_own_state(state)

    @abstractmethod
    def _advance(self) -> list[Int64]:
        """Read on and return the packs that became ready; flush everything at an epoch's end."""

    def _has_open(self) -> bool:
        """Pieces of this epoch were read and are not in a ready pack."""
        return False

    def _own_state(self) -> dict[str, Any]:
        return {}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        del state


def _as_pieces(rows: Any) -> Int64:
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


def _bin_of(pieces: Int64, number: int) -> Int64:
    return np.full(len(pieces), number, dtype=np.int64)


class NextFit(DocumentPacker):
    """Documents in stream order; a pack closes when the next one doesn't fit."""

    strategy = "next_fit"
    _documents_per_step = 1024

    def __init__(self, stream: DocumentStream, *, alignment: int = 1) -> None:
        super().__init__(stream, alignment=alignment)
        self._open = _as_pieces([])

    def _advance(self) -> list[Int64]:
        pieces = self.stream.take(self._documents_per_step)
        used = int(self.costs(self._open).sum())
        bins = core.next_fit(self.costs(pieces), self.capacity, used)
        pieces = np.concatenate([self._open, pieces])
        bins = np.concatenate([_bin_of(self._open, 0), bins])
        packs = _split_by_bin(pieces, bins, int(bins[-1]) + 1 if len(bins) else 0)
        self._open = _as_pieces([])
        if packs and not self.stream.epoch_ended:
            self._open = packs.pop()
        return packs

    def _has_open(self) -> bool:
        return len(self._open) > 0

    def _own_state(self) -> dict[str, Any]:
        return {"open": self._open.tolist()}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        self._open = _as_pieces(state["open"])


class BestFitDecreasing(DocumentPacker):
    """A whole epoch at once, longest document first, each into the fullest pack with room."""

    strategy = "best_fit_decreasing"

    def _advance(self) -> list[Int64]:
        pieces = self.stream.take(len(self.stream.lengths))
        bins = core.best_fit_decreasing(self.costs(pieces), self.capacity)
        packs = _split_by_bin(pieces, bins, int(bins.max()) + 1 if len(bins) else 0)
        # Packs come out longest documents first: hand them out in an order of their own.
        return [packs[i] for i in _shuffle(self.stream, len(packs), 0)]

    def state_dict(self) -> dict[str, Any]:
        """As in the base; the epoch's packs are not stored, only how many are left."""
        state = super().state_dict()
        state["ready"] = []
        state["packs_left"] = len(self._ready)
        return state

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

    def __init__(
        self, stream: DocumentStream, *, window: int = 4096, alignment: int = 1
    ) -> None:
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
        new = _split_by_bin(pieces[order], bins, count)
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
        self._open = [_as_pieces(pack) for pack in state["open"]]
        self._ages = [int(age) for age in state["ages"]]


class GreedyWorkload(DocumentPacker):
    """Packs of equal work `d^2 / B + d`, `micro_batches` at a time, under the token capacity.

    Long documents are what unbalances a step, so they wait in queues by length class until each
    micro-batch of a step can get one; nothing waits more than `MAX_WAIT_STEPS` steps.

    Args:
        stream: the documents.
        micro_batches: packs made together and balanced against each other.
        workload_block: B, tokens at which a document's attention costs as much as the rest.
        target_fill: share of the capacity to fill; what is left is room to balance with.
        alignment: see `DocumentPacker`.
    """

    strategy = "greedy_workload"

    def __init__(
        self,
        stream: DocumentStream,
        *,
        micro_batches: int = 8,
        workload_block: int = 8192,
        target_fill: float = 0.95,
        alignment: int = 1,
    ) -> None:
        super().__init__(stream, alignment=alignment)
        self.micro_batches = checks.integer("micro_batches", micro_batches, 1)
        self.workload_block = checks.integer("workload_block", workload_block, 1)
        if not 0 < target_fill <= 1:
            raise ValueError(f"target_fill: must be above 0 and at most 1, got {target_fill}")
        self.target_fill = float(target_fill)
        # Waiting pieces as [k, 5]: a piece and the step at which it came in.
        self._pool = _as_waiting([])
        self._queues = [_as_waiting([]) for _ in self._thresholds()]
        self._step = 0

    def _thresholds(self) -> list[int]:
        """Shortest length of each outlier queue, longest class first."""
        return [self.capacity // 2 + 1, self.capacity // 4 + 1]

    def workloads(self, pieces: Int64) -> Int64:
        """Work of each piece in token equivalents."""
        length = pieces[:, LENGTH]
        return np.ascontiguousarray(length * length // self.workload_block + length)

    def _advance(self) -> list[Int64]:
        self._step += 1
        target = int(self.micro_batches * self.capacity * self.target_fill)
        chosen = self._release()
        budget = target - int(self.costs(chosen).sum())
        while int(self.costs(self._pool).sum()) < budget and not self.stream.epoch_ended:
            self._receive(self.stream.take(64))
        # The longest wait first into the candidates, as many as the budget lets in.
        inside = np.cumsum(self.costs(self._pool)) <= max(budget, 0)
        candidates = np.concatenate([chosen, self._pool[inside]])
        if len(candidates) == 0:
            # A budget below a single document, at an epoch's end: take the first.
            inside[:1] = True
            candidates = self._pool[inside]
        self._pool = self._pool[~inside]
        overdue = self._step - candidates[:, 4] >= MAX_WAIT_STEPS
        order = np.lexsort((-candidates[:, LENGTH], ~overdue))
        candidates = candidates[order]
        bins = core.greedy_workload(
            self.costs(candidates),
            self.workloads(candidates),
            self.capacity,
            np.full(self.micro_batches, self.capacity, dtype=np.int64),
            np.zeros(self.micro_batches, dtype=np.int64),
        )
        left = candidates[bins < 0]
        # Keep arrival order, so that the wait of what was left stays bounded.
        self._pool = np.concatenate([left, self._pool])
        self._pool = self._pool[np.argsort(self._pool[:, 4], kind="stable")]
        placed = bins >= 0
        return _split_by_bin(
            np.ascontiguousarray(candidates[placed, :4]), bins[placed], self.micro_batches
        )

    def _receive(self, pieces: Int64) -> None:
        """Sort new pieces into the queues and the pool."""
        came = np.full((len(pieces), 1), self._step, dtype=np.int64)
        waiting = np.concatenate([pieces, came], axis=1)
        for number, threshold in enumerate(self._thresholds()):
            long = waiting[:, LENGTH] >= threshold
            self._queues[number] = np.concatenate([self._queues[number], waiting[long]])
            waiting = waiting[~long]
        self._pool = np.concatenate([self._pool, waiting])

    def _release(self) -> Int64:
        """Long documents that go out now: one for each micro-batch, or those that waited."""
        released = []
        room = self.micro_batches
        for number, queue in enumerate(self._queues):
            if len(queue) == 0 or room == 0:
                continue
            waited = self._step - int(queue[0, 4]) >= MAX_WAIT_STEPS
            if len(queue) >= self.micro_batches or waited or self.stream.epoch_ended:
                count = min(room, len(queue))
                released.append(queue[:count])
                self._queues[number] = queue[count:]
                room -= count
        return np.concatenate(released) if released else _as_waiting([])

    def _has_open(self) -> bool:
        return len(self._pool) > 0 or any(len(queue) for queue in self._queues)

    def _own_state(self) -> dict[str, Any]:
        return {
            "settings": [self.micro_batches, self.workload_block, self.target_fill],
            "pool": self._pool.tolist(),
            "queues": [queue.tolist() for queue in self._queues],
            "step": self._step,
        }

    def _load_own_state(self, state: dict[str, Any]) -> None:
        ours = [self.micro_batches, self.workload_block, self.target_fill]
        if list(state["settings"]) != ours:
            raise DataError(
                f"packing state: saved with (micro-batches, workload block, fill) = "
                f"{state['settings']}, this run has {ours}"
            )
        self._pool = _as_waiting(state["pool"])
        self._queues = [_as_waiting(queue) for queue in state["queues"]]
        self._step = int(state["step"])


def _as_waiting(rows: Any) -> Int64:
    return np.array(rows, dtype=np.int64).reshape(-1, 5)


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
) -> DocumentPacker:
    """Make the packer of a `--packing-strategy`.

    Args:
        strategy: one of `STRATEGIES` but "rows", which packs dataset rows, not documents.
        lengths: integers `[n]`, tokens of each document of the corpus.
        capacity: tokens of a pack.
        seed: of the order; None keeps the corpus order.
        overlong: for documents longer than `capacity`: split, truncate, drop or error.
        lookahead: tokens to hold after a cut: 1, plus one for each multi-token-prediction depth.
        alignment: multiple to which each segment is padded.
        window: documents that windowed_best_fit looks ahead.
        micro_batches: packs that greedy_workload balances against each other.
        workload_block: tokens at which a document's attention costs as much as the rest.

    Raises:
        ValueError: for an unknown strategy or a size that can't be.
        DataError: for a corpus without tokens, or an over-long document under "error".
    """
    if strategy == "rows":
        raise ValueError("strategy: 'rows' packs the rows of a dataset and needs no packer")
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy: {strategy!r} must be one of {', '.join(STRATEGIES)}")
    stream = DocumentStream(
        lengths, capacity, seed=seed, overlong=overlong, lookahead=lookahead
    )
    match strategy:
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
