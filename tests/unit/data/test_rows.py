from __future__ import annotations

import os
import re
from pathlib import Path

import numpy
import pytest
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split

from megatron.packed.data import row_dataset
from megatron.packed.data.builders import SampleCounts, build_datasets
from megatron.packed.data.row_dataset import RowDataset
from megatron.packed.data.tokenizers import ByteTokenizer, NullTokenizer
from megatron.packed.errors import ConfigurationError, DataError

from .helpers import numbered_documents, run_config, write_corpus

S = 32
TRAIN_ONLY = SampleCounts(40, 0, 0)


def core_config(**changes: object) -> GPTDatasetConfig:
    return GPTDatasetConfig(
        **{
            "random_seed": 1234,
            "sequence_length": S,
            "blend": (["x"], None),
            "split": "100,0,0",
            "tokenizer": ByteTokenizer(),
            "reset_position_ids": False,
            "reset_attention_mask": False,
            "eod_mask_loss": False,
            "create_attention_mask": False,
            **changes,
        }
    )


def row_dataset_of(prefix: str, cls: type = RowDataset, samples: int | None = None, **changes):
    low_level = IndexedDataset(prefix)
    indices = numpy.arange(len(low_level), dtype=numpy.int32)
    split = changes.pop("index_split", Split.train)
    return cls(low_level, prefix, indices, samples, split, core_config(**changes))


def test_more_epochs_leave_the_order_of_the_first_alone(corpus: str):
    one = row_dataset_of(corpus, GPTDataset)
    sizes = (len(one) + 1, 500, 900)
    runs = [row_dataset_of(corpus, samples=samples) for samples in sizes]
    rows = [[run[i]["text"].tolist() for i in range(len(run))] for run in runs]
    for shorter, longer in zip(rows[:-1], rows[1:], strict=True):
        assert longer[: len(shorter)] == shorter
    core = [one[i] for i in range(len(one))]
    assert [row[:-1] for row in rows[0][: len(one)]] == [r["tokens"].tolist() for r in core]
    # Every epoch has every document once, and every row is there once.
    last = runs[-1]
    epochs = last.document_index.reshape(-1, 200)
    assert (numpy.sort(epochs, axis=1) == numpy.arange(200)).all()
    assert not (epochs[0] == epochs[1]).all()
    assert sorted(last.shuffle_index.tolist()) == list(range(len(last)))
    assert len(last) == len(row_dataset_of(corpus, GPTDataset, samples=900))
    tokens = [t for d in last.document_index for t in numbered_documents(200)[d]]
    for place in range(0, len(last), 7):
        start = int(last.shuffle_index[place]) * S
        assert rows[-1][place] == tokens[start : start + S + 1]


@pytest.mark.parametrize("weights", [True, False])
def test_longer_runs_begin_with_the_same_rows(weights: bool, tmp_path: Path):
    names = [write_corpus(tmp_path / n, numbered_documents(60, seed=i)) for i, n in enumerate("ab")]
    path = ["0.3", names[0], "0.7", names[1]] if weights else names[:1]
    config = run_config(data_path=path, split="1,0,0", data_cache_path=str(tmp_path / "cache"))

    def rows(count: int) -> list[list[int]]:
        train = build_datasets(config, ByteTokenizer(), SampleCounts(count, 0, 0)).train
        return [train[i]["text"].tolist() for i in range(count)]

    assert rows(700)[:300] == rows(300) and rows(300)[:20] == rows(20)
    assert rows(700)[:300] == rows(300)  # from the cache, too


@pytest.mark.parametrize("samples", [None, 120])
def test_rows_are_gpt_datasets_rows(corpus: str, samples: int | None):
    ours = row_dataset_of(corpus, samples=samples)
    core = row_dataset_of(corpus, GPTDataset, samples=samples)
    assert len(ours) == len(core) >= (samples or 100)
    for i in range(len(ours)):
        row, reference = ours[i], core[i]
        assert row["text"].dtype == numpy.int64 and row["text"].shape == (S + 1,)
        assert row["length"] == S + 1
        numpy.testing.assert_array_equal(row["text"][:-1], reference["tokens"].numpy())
        numpy.testing.assert_array_equal(row["text"][1:], reference["labels"].numpy())


def test_document_ids_name_where_a_row_comes_from(corpus: str):
    rows, documents = row_dataset_of(corpus), IndexedDataset(corpus)
    for i in (0, 7, len(rows) - 1):
        row = rows[i]
        joined = numpy.concatenate([documents[int(d)] for d in row["document_ids"]])
        text = row["text"].tobytes()
        assert text in joined.astype(numpy.int64).tobytes()


