"""What all document packers share: the stream of packs over epochs, and its state.

Every packer hands out packs of at most `capacity` tokens (alignment included), in an order that
depends on the seed and the epoch only. Packs never mix epochs. `state_dict()` is small and made
of plain numbers; a packer that loads it goes on with the same packs.
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


def split_by_bin(pieces: Int64, bins: Int64, count: int) -> list[Int64]:
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

    def _hand_out_ready(self) -> list[DocumentPack]:
        """Hand out all packs that are ready at once: they are counted together."""
        if not self._ready:
            return []
        ready = list(self._ready)
        self._ready.clear()
        counters = self.stream.counters
        counters.packs += len(ready)
        counters.real_tokens += int(np.concatenate(ready)[:, LENGTH].sum())
        counters.capacity_tokens += self.capacity * len(ready)
        epoch = self._ready_epoch
        return [DocumentPack(pieces, epoch) for pieces in ready]

    def epoch_packs(self) -> list[DocumentPack]:
        """All packs up to the end of the current epoch."""
        first = self.next_pack()
        packs = [first, *self._hand_out_ready()]
        while self._ready or self._has_open() or not self.stream.epoch_ended:
            packs.append(self.next_pack())
            packs += self._hand_out_ready()
        return packs

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on, as plain numbers and lists."""
        return {
            "strategy": self.strategy,
            "alignment": self.alignment,
            "fingerprint": self.stream.fingerprint(),
            "stream": self.stream.state(),
            "ready": self._ready_state(),
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
        self._ready = deque(as_pieces(pack) for pack in state["ready"])
        self._ready_epoch = int(state["ready_epoch"])
        self._load_own_state(state)

    @abstractmethod
    def _advance(self) -> list[Int64]:
        """Read on and return the packs that became ready; flush everything at an epoch's end."""

    def _has_open(self) -> bool:
        """Pieces of this epoch were read and are not in a ready pack."""
        return False

    def _ready_state(self) -> list[Any]:
        return [pack.tolist() for pack in self._ready]

    def _own_state(self) -> dict[str, Any]:
        return {}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        del state


def as_pieces(rows: Any) -> Int64:
    """Rows of (document, offset, length, lookahead) as int64 `[k, 4]`."""
    return np.array(rows, dtype=np.int64).reshape(-1, 4)
