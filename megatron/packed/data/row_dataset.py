"""Rows of S + 1 raw token ids, cut from indexed corpora by megatron-core's GPTDataset.

Subclassed, never copied: which tokens form row `i` is megatron-core's business. What is added:

- a sample is raw ids plus how many of them are real; no mask is derived from a token's value;
- the cached index is keyed by the corpus's content too, so a corpus that was preprocessed anew
  under its old name can't meet an old index;
- several epochs are in an order that doesn't depend on their number (`epoch_order`);
- an index file cut short by an earlier crash is built again.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import Split

from megatron.packed.accelerator.compat import row_and_documents
from megatron.packed.data.document_weights import open_weights
from megatron.packed.data.epoch_order import Indices, build_indices, cached_indices
from megatron.packed.data.fim import FillInTheMiddle
from megatron.packed.errors import DataError

_INDEX_FILES = ("description.txt", "document_index.npy", "sample_index.npy", "shuffle_index.npy")
_BLEND_FILES = ("description.txt", "dataset_index.npy", "dataset_sample_index.npy")


class RowMixin:
    """What RowDataset and MockRowDataset add to megatron-core's datasets."""

    def __getitem__(self: Any, idx: int) -> dict[str, Any]:
        """One row.

        Args:
            idx: position in this dataset's own shuffled order.

        Returns:
            `text` int64 `[S + 1]`, the last one being the extra label token; `length`, the real
            ids among them (the rest is tail padding); `document_ids` int64 `[documents]`, the
            sequences of the corpus the row is cut from, in order; `document_lengths` int64
            `[documents]`, the real ids of each, the extra label token included;
            `document_offset`, where in the first of them the row begins; `document_sizes` int64
            `[documents]`, ids of each as stored; with `--use-document-weights` also
            `document_weights` float64 `[documents]`.

        Raises:
            DataError: if a token id is outside the tokenizer's vocabulary.
        """
        parts = self._query_document_sample_shuffle_indices(idx)
        text, document_ids = row_and_documents(parts)
        document_lengths = self._document_lengths(idx)
        length = int(document_lengths.sum())
        tokenizer = self.config.tokenizer
        text[length:] = tokenizer.pad
        # Two passes over one row: microseconds, against an index error inside the embedding.
        if length and (text[:length].max() >= tokenizer.vocab_size or text[:length].min() < 0):
            bad = int(numpy.flatnonzero((text < 0) | (text >= tokenizer.vocab_size))[0])
            ends = numpy.cumsum(document_lengths)
            place = int(numpy.searchsorted(ends, bad, side="right"))
            offset = bad - int(ends[place] - document_lengths[place])
            if place == 0:
                offset += int(self.sample_index[self.shuffle_index[idx]][1])
            raise DataError(
                f"token id {int(text[bad])} in document {document_ids[place]} of "
                f"{self.dataset_path} (offset {offset}; row {idx}) is outside the tokenizer's "
                f"[0, {tokenizer.vocab_size}); preprocess the corpus again with this tokenizer"
            )
        sample = {
            "text": text,
            "length": length,
            "document_ids": document_ids,
            "document_lengths": document_lengths,
            "document_offset": int(self.sample_index[self.shuffle_index[idx]][1]),
            "document_sizes": self.dataset.sequence_lengths[document_ids].astype(numpy.int64),
        }
        weights = self._document_weights()
        if weights is not None:
            sample["document_weights"] = numpy.asarray(weights[document_ids], numpy.float64)
        fim = getattr(self.config, "fim", None)
        return self._changed(fim, idx, sample) if fim is not None and length else sample

    def _document_weights(self: Any) -> numpy.ndarray | None:
        if not getattr(self.config, "use_document_weights", False) or self.dataset_path is None:
            return None
        if not hasattr(self, "_mapped_weights"):
            self._mapped_weights = open_weights("the corpus", self.dataset_path)
        return self._mapped_weights

    def _changed(
        self: Any, fim: FillInTheMiddle, idx: int, sample: dict[str, Any]
    ) -> dict[str, Any]:
        """The row after `--fim-data`; offsets and sizes stay those of documents as stored."""
        text, length = sample["text"], sample["length"]
        changed, lengths = fim.row(text[:length], sample["document_lengths"], idx)
        text[: len(changed)] = changed
        text[len(changed) :] = self.config.tokenizer.pad
        kept = {
            name: value[: len(lengths)]
            for name, value in sample.items()
            if name.startswith("document_") and isinstance(value, numpy.ndarray)
        }
        return {**sample, **kept, "length": len(changed), "document_lengths": lengths}

    def _document_lengths(self: Any, idx: int) -> numpy.ndarray:
        # The span that _query_document_sample_shuffle_indices reads, as arithmetic.
        sample = int(self.shuffle_index[idx])
        first, first_offset = (int(value) for value in self.sample_index[sample])
        last, last_offset = (int(value) for value in self.sample_index[sample + 1])
        documents = self.document_index[first : last + 1]
        lengths = self.dataset.sequence_lengths[documents].astype(numpy.int64)
        lengths[-1] = last_offset + 1
        lengths[0] -= first_offset
        return lengths

    def _build_document_sample_shuffle_indices(self: Any) -> tuple[numpy.ndarray, ...]:
        # Called at the end of GPTDataset.__init__, after its cache key was made and before it is
        # used. The index depends on the corpus through the sequence lengths alone.
        lengths = numpy.ascontiguousarray(self.dataset.sequence_lengths)
        self.unique_identifiers["sequences"] = len(lengths)
        self.unique_identifiers["sequence_lengths_crc32"] = zlib.crc32(lengths.data)
        tokens = self._get_num_tokens_per_epoch()
        epochs = self._get_num_epochs(tokens) if tokens else 1
        if epochs > 1:
            self.unique_identifiers["order"] = "epoch by epoch"
        self.unique_description = json.dumps(
            self.unique_identifiers, indent=4, default=lambda obj: obj.unique_identifiers
        )
        self.unique_description_hash = hashlib.md5(
            self.unique_description.encode(), usedforsecurity=False
        ).hexdigest()
        folder = self.config.path_to_cache
        if folder is None and self.dataset_path is not None:
            folder = default_cache_folder(self.dataset_path, type(self).__name__)
        stem = f"{self.unique_description_hash}-{type(self).__name__}-{self.index_split.name}"
        build = super()._build_document_sample_shuffle_indices  # type: ignore[misc]
        if epochs > 1:
            build = partial(self._indices_of_epochs, folder, stem, epochs)
        return _rebuild_if_broken(build, folder, stem, _INDEX_FILES)

    def _indices_of_epochs(self: Any, folder: str | None, stem: str, epochs: int) -> Indices:
        drops = self.config.drop_last_partial_validation_sequence
        build = partial(
            build_indices,
            self.dataset.sequence_lengths,
            self.indices,
            epochs=epochs,
            seq_length=self.config.sequence_length,
            seed=self.config.random_seed,
            drop_last=drops if self.index_split == Split.valid else True,
            extra_token=int(self.config.add_extra_token_to_sequence),
        )
        return cached_indices(folder, stem, self.unique_description, build)