@pytest.mark.parametrize("documents", [[[5] * 20 + [256]], [[5] * 40 + [256]], [[5] * 30, [6] * 9]])
def test_length_of_a_partial_row(tmp_path: Path, documents: list[list[int]]):
    prefix = write_corpus(tmp_path / "short", documents)
    rows = row_dataset_of(
        prefix, index_split=Split.valid, drop_last_partial_validation_sequence=False
    )
    total = sum(map(len, documents))
    by_length = sorted((rows[i] for i in range(len(rows))), key=lambda row: -row["length"])
    # Consecutive rows share one token: the label of one is the first input of the next.
    assert sum(row["length"] for row in by_length) == total + len(rows) - 1
    last = by_length[-1]
    assert last["length"] == total - S * (len(rows) - 1)
    assert (last["text"][last["length"] :] == ByteTokenizer().pad).all()


def test_real_ids_that_equal_pad_count_as_real(tmp_path: Path):
    prefix = write_corpus(tmp_path / "pads", [[3, 257, 257, 4, 257]])
    rows = row_dataset_of(
        prefix, index_split=Split.valid, drop_last_partial_validation_sequence=False
    )
    assert rows[0]["length"] == 5


@pytest.mark.parametrize("cached", [False, True])
def test_build_splits(corpus: str, tmp_path: Path, cached: bool):
    config = run_config(
        data_path=[corpus],
        split="80,15,5",
        data_cache_path=str(tmp_path / "cache") if cached else None,
    )
    train, valid, test = build_datasets(config, ByteTokenizer(), SampleCounts(200, 20, 4))
    assert len(train) >= 200 and len(valid) >= 20 and len(test) >= 4
    seen = [
        {int(d) for i in range(len(rows)) for d in rows[i]["document_ids"]}
        for rows in (train, valid, test)
    ]
    assert seen[0] <= set(range(160)) and seen[1] <= set(range(160, 190))
    assert seen[2] <= set(range(190, 200))
    assert (tmp_path / "cache").exists() == cached


def test_unwanted_splits_are_left_out(corpus: str):
    config = run_config(data_path=[corpus])  # 969,30,1: the test split is empty
    train, valid, test = build_datasets(config, ByteTokenizer(), SampleCounts(8, 2, 0))
    assert train is not None and valid is not None and test is None


@pytest.mark.parametrize("cached", [False, True])
def test_blend_follows_weights(tmp_path: Path, cached: bool):
    low = write_corpus(tmp_path / "low", [[1] * 30 + [256]] * 30)
    high = write_corpus(tmp_path / "high", [[2] * 30 + [256]] * 30)
    config = run_config(
        data_path=["0.25", low, "0.75", high],
        split="1,0,0",
        data_cache_path=str(tmp_path / "cache") if cached else None,
    )
    train, _, _ = build_datasets(config, ByteTokenizer(), SampleCounts(400, 0, 0))
    ids = numpy.array([train[i]["dataset_id"] for i in range(400)])
    assert abs((ids == 0).mean() - 0.25) < 0.01
    assert all(1 in train[i]["text"] for i in numpy.flatnonzero(ids == 0)[:5])


def test_blend_without_weights_is_gone_over_once(tmp_path: Path):
    prefixes = [
        write_corpus(tmp_path / name, numbered_documents(40, seed=seed))
        for seed, name in enumerate("abc")
    ]
    config = run_config(data_path=prefixes, split="1,0,0")
    train, _, _ = build_datasets(config, ByteTokenizer(), SampleCounts(60, 0, 0))
    assert {train[i]["dataset_id"] for i in range(len(train))} == {0, 1, 2}
    with pytest.raises(DataError, match="gone over once, which gives .* and the run asks for 4000"):
        build_datasets(config, ByteTokenizer(), SampleCounts(4000, 0, 0))
    config.data.dataloader_type = "cyclic"
    assert build_datasets(config, ByteTokenizer(), SampleCounts(4000, 0, 0)).train is not None


def test_per_split_paths(tmp_path: Path):
    low = write_corpus(tmp_path / "low", [[1] * 30 + [256]] * 30)
    high = write_corpus(tmp_path / "high", [[2] * 30 + [256]] * 30)
    config = run_config(train_data_path=[low], valid_data_path=["1", low, "1", high])
    train, valid, test = build_datasets(config, ByteTokenizer(), SampleCounts(40, 40, 40))
    assert test is None
    assert all(2 not in train[i]["text"] for i in range(40))
    assert any(2 in valid[i]["text"] for i in range(40))
    assert build_datasets(config, ByteTokenizer(), TRAIN_ONLY).valid is None


