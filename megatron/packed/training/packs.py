"""Whole-document packs to micro-batches of this data-parallel rank.

Every rank plans all packs of the run, lengths and numbers only, and reads the tokens of its own.
A pack holds at most `--seq-length` tokens and is what a row is elsewhere: the unit of
`--micro-batch-size`, of `--global-batch-size` and of consumed samples. A micro-batch is its packs
laid end to end. So neither the number of ranks nor the micro-batch size changes which documents a
global batch holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from megatron.packed.arguments import Config
from megatron.packed.context_parallel.context_parallel_helper import (
    AnyHelper,
    ContextParallelHelper,
)
from megatron.packed.data.document_corpus import DocumentCorpus
from megatron.packed.data.loader import BatchIterator, Collate, build_loader
from megatron.packed.errors import DataError
from megatron.packed.packing import (
    Alignment,
    DocumentPack,
    DocumentPacker,
    PackedBatch,
    PackPlan,
    build_document_packer,
)
from megatron.packed.packing.packers import Alone
from megatron.packed.packing.records import SegmentRecords
from megatron.packed.packing.sequence import NumberedPack, PackSequence
from megatron.packed.training.flops import FlopsCounter

# No token has this id: a plan of documents says by position what is padding.
_NO_PAD_ID = -1


@dataclass(frozen=True)
class ReplicaShare:
    """Which packs of a global batch are this rank's.

    Attributes:
        micro_batch_size: packs of one micro-batch on one rank.
        data_parallel_rank: this rank.
        data_parallel_size: data-parallel ranks.
    """

    micro_batch_size: int
    data_parallel_rank: int
    data_parallel_size: int

    @property
    def group_size(self) -> int:
        """Packs that all ranks together take at a time."""
        return self.micro_batch_size * self.data_parallel_size


class PackSampler(Sampler[list[NumberedPack]]):
    """This rank's packs, a micro-batch at a time, as `MicroBatchSampler` shares rows out.

    It runs in the training process and hands the workers packs to read, in order, so that the
    number of workers changes nothing and one state describes the run.

    Args:
        sequence: the packs that all ranks share.
        share: this rank's part of them.
    """

    def __init__(self, sequence: PackSequence, share: ReplicaShare) -> None:
        self.sequence = sequence
        self.share = share

    def __iter__(self) -> Iterator[list[NumberedPack]]:
        size = self.share.micro_batch_size
        begins = self.share.data_parallel_rank * size
        while True:
            group = [next(self.sequence) for _ in range(self.share.group_size)]
            yield group[begins : begins + size]


class WholePackSampler(Sampler[list[NumberedPack]]):
    """This rank's share of given packs, and then of empty ones up to a whole number of batches.

    Args:
        packs: of all ranks.
        batch: packs that are evaluated together.
        share: this rank's part of them.
    """

    def __init__(self, packs: Sequence[DocumentPack], batch: int, share: ReplicaShare) -> None:
        self.packs = packs
        self.total = -(-len(packs) // batch) * batch
        self.share = share

    def __iter__(self) -> Iterator[list[NumberedPack]]:
        size = self.share.micro_batch_size
        empty = DocumentPack(np.empty((0, 4), dtype=np.int64), epoch=0)
        begins = self.share.data_parallel_rank * size
        for first in range(begins, self.total, self.share.group_size):
            numbers = range(first, first + size)
            held = [self.packs[n] if n < len(self.packs) else empty for n in numbers]
            yield [NumberedPack(n, pack) for n, pack in zip(numbers, held, strict=True)]


class PackReader:
    """A dataset whose index is a pack: reads its tokens, in a data-loader worker.

    Args:
        corpus: where the documents are.
        longest: tokens that a longer document is cut to; None where none is cut short.
    """

    def __init__(self, corpus: DocumentCorpus, longest: int | None = None) -> None:
        self.corpus = corpus
        self.longest = longest

    @classmethod
    def of_packer(cls, corpus: DocumentCorpus, packer: DocumentPacker) -> PackReader:
        """The reader of a packer's packs."""
        stream = packer.stream
        return cls(corpus, stream.capacity if stream.overlong == "truncate" else None)

    def __len__(self) -> int:
        return len(self.corpus)

    def __getitem__(self, numbered: NumberedPack) -> dict[str, Any]:
        """`pack`, the `segments` it is made of, and their tokens.

        `text` int64 `[tokens]` has the pieces end to end, each with its lookahead; `supervised`
        int64 `[tokens]` is there where only some tokens are targets, which are 1.
        """
        pack = numbered.pack
        segments = segments_of_pack(pack, self.corpus, self.longest)
        sample = {"pack": pack, "text": pack.read(self.corpus.read), "segments": segments}
        if self.corpus.is_supervised:
            sample["supervised"] = pack.read(self.corpus.read_supervision)
        return sample


