"""The documents of the highest loss of each log interval: a tool to find bad data."""

from __future__ import annotations

import heapq
import json
import math
import os
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from megatron.core import parallel_state

from megatron.packed.errors import DataError
from megatron.packed.loss.document import reduce_document_sums
from megatron.packed.packing.batch import PackedSeqParamsWithValidTokens
from megatron.packed.packing.records import SegmentRecords


@dataclass(frozen=True)
class DocumentEntry:
    """A piece of a document, as a step trained on it.

    Attributes:
        loss: mean over its supervised tokens, before the step's update.
        tokens: supervised tokens.
        dataset: number of the dataset in the blend; -1 where unknown.
        document: number of the document in the dataset; -1 where unknown.
        position: its first token's place in the document; -1 where unknown.
    """

    loss: float
    tokens: int
    dataset: int
    document: int
    position: int

    @property
    def order(self) -> tuple[float, int, int, int]:
        """Highest loss first, NaN above all; the same on every rank."""
        loss = math.inf if math.isnan(self.loss) else self.loss
        return loss, self.dataset, self.document, self.position


@dataclass(frozen=True)
class _Candidates:
    """The highest of one micro-batch; the tensors are on the device."""

    losses: torch.Tensor
    places: torch.Tensor
    tokens: np.ndarray
    segments: SegmentRecords

    def read(self) -> list[DocumentEntry]:
        """As entries; waits for the device."""
        found = zip(self.losses.tolist(), self.places.tolist(), strict=True)
        records = self.segments
        return [
            DocumentEntry(
                loss=loss,
                tokens=int(self.tokens[place]),
                dataset=int(records.datasets[place]),
                document=int(records.documents[place]),
                position=int(records.offsets[place]),
            )
            for loss, place in found
            if self.tokens[place]
        ]


@dataclass
class DocumentLosses:
    """Keeps the documents of the highest loss since they were last taken.

    Attributes:
        keep: how many.
    """

    keep: int
    _candidates: list[_Candidates] = field(default_factory=list)

    def add(self, sums: torch.Tensor, params: PackedSeqParamsWithValidTokens) -> None:
        """Take in the documents of a micro-batch; collective over context-parallel ranks.

        Nothing here waits for the device.

        Args:
            sums: float64 `[n]`, this rank's loss of each document.
            params: of the pack.
        """
        whole = reduce_document_sums(sums, parallel_state.get_context_parallel_group())
        tokens = params.segment_targets[0]
        count = torch.from_numpy(tokens).to(whole, non_blocking=True)
        means = torch.where(count > 0, whole / count.clamp(min=1), -math.inf)
        losses, places = means.topk(min(self.keep, len(means)))
        self._candidates.append(_Candidates(losses, places, tokens, params.segments))

    def take(self) -> list[DocumentEntry]:
        """The highest of all ranks, highest first; a collective call of the whole job."""
        mine: list[DocumentEntry] = []
        if (
            parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_context_parallel_rank() == 0
        ):
            found = [entry for each in self._candidates for entry in each.read()]
            mine = heapq.nlargest(self.keep, found, key=lambda entry: entry.order)
        self._candidates.clear()
        everyone: list[list[DocumentEntry]] = [mine] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, mine)
        merged = [entry for each in everyone for entry in each]
        return heapq.nlargest(self.keep, merged, key=lambda entry: entry.order)


@dataclass(frozen=True)
class DocumentLossFile:
    """Where the entries of every interval go: one JSON object a line.

    Attributes:
        path: the file; it grows.
        datasets: names of the blended datasets.
    """

    path: str
    datasets: tuple[str, ...]

    def name_of(self, entry: DocumentEntry) -> str | None:
        """Name of the dataset of an entry; None where unknown."""
        known = 0 <= entry.dataset < len(self.datasets)
        return self.datasets[entry.dataset] if known else None

    def check(self) -> None:
        """Look, before training, whether the file can be written.

        Raises:
            DataError: when it can't.
        """
        self._append("")

    def write(self, iteration: int, entries: list[DocumentEntry]) -> str:
        """Append the entries of an interval.

        Args:
            iteration: the interval's last iteration.
            entries: highest first.

        Returns:
            The same as a table in Markdown, for TensorBoard.
        """
        lines = []
        rows = ["| loss | tokens | dataset | document | position |", "|---|---|---|---|---|"]
        for entry in entries:
            name = self.name_of(entry)
            lines.append(json.dumps({"iteration": iteration, **asdict(entry), "dataset": name}))
            rows.append(
                f"| {entry.loss:.6f} | {entry.tokens} | {name} | {entry.document} | "
                f"{entry.position} |"
            )
        self._append("".join(line + "\n" for line in lines))
        return "\n".join(rows)

    def _append(self, text: str) -> None:
        try:
            os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise DataError(
                f"--document-losses-path {self.path}: can't be written ({error.strerror}); choose "
                "another file"
            ) from error