def test_mock_data():
    config = run_config(mock_data=True)
    train, valid, test = build_datasets(config, NullTokenizer(100), SampleCounts(20, 4, 4))
    for rows in (train, valid, test):
        row = rows[3]
        assert row["text"].shape == (S + 1,) and row["length"] == S + 1
        assert row["text"].max() <= 100


def test_same_seed_same_rows_other_seed_other_rows(corpus: str):
    def first(seed: int) -> list[int]:
        config = run_config(data_path=[corpus], split="1,0,0")
        config.training.seed = seed
        return build_datasets(config, ByteTokenizer(), TRAIN_ONLY).train[0]["text"].tolist()

    assert first(1) == first(1) != first(2)


def test_a_corpus_made_anew_does_not_meet_the_old_index(tmp_path: Path):
    prefix = write_corpus(tmp_path / "c", numbered_documents(300))
    config = run_config(data_path=[prefix], split="1,0,0", data_cache_path=str(tmp_path / "cache"))
    build_datasets(config, ByteTokenizer(), TRAIN_ONLY)
    write_corpus(prefix, numbered_documents(20, seed=1))
    again = build_datasets(config, ByteTokenizer(), TRAIN_ONLY).train
    assert max(int(again[i]["document_ids"].max()) for i in range(40)) < 20


@pytest.mark.parametrize("blend", [False, True])
def test_a_broken_index_is_built_again(corpus: str, tmp_path: Path, blend: bool, monkeypatch):
    cache = tmp_path / "cache"
    config = run_config(
        data_path=["1", corpus, "2", corpus] if blend else [corpus],
        split="1,0,0",
        data_cache_path=str(cache),
    )
    if blend:  # only a process group lets megatron-core cache the index of a blend
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
        monkeypatch.setattr(row_dataset.torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    rows = build_datasets(config, ByteTokenizer(), TRAIN_ONLY).train
    expected = [rows[i]["text"].tolist() for i in range(40)]
    del rows
    files = list(cache.glob("*.npy"))
    assert any("dataset_index" in path.name for path in files) == blend
    for path in files:
        os.truncate(path, path.stat().st_size // 2)
    rows = build_datasets(config, ByteTokenizer(), TRAIN_ONLY).train
    assert [rows[i]["text"].tolist() for i in range(40)] == expected


def test_an_id_beyond_the_vocabulary_is_named_when_read(corpus: str):
    rows = row_dataset_of(corpus, tokenizer=NullTokenizer(100))
    documents = numbered_documents(200)
    said = r"token id (\d+) in document (\d+) of .*corpus_text_document \(offset (\d+); row"
    for index in range(20):
        with pytest.raises(DataError, match=said) as raised:
            rows[index]
        token, document, offset = map(int, re.search(said, str(raised.value)).groups())
        assert documents[document][offset] == token >= 101


def test_flags_that_exclude_each_other(corpus: str):
    for data, message in (
        ({"data_path": [corpus], "mock_data": True}, "--mock-data generates its corpus"),
        ({"data_path": [corpus], "train_data_path": [corpus]}, "--data-path excludes"),
        ({}, "no training corpus"),
        ({"valid_data_path": [corpus]}, "no training corpus"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            build_datasets(run_config(**data), ByteTokenizer(), TRAIN_ONLY)


def _build_on_rank(rank: int, folder: Path, prefixes: list[str]) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    for data_path in (prefixes[:1], ["0.3", prefixes[0], "0.7", prefixes[1]]):
        config = run_config(
            data_path=data_path, split="90,10,0", data_cache_path=str(folder / "cache")
        )
        built = build_datasets(config, ByteTokenizer(), SampleCounts(40, 8, 0))
        rows = [rows[i]["text"] for rows in (built.train, built.valid) for i in range(8)]
        numpy.save(folder / f"rows_{len(data_path)}_{rank}.npy", numpy.stack(rows))
    torch.distributed.destroy_process_group()


def test_two_ranks_read_the_same_rows(tmp_path: Path):
    prefixes = [
        write_corpus(tmp_path / name, numbered_documents(200, seed=seed))
        for seed, name in enumerate("ab")
    ]
    context = torch.multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_build_on_rank, args=(rank, tmp_path, prefixes)) for rank in (0, 1)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    for words in (1, 4):
        first, second = (numpy.load(tmp_path / f"rows_{words}_{rank}.npy") for rank in (0, 1))
        numpy.testing.assert_array_equal(first, second)