class PaddedReader:
    """A dataset whose index is a pack of one piece: reads it as a row, padded to its end.

    Args:
        corpus: where the documents are.
        seq_length: input tokens of a row.
        pad_id: fills the rest.
    """

    def __init__(self, corpus: DocumentCorpus, seq_length: int, pad_id: int) -> None:
        self.corpus = corpus
        self.seq_length = seq_length
        self.pad_id = pad_id

    def __len__(self) -> int:
        return len(self.corpus)

    def __getitem__(self, numbered: NumberedPack) -> dict[str, Any]:
        """What `BshdCollator` takes: `text` and `supervised` int64 `[S + 1]`, and `length`."""
        text = numbered.pack.read(self.corpus.read)
        targets = numbered.pack.read(self.corpus.read_supervision)
        rest = self.seq_length + 1 - len(text)
        return {
            "text": np.pad(text, (0, rest), constant_values=self.pad_id),
            "supervised": np.pad(targets, (0, rest)),
            "length": len(text),
            "index": int(numbered.pack.documents[0]) if len(text) else -1,
        }


def pack_share(
    plan: PackPlan,
    rows: Any,
    helper: AnyHelper | None,
    *,
    mtp_depths: int = 0,
    segments: SegmentRecords | None = None,
    supervised: Any = None,
) -> PackedBatch:
    """The batch of a plan: all of it, or what this context-parallel rank's helper cuts out.

    Args:
        plan: the pack.
        rows: the raw rows it was made from.
        helper: the run's helper of packs; None with one rank and no hooks.
        mtp_depths: multi-token-prediction depths beyond the main loss.
        segments: where the segments of the rows come from.
        supervised: which tokens of the rows are targets; None for all.
    """
    if not segments:
        segments = None  # a pack without a token has one empty segment
    if helper is None:
        return PackedBatch.from_plan(
            plan, rows, mtp_depths=mtp_depths, segments=segments, supervised=supervised
        )
    assert not isinstance(helper, ContextParallelHelper)  # the one for rows
    return helper.pack(plan, rows, mtp_depths=mtp_depths, segments=segments, supervised=supervised)


def segments_of_pack(
    pack: DocumentPack, corpus: DocumentCorpus, longest: int | None
) -> SegmentRecords:
    """Where the pieces of a pack come from.

    Args:
        pack: pieces of the corpus's documents.
        corpus: where they are.
        longest: tokens that a longer document is cut to; None where none is cut short.
    """
    datasets, numbers = corpus.places(pack.documents)
    # All but the last token of a document have a target, the last one of a cut one too.
    targets = np.maximum(corpus.lengths[pack.documents] - 1, 0)
    if longest is not None:
        targets = np.minimum(targets, longest)
    if corpus.is_supervised:
        counts = [corpus.targets_of(document, longest) for document in pack.documents.tolist()]
        targets = np.array(counts, dtype=np.int64)
    weights = corpus.weights_of(pack.documents)
    return SegmentRecords(datasets, numbers, pack.offsets.copy(), targets, weights)


def segments_of_rows(plan: PackPlan, samples: list[dict[str, Any]]) -> SegmentRecords | None:
    """Where the segments of packed rows come from; None where the samples don't say.

    Args:
        plan: the pack of the rows.
        samples: of a `RowDataset`, in the plan's order; `dataset_id` and `document_weights`
            float64 `[documents]` where there are any.
    """
    if not all("document_sizes" in sample for sample in samples):
        return None
    records = SegmentRecords.unknown(plan.num_segments)
    for row, sample in enumerate(samples):
        mine = np.flatnonzero(plan.rows == row)
        ends = np.cumsum(sample["document_lengths"])
        begins = ends - sample["document_lengths"]
        begins[0] -= sample["document_offset"]
        place = np.searchsorted(ends, plan.offsets[mine], side="right")
        place = np.minimum(place, len(ends) - 1)  # an empty segment of a row of padding
        records.datasets[mine] = sample.get("dataset_id", 0)
        records.documents[mine] = sample["document_ids"][place]
        records.offsets[mine] = plan.offsets[mine] - begins[place]
        records.targets[mine] = np.maximum(sample["document_sizes"][place] - 1, 0)
        if "document_weights" in sample:
            records.weights[mine] = sample["document_weights"][place]
    return records


