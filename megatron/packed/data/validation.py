"""Everything that can be wrong with the data, said before training starts.

Each check ends in one DataError that names the flag or file, the value, the rule and a way out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy

from megatron.packed.data.blends import SPLIT_NAMES, Corpora, read_sequence_counts, split_of
from megatron.packed.data.document_weights import check_weights
from megatron.packed.data.files import require_writable_folder
from megatron.packed.data.index_files import IndexedCorpus, inspect_corpus
from megatron.packed.data.row_dataset import default_cache_folder
from megatron.packed.data.supervised_corpus import check_supervision
from megatron.packed.errors import DataError

if TYPE_CHECKING:
    from megatron.packed.arguments import Config
    from megatron.packed.data.tokenizer_base import PackedTokenizer

SCANNED_TOKENS = 1 << 24
_SCAN_WINDOW = 1 << 16
_DOCUMENT_ENDS = 1024
_FIRST_ROWS = 64


@dataclass(frozen=True)
class SampleCounts:
    """Rows a run asks of each split.

    Attributes:
        train: rows for training.
        valid: rows for all validations, of each set; 0 builds none, None one epoch.
        test: rows for the test; 0 builds none.
    """

    train: int
    valid: int | None
    test: int

    def __iter__(self):
        return iter((self.train, self.valid, self.test))


def validate_data(
    config: Config, corpora: Corpora, tokenizer: PackedTokenizer, counts: SampleCounts
) -> None:
    """Check corpora on disk against the tokenizer and the run.

    Args:
        config: the run; `data`, `packing` and `training` are read.
        corpora: what the data flags name.
        tokenizer: the run's tokenizer.
        counts: rows the run asks of each split.

    Raises:
        DataError: at the first thing that is wrong.
    """
    opened: dict[str, IndexedCorpus] = {}
    counts_path = config.data.per_dataset_sequences_path
    sequence_counts = read_sequence_counts(counts_path) if counts_path is not None else None
    for blend in corpora.blends():
        for prefix in blend.prefixes:
            if prefix in opened:
                continue
            corpus = opened[prefix] = inspect_corpus(blend.flag, prefix)
            if sequence_counts is not None:
                check_sequence_counts(blend.flag, corpus, sequence_counts, str(counts_path))
            check_vocabulary(blend.flag, corpus, tokenizer)
            if config.loss.use_document_weights:
                check_weights(blend.flag, prefix, len(corpus.sequence_lengths))
            if config.sft.sft:
                check_supervision(blend.flag, corpus)
            if config.packing.use_packed_sequence and config.packing.document_boundaries == "eod":
                check_eod_present(blend.flag, corpus, tokenizer.eod, config.data.seq_length)
    check_split_sizes(
        corpora,
        opened,
        counts,
        config.data.seq_length,
        config.training.global_batch_size,
        whole_documents=config.packing.packs_documents or config.sft.sft,
    )
    check_cache_folder(config.data.data_cache_path, list(opened))


def check_vocabulary(flag: str, corpus: IndexedCorpus, tokenizer: PackedTokenizer) -> None:
    """Check that token ids fit the tokenizer: all of them up to 16 Mi tokens, else a sample.

    Args:
        flag: the flag that named the corpus.
        corpus: an inspected corpus.
        tokenizer: the run's tokenizer.

    Raises:
        DataError: if an id is outside `[0, vocab_size)`.
    """
    total = len(corpus.tokens)
    windows = max(1, SCANNED_TOKENS // _SCAN_WINDOW)
    if total <= SCANNED_TOKENS:
        starts, width = numpy.arange(0, total, _SCAN_WINDOW), _SCAN_WINDOW
    else:
        starts, width = numpy.linspace(0, total - _SCAN_WINDOW, windows).astype(int), _SCAN_WINDOW
    for start in starts.tolist():
        window = corpus.tokens[start : start + width]
        if int(window.max()) < tokenizer.vocab_size and int(window.min()) >= 0:
            continue
        place = start + int(numpy.flatnonzero((window < 0) | (window >= tokenizer.vocab_size))[0])
        document, offset = corpus.locate(place)
        raise DataError(
            f"{flag} {corpus.prefix}: token id {int(corpus.tokens[place])} in {corpus.prefix}.bin "
            f"(document {document}, offset {offset}) is outside the tokenizer's vocabulary "
            f"[0, {tokenizer.vocab_size}); use the tokenizer that the corpus was preprocessed with "
            "(--tokenizer-type, --tokenizer-model, --vocab-size), or preprocess it again"
        )


def check_sequence_counts(
    flag: str, corpus: IndexedCorpus, counts: dict[str, tuple[int, int]], path: str
) -> None:
    """Check a corpus against `--per-dataset-sequences-path`.

    Args:
        flag: the flag that named the corpus.
        corpus: an inspected corpus.
        counts: sequences and document boundaries by prefix.
        path: the file they are from.

    Raises:
        DataError: if the corpus isn't there, or is another one.
    """
    found = (len(corpus.sequence_lengths), corpus.document_boundaries)
    expected = counts.get(corpus.prefix)
    if expected == found:
        return
    said = "no counts" if expected is None else f"{expected[0]} sequences, {expected[1]} boundaries"
    raise DataError(
        f"{flag} {corpus.prefix}: has {found[0]} sequences and {found[1]} document boundaries, and "
        f"--per-dataset-sequences-path {path} says {said}; write the file anew, or leave it out"
    )


def check_eod_present(flag: str, corpus: IndexedCorpus, eod: int, seq_length: int) -> None:
    """Check that documents end in EOD, else packing would find one segment a row.

    Args:
        flag: the flag that named the corpus.
        corpus: an inspected corpus.
        eod: the tokenizer's EOD id.
        seq_length: input tokens of a row.

    Raises:
        DataError: if EOD ends none of the first documents and is absent from the first rows.
    """
    real = numpy.flatnonzero(corpus.sequence_lengths[: 16 * _DOCUMENT_ENDS])[:_DOCUMENT_ENDS]
    ends = corpus.sequence_pointers[real] // corpus.tokens.itemsize
    last_tokens = corpus.tokens[ends + corpus.sequence_lengths[real] - 1]
    if (last_tokens == eod).any():
        return
    first = corpus.tokens[: _FIRST_ROWS * (seq_length + 1)]
    if (first == eod).any():
        return
    raise DataError(
        f"--use-packed-sequence needs documents that end in EOD (id {eod}), and {flag} "
        f"{corpus.prefix} has it at the end of none of its first {len(real)} documents and nowhere "
        f"in its first {len(first)} tokens; take the boundaries from the corpus's index with "
        "--document-boundaries index, or run tools/preprocess_data.py with --append-eod and the "
        "tokenizer of this run"
    )


def check_split_sizes(
    corpora: Corpora,
    opened: dict[str, IndexedCorpus],
    counts: SampleCounts,
    seq_length: int,
    global_batch_size: int,
    *,
    whole_documents: bool = False,
) -> None:
    """Check that each split the run asks for has documents, and training one global batch.

    megatron-core never returns when it is asked for samples of a split without tokens.

    Args:
        corpora: what the data flags name.
        opened: inspected corpora by prefix.
        counts: rows the run asks of each split.
        seq_length: input tokens of a row.
        global_batch_size: rows of one step.
        whole_documents: documents are packed whole, epoch after epoch, however small they are.

    Raises:
        DataError: if a split is too small.
    """
    for place, (name, wanted) in enumerate(zip(SPLIT_NAMES, counts, strict=True)):
        blend, bounds = split_of(corpora, None, place)
        if wanted == 0 or blend is None or bounds is None:
            continue
        rows = 0
        for prefix in blend.prefixes:
            lengths = opened[prefix].sequence_lengths
            first, last = (int(round(bound * len(lengths))) for bound in bounds)
            tokens = int(lengths[first:last].sum(dtype=numpy.int64))
            if tokens < (1 if whole_documents else 2):
                raise DataError(
                    f"the {name} split of {blend.flag} {prefix} has {last - first} of its "
                    f"{len(lengths)} documents and {tokens} tokens"
                    + (f" (--split {corpora.split})" if corpora.split else "")
                    + f", and the run asks for {wanted or 'all'} rows of it; give it a larger "
                    "share of --split, a larger corpus, or no part in the run (a share of 0, or "
                    "--eval-iters 0)"
                )
            rows += (tokens - 1) // seq_length
        if name == "train" and not whole_documents and rows < global_batch_size:
            raise DataError(
                f"{blend.flag} {' '.join(blend.prefixes)}: the train split holds {rows} rows of "
                f"--seq-length {seq_length}, fewer than one global batch of {global_batch_size}; "
                "lower --global-batch-size or --seq-length, or give more text"
            )


def check_cache_folder(data_cache_path: str | None, prefixes: list[str]) -> None:
    """Check that index files can be written, or are there already.

    Args:
        data_cache_path: `--data-cache-path`; None keeps them beside each corpus.
        prefixes: corpora.

    Raises:
        DataError: if a folder can be neither written nor read from.
    """
    if data_cache_path is not None:
        folders = {data_cache_path: f"--data-cache-path {data_cache_path}"}
    else:
        folders = {
            default_cache_folder(prefix): f"index files of {prefix} (without --data-cache-path)"
            for prefix in prefixes
        }
    for folder, purpose in folders.items():
        try:
            require_writable_folder(Path(folder), purpose)
        except DataError:
            # A read-only cache that an earlier run filled may do.
            if not any(Path(folder).glob("*-description.txt")):
                raise
