"""Whole documents: which belong to a split, what is read of them, and their order by weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy
import pytest

from megatron.packed.data.builders import SampleCounts, build_datasets
from megatron.packed.data.document_corpus import CorpusPart, DocumentCorpus, WeightedOrder
from megatron.packed.data.tokenizers import ByteTokenizer
from megatron.packed.errors import DataError

from .helpers import run_config, write_corpus

ALL = SampleCounts(4, 4, 4)


def document_config(**data: object):
    config = run_config(**data)
    config.packing.packs_documents = True
    config.packing.document_boundaries = "index"
    return config


def build(counts: SampleCounts = ALL, **data: object):
    return build_datasets(document_config(**data), ByteTokenizer(), counts)


@pytest.fixture
def numbers(tmp_path: Path) -> str:
    """Documents 0..9 of 1..10 tokens, none with an EOD."""
    return write_corpus(tmp_path / "numbers", [[d] * (d + 1) for d in range(10)])


def test_splits_cut_where_rows_are_cut(numbers: str) -> None:
    train, valid, test = build(data_path=[numbers], split="60,30,10")
    assert [c.lengths.tolist() for c in (train, valid, test)] == [
        [1, 2, 3, 4, 5, 6],
        [7, 8, 9],
        [10],
    ]
    assert valid.read(1, 2, 5).tolist() == [7] * 5
    assert test.read(0, 0, 10).tolist() == [9] * 10
    assert train.order(1) is None  # every document once


def test_splits_that_nobody_asks_for(numbers: str) -> None:
    train, valid, test = build(SampleCounts(4, 0, 4), data_path=[numbers], split="9,1,0")
    assert len(train) == 9 and valid is None and test is None


def test_blends_are_numbered_through(numbers: str, tmp_path: Path) -> None:
    other = write_corpus(tmp_path / "other", [[100] * 3, [101] * 4])
    train, *_ = build(data_path=[numbers, other, numbers], split="1,0,0")
    assert len(train) == 22
    assert train.read(10, 1, 2).tolist() == [100, 100]
    assert train.read(21, 0, 1).tolist() == [9]
    part, local = train.locate(11)
    assert part.name == f"--data-path {other}" and local == 1
    train, valid, test = build(train_data_path=[numbers], valid_data_path=[other])
    assert len(train) == 10 and len(valid) == 2 and test is None


@pytest.mark.parametrize("mmap", [True, False])
def test_without_a_map(numbers: str, mmap: bool) -> None:
    train, *_ = build(data_path=[numbers], split="1,0,0", mmap_bin_files=mmap)
    assert train.read(9, 4, 3).tolist() == [9, 9, 9]


def test_generated_documents() -> None:
    train, valid, test = build(mock_data=True, split="1,1,2")
    assert (len(train), len(valid), len(test)) == (25000, 25000, 50000)
    length = int(valid.lengths[7])
    assert valid.read(7, length - 1, 1).tolist() == [ByteTokenizer().eod]


def test_too_long_documents_are_named(numbers: str, tmp_path: Path) -> None:
    other = write_corpus(tmp_path / "other", [[1] * 3, [2] * 40, [3] * 5])
    train, *_ = build(data_path=[numbers, other], split="1,0,0")
    with pytest.raises(DataError) as raised:
        train.refuse_longer_than(32)
    assert str(raised.value).startswith(
        f"--data-path {other}: document 1 has 40 tokens, more than --seq-length 32"
    )
    train.refuse_longer_than(40)


def test_ids_beyond_the_vocabulary_are_named(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "c", [[1] * 5, [2, 2, 999, 2]])
    low = indexed_dataset(prefix)
    corpus = DocumentCorpus([CorpusPart("--data-path c", low, 0, 2)], None, vocab_size=257)
    assert corpus.read(1, 0, 2).tolist() == [2, 2]
    with pytest.raises(DataError, match=r"token id 999 in document 1 of --data-path c \(offset 2"):
        corpus.read(1, 1, 3)


def indexed_dataset(prefix: str):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return IndexedDataset(prefix)


def test_a_small_corpus_is_enough_and_an_empty_split_is_not(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "tiny", [[1, 2]])
    train, *_ = build(SampleCounts(400, 0, 0), data_path=[prefix], split="1,0,0")
    assert len(train) == 1
    with pytest.raises(DataError, match="the valid split of --data-path .* has 0 of its 1 doc"):
        build(data_path=[prefix], split="9,1,0")


def orders(weights: tuple[float, ...], sizes: tuple[int, ...], tokens: tuple[int, ...], seed=1):
    starts = tuple(numpy.cumsum([0, *sizes]).tolist())
    return WeightedOrder(starts, tokens, weights, seed)


def test_weights_are_shares_of_tokens() -> None:
    """Corpora of 100 and 400 documents of 10 tokens: 3 to 1 is 375 and 125 documents an epoch."""
    order = orders((3.0, 1.0), (100, 400), (1000, 4000))
    for epoch in range(3):
        documents = order(epoch)
        assert len(documents) == 500
        assert numpy.count_nonzero(documents < 100) == 375


def test_no_document_comes_again_before_all_have_come() -> None:
    order = orders((0.5, 0.5), (70, 400), (700, 4000))
    small: Counter[int] = Counter()
    large: Counter[int] = Counter()
    for epoch in range(7):
        documents = order(epoch).tolist()
        small.update(d for d in documents if d < 70)
        large.update(d for d in documents if d >= 70)
        for counts, size in ((small, 70), (large, 400)):
            often = [counts[d] for d in counts]
            assert max(often) - (min(often) if len(counts) == size else 0) <= 1


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    order = orders((2.0, 1.0), (30, 50), (300, 500))
    epochs = [order(epoch).tolist() for epoch in range(3)]
    assert epochs == [order(epoch).tolist() for epoch in (0, 1, 2)]
    assert epochs[0] != epochs[1]
    assert orders((2.0, 1.0), (30, 50), (300, 500), seed=2)(0).tolist() != epochs[0]