@dataclass(frozen=True)
class DocumentCollator:
    """Lays the packs of a micro-batch end to end; runs in the data-loader workers.

    Attributes:
        alignment: multiples that the parallel layout needs.
        capacity: tokens every micro-batch is padded to; None pads no further than the alignment.
        helper: cuts packs over context-parallel ranks; None with one and no hooks.
        mtp_depths: multi-token-prediction depths beyond the main loss.
    """

    alignment: Alignment
    capacity: int | None
    helper: AnyHelper | None = None
    mtp_depths: int = 0

    def __call__(self, samples: list[dict[str, Any]]) -> PackedBatch:
        """Pack samples of a `PackReader`.

        Raises:
            DataError: when padding every segment takes more than the capacity.
        """
        pieces = DocumentPack(np.concatenate([each["pack"].pieces for each in samples]), epoch=0)
        try:
            plan = PackPlan.from_documents(
                pieces.lengths,
                _NO_PAD_ID,
                lookahead=pieces.lookahead,
                alignment=self.alignment,
                capacity=self.capacity,
            )
        except ValueError as error:
            raise DataError(str(error)) from error
        segments = [each["segments"] for each in samples if "segments" in each]
        supervised = [each["supervised"] for each in samples if "supervised" in each]
        return pack_share(
            plan,
            np.concatenate([each["text"] for each in samples]),
            self.helper,
            mtp_depths=self.mtp_depths,
            segments=SegmentRecords.concatenate(segments),
            supervised=np.concatenate(supervised) if supervised else None,
        )


class PackBatches(Iterator[Any]):
    """Micro-batches of packs or of rows of one document, and the state of those handed out.

    Args:
        batches: collated micro-batches.
        sequence: the packs they are made of.
        share: this rank's part of them.
        consumed: packs that all ranks trained on before.
    """

    def __init__(
        self, batches: BatchIterator, sequence: PackSequence, share: ReplicaShare, consumed: int
    ) -> None:
        self._batches = batches
        self._sequence = sequence
        self._group_size = share.group_size
        self._consumed = consumed

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._consumed += self._group_size
        self._sequence.forget_before(self._consumed)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where all ranks are once they have trained on the batches handed out here."""
        return self._sequence.state_at(self._consumed)

    def summary(self) -> str:
        """What the packer did so far, the packs prepared ahead included."""
        counters = self._sequence.packer.counters
        return f"{counters.summary()}, epoch {self._sequence.packer.stream.epoch}"


def build_packer(config: Config, corpus: DocumentCorpus, vocab_size: int) -> DocumentPacker:
    """The packer that `--packing-strategy` names.

    Packs depend on no parallel size: segments are aligned when a micro-batch is laid out.

    Args:
        config: the run.
        corpus: documents of the split.
        vocab_size: ids of the tokenizer, for the cost of a document.

    Raises:
        DataError: when documents can't be packed as asked.
    """
    packing, capacity = config.packing, config.data.seq_length
    if packing.overlong_documents == "error":
        corpus.refuse_longer_than(capacity)
    flops = FlopsCounter.from_config(config, vocab_size)
    try:
        return build_document_packer(
            packing.packing_strategy if packing.use_packed_sequence else "alone",
            corpus.lengths,
            capacity,
            seed=config.training.seed,
            order=corpus.order(config.training.seed),
            overlong=packing.overlong_documents,
            window=packing.packing_window,
            # A cut piece is read on until its last position has a target at every depth.
            lookahead=1 + config.loss.mtp_depths,
            # Packs of a global batch train together, on whatever ranks.
            micro_batches=config.training.global_batch_size,
            # Attention of a document of d tokens takes per_pair d^2 / 2, all else per_token d.
            workload_block=max(1, 2 * flops.per_token // flops.per_pair),
        )
    except DataError as error:
        raise DataError(f"{corpus.name}: {error}") from error


def describe(packer: DocumentPacker) -> str:
    """One line for the log: what is packed, and how."""
    lengths = packer.stream.lengths
    if packer.strategy == Alone.strategy:
        how = f"each in rows of {packer.capacity:,}"
    else:
        how = f"packed by {packer.strategy} into packs of {packer.capacity:,}"
    return (
        f"{len(lengths):,} documents of {int(lengths.sum()):,} tokens, the longest of "
        f"{int(lengths.max()):,}, {how}"
    )


def build_pack_batches(
    reader: PackReader | PaddedReader,
    sequence: PackSequence,
    collator: Collate,
    share: ReplicaShare,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> PackBatches:
    """Micro-batches of this rank from the sequence's place on.

    Args:
        reader: reads the tokens of packs.
        sequence: the packs that all ranks share.
        collator: lays micro-batches out.
        share: this rank's part.
        num_workers: processes that read and lay out; 0 does it here.
        pin_memory: page-lock batches for copies to a GPU.
    """
    consumed = sequence.number
    sampler = PackSampler(sequence, share)
    batches = build_loader(reader, sampler, collator, num_workers, pin_memory)
    return PackBatches(batches, sequence, share, consumed)
