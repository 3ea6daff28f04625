"""Whole documents of the corpora of a split, numbered through: lengths, tokens, order of epochs.

A document is what megatron-core's GPTDataset calls one: a sequence of the `.idx` file, which holds
one for each text that tools/preprocess_data.py read. Splits cut a corpus at the same documents as
they do for rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy
from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron.packed.data.blends import Corpora, split_of
from megatron.packed.data.document_weights import open_weights
from megatron.packed.data.fim import FillInTheMiddle, build_fim
from megatron.packed.data.supervised_corpus import SUFFIX
from megatron.packed.errors import DataError

if TYPE_CHECKING:
    from megatron.packed.arguments import Config
    from megatron.packed.data.tokenizer_base import PackedTokenizer

Int64 = numpy.ndarray
EpochOrder = Callable[[int], Int64]
# Seed sequences ignore trailing zeros: every use of a seed ends in a tag of its own.
_OF_EPOCHS, _OF_CORPORA = 2, 3


class TokenStore(Protocol):
    """Documents on disk, or generated ones."""

    sequence_lengths: numpy.ndarray

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> numpy.ndarray:
        """Tokens of a document, or of a part of it."""


@dataclass(frozen=True)
class CorpusPart:
    """The documents of one corpus that belong to a split.

    Attributes:
        name: flag and prefix, for messages.
        store: where their tokens are.
        first: first document of the split.
        last: one past its last document.
        supervision: a 0 or 1 for each token; None where all are supervised.
        document_weights: `[documents of the file]`; None where all weigh 1.
    """

    name: str
    store: TokenStore
    first: int
    last: int
    supervision: TokenStore | None = None
    document_weights: numpy.ndarray | None = None

    @classmethod
    def of_split(
        cls,
        name: str,
        store: TokenStore,
        bounds: tuple[float, float],
        supervision: TokenStore | None = None,
        document_weights: numpy.ndarray | None = None,
    ) -> CorpusPart:
        """The share of a corpus between two fractions, rounded as megatron-core does."""
        first, last = (int(round(edge * len(store.sequence_lengths))) for edge in bounds)
        return cls(name, store, first, last, supervision, document_weights)


class DocumentCorpus:
    """The documents of a split, numbered from 0 over all its corpora.

    Args:
        parts: corpora in the blend's order.
        weights: shares of tokens to draw from each; None draws every document once an epoch.
        vocab_size: ids that the tokenizer has.
        fim: changes documents as they are read (`--fim-data`).
    """

    def __init__(
        self,
        parts: Sequence[CorpusPart],
        weights: Sequence[float] | None,
        vocab_size: int,
        fim: FillInTheMiddle | None = None,
    ) -> None:
        self.parts = list(parts)
        self.weights = weights
        self.vocab_size = vocab_size
        self.lengths = numpy.concatenate(
            [
                numpy.asarray(part.store.sequence_lengths[part.first : part.last], numpy.int64)
                for part in parts
            ]
        )
        sizes = [part.last - part.first for part in parts]
        self._starts = [0, *numpy.cumsum(sizes).tolist()]
        self._fim: FillInTheMiddle | None = None
        if fim is not None:
            self._begin_changing(fim)

    def _begin_changing(self, fim: FillInTheMiddle) -> None:
        chosen = fim.chosen(self.lengths)
        if fim.reads_content:
            lengths = self.lengths.copy()
            for document in numpy.flatnonzero(chosen).tolist():
                lengths[document] = len(fim.document(self._whole(document), document))
        else:
            lengths = self.lengths + 3 * chosen
        self.lengths, self._chosen, self._fim = lengths, chosen, fim

    def _whole(self, document: int) -> numpy.ndarray:
        part, local = self.locate(document)
        return self._checked(part, local, 0, part.store.get(local)).astype(numpy.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def name(self) -> str:
        """The corpora, for messages."""
        return ", ".join(part.name for part in self.parts)

    def locate(self, document: int) -> tuple[CorpusPart, int]:
        """The corpus of a document, and its number in that corpus's file."""
        place = bisect_right(self._starts, document) - 1
        part = self.parts[place]
        return part, document - self._starts[place] + part.first

    def places(self, documents: Int64) -> tuple[Int64, Int64]:
        """The corpus of each document, and its number in that corpus's file.

        Args:
            documents: int64 `[n]`.

        Returns:
            Two int64 `[n]`: numbers in `parts`, and of documents.
        """
        starts = numpy.array(self._starts, dtype=numpy.int64)
        place = numpy.searchsorted(starts[1:], documents, side="right")
        first = numpy.array([part.first for part in self.parts], dtype=numpy.int64)
        return place, documents - starts[place] + first[place]

    def weights_of(self, documents: Int64) -> numpy.ndarray:
        """Weights of documents in the objective: float64 `[n]`.

        Args:
            documents: int64 `[n]`.
        """
        weights = numpy.ones(len(documents))
        places, numbers = self.places(documents)
        for place, part in enumerate(self.parts):
            if part.document_weights is not None:
                mine = places == place
                weights[mine] = part.document_weights[numbers[mine]]
        return weights

    def read(self, document: int, offset: int, length: int) -> numpy.ndarray:
        """Read tokens of a document.

        Args:
            document: its number.
            offset: first token.
            length: tokens.

        Raises:
            DataError: if a token id is outside the tokenizer's vocabulary.
        """
        if self._fim is not None and self._chosen[document]:
            changed = self._fim.document(self._whole(document), document)
            return changed[offset : offset + length]
        part, local = self.locate(document)
        tokens = part.store.get(local, offset=offset, length=length)
        return self._checked(part, local, offset, tokens)

    def _checked(
        self, part: CorpusPart, local: int, offset: int, tokens: numpy.ndarray
    ) -> numpy.ndarray:
        if len(tokens) and (tokens.max() >= self.vocab_size or tokens.min() < 0):
            bad = int(numpy.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))[0])
            raise DataError(
                f"token id {int(tokens[bad])} in document {local} of {part.name} (offset "
                f"{offset + bad}) is outside the tokenizer's [0, {self.vocab_size}); preprocess "
                "the corpus again with this tokenizer"
            )
        return tokens

    @property
    def is_supervised(self) -> bool:
        """Whether some tokens are no targets."""
        return any(part.supervision is not None for part in self.parts)

    def read_supervision(self, document: int, offset: int, length: int) -> numpy.ndarray:
        """Read which tokens of a document are supervised: uint8, 0 or 1; see `read`."""
        part, local = self.locate(document)
        if part.supervision is None:
            return numpy.ones(length, dtype=numpy.uint8)
        return part.supervision.get(local, offset=offset, length=length)

    def targets_of(self, document: int, longest: int | None) -> int:
        """Positions of a document that have a supervised target.

        Args:
            document: its number.
            longest: input tokens that it is cut to; None where it is whole.
        """
        length = int(self.lengths[document]) - 1
        length = max(0, length if longest is None else min(length, longest))
        return int(numpy.count_nonzero(self.read_supervision(document, 1, length)))

    def refuse_longer_than(self, capacity: int) -> None:
        """Refuse documents that don't fit in a pack (`--overlong-documents error`).

        Raises:
            DataError: naming the longest document.
        """
        longest = int(self.lengths.argmax())
        if self.lengths[longest] > capacity:
            part, local = self.locate(longest)
            raise DataError(
                f"{part.name}: document {local} has {self.lengths[longest]} tokens, more than "
                f"--seq-length {capacity}, and --overlong-documents is error; raise --seq-length "
                "or use --overlong-documents split, truncate or drop"
            )

    def order(self, seed: int) -> EpochOrder | None:
        """Documents of an epoch by weights; None without weights: every document once."""
        if self.weights is None or len(self.parts) == 1:
            return None
        edges = zip(self._starts[:-1], self._starts[1:], strict=True)
        tokens = [int(self.lengths[first:last].sum()) for first, last in edges]
        return WeightedOrder(tuple(self._starts), tuple(tokens), tuple(self.weights), seed)


