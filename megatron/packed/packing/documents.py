"""Whole documents on their way into packs: their order, their pieces, what was cut or lost."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.packed.errors import DataError
from megatron.packed.packing import checks
from megatron.packed.packing.alignment import Alignment
from megatron.packed.packing.plan import PackPlan

Int64 = NDArray[np.int64]

OVERLONG = ("split", "truncate", "drop", "error")
# Columns of a piece array, int64 [k, 4].
DOCUMENT, OFFSET, LENGTH, LOOKAHEAD = range(4)


@dataclass(frozen=True, eq=False)
class DocumentPack:
    """The document pieces of one pack.

    Attributes:
        pieces: int64 `[k, 4]`, rows of (document, offset, length, lookahead).
        epoch: epoch that the pieces belong to.
    """

    pieces: Int64
    epoch: int

    @property
    def documents(self) -> Int64:
        """Document numbers: int64 `[k]`."""
        return self.pieces[:, DOCUMENT]

    @property
    def offsets(self) -> Int64:
        """First token of each piece in its document: int64 `[k]`."""
        return self.pieces[:, OFFSET]

    @property
    def lengths(self) -> Int64:
        """Tokens of each piece: int64 `[k]`."""
        return self.pieces[:, LENGTH]

    @property
    def lookahead(self) -> Int64:
        """Tokens to read after each piece that go on with its document: int64 `[k]`.

        They are targets of its last positions, not inputs.
        """
        return self.pieces[:, LOOKAHEAD]

    def read(self, read_tokens: Callable[[int, int, int], Any]) -> Int64:
        """Read the flat token buffer that `plan()` gathers from.

        Args:
            read_tokens: `(document, offset, length) -> integers [length]`.
        """
        parts = [
            np.asarray(read_tokens(document, offset, length), dtype=np.int64)
            for document, offset, length in zip(
                self.documents.tolist(),
                self.offsets.tolist(),
                (self.lengths + self.lookahead).tolist(),
                strict=True,
            )
        ]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def plan(
        self, pad_id: int, *, alignment: Alignment | int = 1, capacity: int | None = None
    ) -> PackPlan:
        """Plan the pack; arguments as in `PackPlan.from_documents`."""
        return PackPlan.from_documents(
            self.lengths, pad_id, lookahead=self.lookahead, alignment=alignment, capacity=capacity
        )


@dataclass
class PackerCounters:
    """What a packer has done so far.

    Attributes:
        packs: packs handed out.
        documents: documents read from the corpus, empty ones included.
        empty_documents: documents without a token.
        real_tokens: tokens in packs handed out.
        capacity_tokens: capacity of packs handed out.
        split_documents: over-long documents cut in pieces.
        truncated_documents: over-long documents cut short.
        truncated_tokens: tokens lost that way.
        dropped_documents: over-long documents left out.
        dropped_tokens: tokens lost that way.
    """

    packs: int = 0
    documents: int = 0
    empty_documents: int = 0
    real_tokens: int = 0
    capacity_tokens: int = 0
    split_documents: int = 0
    truncated_documents: int = 0
    truncated_tokens: int = 0
    dropped_documents: int = 0
    dropped_tokens: int = 0

    @property
    def fill(self) -> float:
        """Share of the packs' capacity that holds real tokens."""
        return self.real_tokens / self.capacity_tokens if self.capacity_tokens else 0.0

    def summary(self) -> str:
        """One line for the log: fill, and what became of over-long documents."""
        parts = [f"{self.packs} packs", f"{100 * self.fill:.2f}% full"]
        for what in ("split", "truncated", "dropped"):
            count = getattr(self, f"{what}_documents")
            if count:
                lost = getattr(self, f"{what}_tokens", 0)
                parts.append(f"{count} documents {what}" + (f" ({lost} tokens)" if lost else ""))
        return ", ".join(parts)


