"""The packer that balances compute instead of filling packs to the brim."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.packed.errors import DataError
from megatron.packed.packing import checks
from megatron.packed.packing.documents import LENGTH, DocumentStream
from megatron.packed.packing.native import core
from megatron.packed.packing.packer_base import DocumentPacker, split_by_bin

Int64 = NDArray[np.int64]

# Steps that a document may wait before it goes out regardless.
MAX_WAIT_STEPS = 16


class GreedyWorkload(DocumentPacker):
    """Packs of equal work `d^2 / B + d`, `micro_batches` at a time, under the token capacity.

    Long documents are what unbalances a step, so they wait in queues by length class until each
    micro-batch of a step can get one; nothing waits more than `MAX_WAIT_STEPS` steps.

    Source: variable-length packing with outlier queues of Wang et al. 2025 (WLB-LLM).

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
        return split_by_bin(
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
