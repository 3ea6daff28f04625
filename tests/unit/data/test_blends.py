"""Files that name corpora instead of the command line, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.packed.data.blends import Blend, read_sequence_counts, resolve_corpora
from megatron.packed.data.builders import SampleCounts, build_datasets
from megatron.packed.data.tokenizers import ByteTokenizer
from megatron.packed.errors import ConfigurationError, DataError

from .helpers import numbered_documents, run_config, write_corpus


def resolve(**data: object):
    return resolve_corpora(run_config(**data).data)


def write(path: Path, content: object) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_a_file_is_the_flag_it_stands_for(tmp_path: Path):
    path = write(tmp_path / "blend.txt", "0.3 a\n0.7\tb\n")
    blend = resolve(data_args_path=path, split="9,1,0").blend
    flagged = resolve(data_path=["0.3", "a", "0.7", "b"], split="9,1,0").blend
    assert (blend.prefixes, blend.weights) == (flagged.prefixes, flagged.weights)
    assert blend.flag == f"--data-args-path {path}:"

    splits = {"train": ["1", "a", 2, "b"], "valid": ["c", "d"], "test": None}
    path = write(tmp_path / "splits.json", splits)
    train, valid, test = resolve(per_split_data_args_path=path).per_split
    assert train == Blend(train.flag, ("a", "b"), (1.0, 2.0))
    assert valid.prefixes == ("c", "d") and valid.weights is None and test is None


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "is no JSON"),
        ([], "must be a JSON object with keys train, valid and test"),
        ({"train": ["a"], "validation": ["b"]}, "must be a JSON object with keys train"),
        ({}, "names no training corpus"),
        ({"train": []}, "names no training corpus"),
        ({"train": "a"}, '"train" must be a list of prefixes'),
        ({"train": ["a"], "valid": [["b"]]}, '"valid" must be a list'),
        ({"train": ["a", True]}, '"train" must be a list'),
        ({"train": ["1", "a", "b"]}, "weights and prefixes must alternate"),
        ({"train": ["-1", "a"]}, "weight -1.0 must be a positive number"),
    ],
)
def test_files_of_splits(content: object, message: str, tmp_path: Path):
    path = write(tmp_path / "splits.json", content)
    with pytest.raises((ConfigurationError, DataError), match=message) as raised:
        resolve(per_split_data_args_path=path)
    assert path in str(raised.value)


def test_files_of_one_blend(tmp_path: Path):
    with pytest.raises(DataError, match="none.txt: can't be read .*No such file"):
        resolve(data_args_path=str(tmp_path / "none.txt"))
    with pytest.raises(DataError, match="is empty"):
        resolve(data_args_path=write(tmp_path / "empty.txt", " \n"))
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="it is no UTF-8 text"):
        resolve(data_args_path=str(tmp_path / "binary.txt"))
    path = write(tmp_path / "blend.txt", "a")
    with pytest.raises(ConfigurationError, match="excludes --data-path"):
        resolve(data_args_path=path, data_path=["a"])
    with pytest.raises(ConfigurationError, match="--mock-data generates its corpus"):
        resolve(data_args_path=path, mock_data=True)
    splits = write(tmp_path / "splits.json", {"train": ["a"]})
    with pytest.raises(ConfigurationError, match="excludes --train-data-path"):
        resolve(per_split_data_args_path=splits, valid_data_path=["a"])
    with pytest.raises(ConfigurationError, match="--data-path excludes"):
        resolve(per_split_data_args_path=splits, data_args_path=path)


def test_counts_of_sequences_are_held_against_the_corpora(corpus: str, tmp_path: Path):
    path = tmp_path / "counts.json"
    given = {"data_path": [corpus], "split": "1,0,0", "per_dataset_sequences_path": str(path)}

    def build(content: object) -> None:
        write(path, content)
        build_datasets(run_config(**given), ByteTokenizer(), SampleCounts(40, 0, 0))

    build({corpus: [200, 201]})
    with pytest.raises(DataError, match="has 200 sequences and 201 .* says 199 sequences, 201 bou"):
        build({corpus: [199, 201]})
    with pytest.raises(DataError, match="says no counts; write the file anew"):
        build({"other": [199, 201]})


@pytest.mark.parametrize(
    "content", [[], {"a": 5}, {"a": [1]}, {"a": [1, -1]}, {"a": [1, True]}, {"a": [1.5, 2]}]
)
def test_malformed_counts(content: object, tmp_path: Path):
    path = write(tmp_path / "counts.json", content)
    with pytest.raises(DataError, match=r"must be a JSON object of prefix to \[sequences"):
        read_sequence_counts(path)


def test_full_validation_draws_no_weights(tmp_path: Path):
    low = write_corpus(tmp_path / "low", numbered_documents(50))
    high = write_corpus(tmp_path / "high", numbered_documents(40, seed=1))
    whole = SampleCounts(40, None, 0)
    weighted = run_config(train_data_path=[low], valid_data_path=["0.5", low, "0.5", high])
    with pytest.raises(ConfigurationError, match="--full-validation: goes over each corpus once"):
        build_datasets(weighted, ByteTokenizer(), whole)
    config = run_config(train_data_path=[low], valid_data_path=[low, high])
    rows = build_datasets(config, ByteTokenizer(), whole).valid
    alone = [
        build_datasets(
            run_config(train_data_path=[low], valid_data_path=[prefix]), ByteTokenizer(), whole
        ).valid
        for prefix in (low, high)
    ]
    assert len(rows) == sum(map(len, alone))
    held = sorted(rows[i]["text"].tolist() for i in range(len(rows)))
    assert held == sorted(part[i]["text"].tolist() for part in alone for i in range(len(part)))