class DocumentStream:
    """Documents in the order of an epoch, cut to pieces that fit a pack.

    The order is a pure function of (seed, epoch), so (epoch, position) says where the stream is.

    Args:
        lengths: integers `[n]`, tokens of each document.
        capacity: tokens of a pack.
        seed: of the order; None keeps the corpus order.
        overlong: what to do with documents longer than `capacity`.
        lookahead: tokens to hold after a cut piece: 1 for the main loss, and one more for each
            multi-token-prediction depth.
        order: epoch -> document numbers, a pure function; a document may come several times or
            not at all, as in a weighted blend. None is every document once, shuffled by `seed`.

    Raises:
        DataError: for an empty corpus, or an over-long document under "error".
    """

    def __init__(
        self,
        lengths: Any,
        capacity: int,
        *,
        seed: int | None = 0,
        overlong: str = "split",
        lookahead: int = 1,
        order: Callable[[int], Int64] | None = None,
    ) -> None:
        self.lengths = np.ascontiguousarray(checks.integer_array("lengths", lengths, 1))
        self.capacity = checks.integer("capacity", capacity, 1)
        self.lookahead = checks.integer("lookahead", lookahead, 0)
        self.seed = None if seed is None else checks.integer("seed", seed, 0)
        if overlong not in OVERLONG:
            raise ValueError(f"overlong: {overlong!r} must be one of {', '.join(OVERLONG)}")
        self.overlong = overlong
        if len(self.lengths) and self.lengths.min() < 0:
            raise ValueError(f"lengths: must not be negative, got {self.lengths.min()}")
        usable = self.lengths <= self.capacity if overlong == "drop" else self.lengths >= 0
        if not np.any(self.lengths[usable] > 0):
            raise DataError(
                f"lengths: none of {len(self.lengths)} documents has tokens to train on"
                + (
                    f" (longer ones than {capacity} are dropped by --overlong-documents drop)"
                    if overlong == "drop"
                    else ""
                )
            )
        if overlong == "error" and self.lengths.max() > self.capacity:
            worst = int(self.lengths.argmax())
            raise DataError(
                f"document {worst} has {self.lengths[worst]} tokens, more than the "
                f"{self.capacity} of a pack; raise the capacity or use --overlong-documents "
                "split, truncate or drop"
            )
        self.counters = PackerCounters()
        self._epoch_order = order
        self.epoch = 0
        self.position = 0
        self._order = self._order_of(0)

    def _order_of(self, epoch: int) -> Int64:
        if self._epoch_order is not None:
            return self._epoch_order(epoch)
        if self.seed is None:
            return np.arange(len(self.lengths), dtype=np.int64)
        generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
        return generator.permutation(len(self.lengths))

    def seek(self, epoch: int, position: int) -> None:
        """Go to a place in the stream."""
        if epoch != self.epoch:
            self._order = self._order_of(epoch)
        self.epoch, self.position = epoch, position

    @property
    def epoch_ended(self) -> bool:
        """All documents of this epoch were taken."""
        return self.position >= len(self._order)

    @property
    def epoch_documents(self) -> int:
        """Documents of this epoch, taken or not."""
        return len(self._order)

    def next_epoch(self) -> None:
        """Start the next epoch."""
        self.seek(self.epoch + 1, 0)

    def take(self, count: int) -> Int64:
        """Take up to `count` documents of this epoch: pieces, int64 `[k, 4]`."""
        documents = self._order[self.position : self.position + count]
        self.position += len(documents)
        length = self.lengths[documents]
        counters = self.counters
        counters.documents += len(documents)
        counters.empty_documents += int(np.count_nonzero(length == 0))
        over = length > self.capacity
        kept = length
        match self.overlong:
            case "split":
                counters.split_documents += int(over.sum())
            case "truncate":
                kept = np.minimum(length, self.capacity)
                counters.truncated_documents += int(over.sum())
                counters.truncated_tokens += int((length - kept).sum())
            case "drop":
                kept = np.where(over, 0, length)
                counters.dropped_documents += int(over.sum())
                counters.dropped_tokens += int((length - kept).sum())
        number = -(-kept // self.capacity)
        pieces = np.empty((int(number.sum()), 4), dtype=np.int64)
        pieces[:, DOCUMENT] = np.repeat(documents, number)
        inside = np.arange(len(pieces)) - np.repeat(np.cumsum(number) - number, number)
        pieces[:, OFFSET] = inside * self.capacity
        pieces[:, LENGTH] = np.minimum(np.repeat(kept, number) - pieces[:, OFFSET], self.capacity)
        rest = np.repeat(length, number) - pieces[:, OFFSET] - pieces[:, LENGTH]
        pieces[:, LOOKAHEAD] = np.minimum(rest, self.lookahead)
        return pieces

    def fingerprint(self) -> dict[str, Any]:
        """What must not change between saving and loading a position."""
        return {
            "documents": len(self.lengths),
            "tokens": int(self.lengths.sum()),
            "capacity": self.capacity,
            "seed": self.seed,
            "overlong": self.overlong,
            "lookahead": self.lookahead,
            # Last: where a setting differs, that is the message.
            "checksum of lengths and order": self._checksum,
        }

    @cached_property
    def _checksum(self) -> int:
        # Epoch 0 stands for all: the order is one function of the epoch.
        return zlib.crc32(self._order_of(0).tobytes(), zlib.crc32(self.lengths.tobytes()))

    def state(self) -> dict[str, Any]:
        """Position and counters, plain numbers only."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "counters": asdict(self.counters),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a saved position."""
        self.seek(int(state["epoch"]), int(state["position"]))
        self.counters = PackerCounters(**state["counters"])
