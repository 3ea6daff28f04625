from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from megatron.packed.data.files import publish, require_writable_folder, temporary_name, whole_file
from megatron.packed.data.index_files import inspect_corpus
from megatron.packed.errors import DataError

from .helpers import write_corpus

DOCUMENTS = [[1, 2, 3], [], [4], [5, 6]]


@pytest.mark.parametrize("dtype", [numpy.uint16, numpy.int32])
def test_the_writer_writes_megatron_cores_bytes(tmp_path: Path, dtype: type):
    ours = write_corpus(tmp_path / "ours", DOCUMENTS, dtype)
    core = str(tmp_path / "core")
    builder = IndexedDatasetBuilder(f"{core}.bin", dtype=dtype)
    for document in DOCUMENTS:
        builder.add_document(
            torch.tensor(document, dtype=torch.int64), [len(document)] if document else []
        )
    builder.finalize(f"{core}.idx")
    for suffix in (".bin", ".idx"):
        assert Path(ours + suffix).read_bytes() == Path(core + suffix).read_bytes()
    dataset = IndexedDataset(ours)
    assert [dataset[i].tolist() for i in range(len(dataset))] == [d for d in DOCUMENTS if d]


def test_inspection_finds_tokens(tmp_path: Path):
    corpus = inspect_corpus("--data-path", write_corpus(tmp_path / "c", DOCUMENTS))
    assert corpus.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert [corpus.locate(place) for place in range(6)] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (2, 0),
        (2, 1),
    ]


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path):
    path = tmp_path / "folder" / "file"
    with whole_file(path) as temporary:
        temporary.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new"
    with pytest.raises(RuntimeError), whole_file(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]


def test_publishing_never_pairs_new_with_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    finals = [tmp_path / "c.bin", tmp_path / "c.idx"]
    pairs = [(temporary_name(path), path) for path in finals]
    for temporary, final in pairs:
        temporary.write_text("new")
        final.write_text("old")

    def crash(source: Path, target: Path) -> None:
        assert not any(path.exists() for path in finals)
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron.packed.data.files.os.replace", crash)
    with pytest.raises(KeyboardInterrupt):
        publish(pairs)


def test_unwritable_folder(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="--output x: can't write in folder"):
        require_writable_folder(tmp_path / "file" / "folder", "--output x")