@dataclass(frozen=True)
class WeightedOrder:
    """Which documents an epoch of a weighted blend holds: a pure function of (seed, epoch).

    An epoch has as many tokens as the corpora have together, shared out by weight. A corpus whose
    share exceeds it is gone over several times, one whose share falls short of it goes on in the
    next epoch where it stopped: no document comes again before all of its corpus have come.

    Attributes:
        starts: first document of each corpus, and one past the last.
        tokens: tokens of each corpus.
        weights: relative shares of tokens.
        seed: of all shuffles.
    """

    starts: tuple[int, ...]
    tokens: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int

    def __call__(self, epoch: int) -> Int64:
        """Document numbers in order: int64 `[documents of the epoch]`."""
        chosen = [self._from_corpus(place, epoch) for place in range(len(self.weights))]
        documents = numpy.concatenate(chosen)
        self._generator(epoch, 0, _OF_EPOCHS).shuffle(documents)
        return documents

    def _from_corpus(self, place: int, epoch: int) -> Int64:
        share = self.weights[place] / sum(self.weights)
        passes = share * sum(self.tokens) / self.tokens[place]
        count = self.starts[place + 1] - self.starts[place]
        begin, end = (int(number * passes * count) for number in (epoch, epoch + 1))
        pieces = [numpy.empty(0, dtype=numpy.int64)]
        while begin < end:
            corpus_epoch, offset = divmod(begin, count)
            order = self._generator(corpus_epoch, place, _OF_CORPORA).permutation(count)
            taken = order[offset : offset + end - begin]
            pieces.append(taken + self.starts[place])
            begin += len(taken)
        return numpy.concatenate(pieces)

    def _generator(self, *numbers: int) -> numpy.random.Generator:
        return numpy.random.Generator(numpy.random.PCG64([self.seed, *numbers]))