@dataclass
class RowDatasetConfig(GPTDatasetConfig):
    """megatron-core's, and what happens to rows once they are read."""

    fim: FillInTheMiddle | None = None
    use_document_weights: bool = False


class RowDataset(RowMixin, GPTDataset):
    """Rows of a corpus on disk."""


class MockRowDataset(RowMixin, MockGPTDataset):
    """Rows of megatron-core's generated corpus (`--mock-data`)."""


class BlendedRowDataset(BlendedDataset):
    """A weighted blend of row datasets; samples carry `dataset_id` too."""

    config: Any

    def _build_indices(self) -> tuple[numpy.ndarray, numpy.ndarray]:
        if not torch.distributed.is_initialized() and self.config.path_to_cache:
            # The base class asks for a rank before it writes the cache. One process alone has
            # none, and builds this index in memory: it is the cheap one.
            self.config = copy.copy(self.config)
            self.config.path_to_cache = None
        stem = f"{self.unique_description_hash}-{type(self).__name__}-{self.split.name}"
        return _rebuild_if_broken(
            super()._build_indices, self.config.path_to_cache, stem, _BLEND_FILES
        )


def default_cache_folder(dataset_path: str, class_name: str = "RowDataset") -> str:
    """Where megatron-core keeps the index of a corpus when `--data-cache-path` is not given.

    Args:
        dataset_path: prefix of the .bin and .idx files.
        class_name: dataset class.
    """
    return os.path.join(dataset_path, "cache", f"{class_name}_indices")


def _rebuild_if_broken(
    build: Callable[[], Any], folder: str | None, stem: str, suffixes: tuple[str, ...]
) -> Any:
    """Run `build`; if a cached file can't be read, remove the files of `stem` and run it again."""
    try:
        return build()
    except (ValueError, EOFError, pickle.UnpicklingError):
        paths = [os.path.join(folder, f"{stem}-{suffix}") for suffix in suffixes] if folder else []
        paths = [path for path in paths if os.path.isfile(path)]
        may_build = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        if not paths or not may_build:
            raise
        for path in paths:
            os.unlink(path)
        return build()