def build_document_corpora(
    config: Config,
    corpora: Corpora | None,
    tokenizer: PackedTokenizer,
    wanted: Sequence[int | None],
) -> list[DocumentCorpus | None]:
    """The documents of training, validation and test.

    Args:
        config: the run; `data` is read.
        corpora: what the data flags name, checked; None generates documents.
        tokenizer: the run's tokenizer.
        wanted: packs that the run asks of each split, None for an epoch; one with 0 isn't built.

    Returns:
        One for each split, None where it has no share or nothing is asked of it.
    """
    opened: dict[str, TokenStore] = {}
    fim = build_fim(config, tokenizer)
    weighted = config.loss.use_document_weights
    suffix = SUFFIX if config.sft.sft else None

    def open_store(prefix: str) -> TokenStore:
        if prefix not in opened:
            opened[prefix] = IndexedDataset(prefix, mmap=config.data.mmap_bin_files)
        return opened[prefix]

    result: list[DocumentCorpus | None] = []
    for place, packs in enumerate(wanted):
        blend, bounds = split_of(corpora, config.data.split, place)
        if packs == 0 or bounds is None or (corpora is not None and blend is None):
            result.append(None)
            continue
        if blend is None:
            generated = MockGPTLowLevelDataset(tokenizer)
            parts = [CorpusPart.of_split("--mock-data", generated, bounds)]
        else:
            parts = [
                CorpusPart.of_split(
                    f"{blend.flag} {name}",
                    open_store(name),
                    bounds,
                    open_store(name + suffix) if suffix else None,
                    open_weights(blend.flag, name) if weighted else None,
                )
                for name in blend.prefixes
            ]
        weights = blend.weights if blend is not None else None
        result.append(DocumentCorpus(parts, weights, tokenizer.vocab_size, fim))
    return result
