"""Each kind of unusable data ends in one message that names flag or file, value, rule, way out."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

import numpy
import pytest

from megatron.packed.data import validation
from megatron.packed.data.blends import parse_blend, resolve_corpora
from megatron.packed.data.builders import SampleCounts, build_datasets
from megatron.packed.data.index_files import inspect_corpus
from megatron.packed.data.tokenizers import ByteTokenizer, NullTokenizer
from megatron.packed.errors import ConfigurationError, DataError

from .helpers import numbered_documents, run_config, write_corpus


def refused(message: str, *, tokenizer=None, counts=(40, 0, 0), packed=True, **data) -> str:
    """Assert that building is refused with a one-line DataError; returns it."""
    config = run_config(**data)
    config.packing.use_packed_sequence = packed
    with pytest.raises(DataError, match=message) as raised:
        build_datasets(config, tokenizer or ByteTokenizer(), SampleCounts(*counts))
    assert "\n" not in str(raised.value)
    return str(raised.value)


def overwrite(path: str, offset: int, content: bytes) -> None:
    with open(path, "r+b") as stream:
        stream.seek(offset)
        stream.write(content)


def test_prefix_typo_gets_the_nearest_one(corpus: str):
    wrong = corpus.replace("corpus_text", "corpse_text")
    message = refused("--data-path .*corpse_text_document: no such corpus", data_path=[wrong])
    assert message.endswith(f"did you mean {corpus}?")


def test_prefix_with_suffix(corpus: str):
    for suffix in (".bin", ".idx"):
        message = refused("no such corpus", data_path=[corpus + suffix])
        assert message.endswith(f"give the prefix without {suffix}: {corpus}")


def test_prefix_in_a_wrong_folder(corpus: str, tmp_path: Path):
    refused("the folder .*nowhere does not exist", data_path=[str(tmp_path / "nowhere" / "c")])
    (tmp_path / "void").mkdir()
    refused("that folder holds no corpus", data_path=[str(tmp_path / "void" / "c")])


def test_the_flag_that_named_the_corpus_is_named(corpus: str, tmp_path: Path):
    refused("--valid-data-path", train_data_path=[corpus], valid_data_path=[str(tmp_path / "x")])


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_one_file_missing(corpus: str, suffix: str):
    os.unlink(corpus + suffix)
    refused(f"{re.escape(corpus + suffix)} is missing beside", data_path=[corpus])


@pytest.mark.parametrize(
    "size, message", [(0, "is empty"), (20, "is truncated: 20 bytes"), (500, "is truncated: its")]
)
def test_truncated_index(corpus: str, size: int, message: str):
    os.truncate(f"{corpus}.idx", size)
    refused(f"--data-path .*{re.escape(corpus)}.idx {message}", data_path=[corpus])


def test_truncated_tokens(corpus: str):
    size = os.path.getsize(f"{corpus}.bin")
    os.truncate(f"{corpus}.bin", size - 2)
    refused(f"claims {size} bytes of tokens and .*bin has {size - 2}", data_path=[corpus])


@pytest.mark.parametrize(
    "offset, content, message",
    [
        (0, b"NOTANIDX\x00", "is no index file"),
        (9, struct.pack("<Q", 2), "version 2"),
        (17, b"\x07", "declares dtype float32"),
        (17, b"\x63", "declares dtype code 99"),
        (18, struct.pack("<Q", 3), "is corrupt: its header claims 3 sequences"),
        (34, struct.pack("<i", -5), "a document has -5 tokens"),
        (34, struct.pack("<i", 7777), "its byte offsets don't follow"),
        (34 + 800 + 8, struct.pack("<q", 1), "its byte offsets don't follow"),
        (
            34 + 800 + 1600 + 1600,
            struct.pack("<q", 3),
            "document boundaries must run from 0 to 200",
        ),
    ],
)
def test_corrupt_index(corpus: str, offset: int, content: bytes, message: str):
    overwrite(f"{corpus}.idx", offset, content)
    refused(message, data_path=[corpus])


def test_empty_corpora(tmp_path: Path):
    refused("holds no document", data_path=[write_corpus(tmp_path / "a", [])])
    prefix = write_corpus(tmp_path / "b", [[]])
    refused("holds no document", data_path=[prefix])
    # A sequence of length 0 is legal in the format; a corpus of nothing else is not.
    prefix = write_corpus(tmp_path / "c", [[1]])
    overwrite(f"{prefix}.idx", 34, struct.pack("<i", 0))
    refused("holds no token", data_path=[prefix])


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file(corpus: str):
    os.chmod(f"{corpus}.bin", 0)
    refused("can't read .*.bin", data_path=[corpus])


def test_id_beyond_the_vocabulary_is_located(tmp_path: Path):
    documents = [[1] * 40 + [100] for _ in range(50)]
    documents[17][5] = 258
    prefix = write_corpus(tmp_path / "c", documents)
    refused(
        r"token id 258 in .*c.bin \(document 17, offset 5\) is outside .* \[0, 101\)",
        tokenizer=NullTokenizer(100),
        data_path=[prefix],
    )


def test_negative_id(tmp_path: Path):
    prefix = write_corpus(tmp_path / "c", [[1, -3, 256]] * 100, numpy.int32)
    refused(r"token id -3 .*\(document 0, offset 1\)", data_path=[prefix])


def test_a_big_corpus_is_sampled_to_both_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(validation, "SCANNED_TOKENS", 1 << 17)
    documents = [[1] * 9999 + [256] for _ in range(40)]
    for document in (0, 39):
        changed = [list(d) for d in documents]
        changed[document][9998] = 999
        prefix = write_corpus(tmp_path / f"c{document}", changed)
        with pytest.raises(DataError, match=rf"\(document {document}, offset 9998\)"):
            validation.check_vocabulary("-", inspect_corpus("-", prefix), ByteTokenizer())


def test_eod_absent(tmp_path: Path):
    prefix = write_corpus(tmp_path / "c", [[5] * 40 for _ in range(50)])
    message = refused(
        r"--use-packed-sequence needs documents that end in EOD \(id 256\)", data_path=[prefix]
    )
    assert "--append-eod" in message and "--document-boundaries index" in message
    config = run_config(data_path=[prefix], split="1,0,0")
    config.packing.use_packed_sequence = False
    build_datasets(config, ByteTokenizer(), SampleCounts(40, 0, 0))


def test_eod_at_the_end_of_documents_longer_than_the_first_rows(tmp_path: Path):
    prefix = write_corpus(tmp_path / "c", [[5] * 9000 + [256]] * 2)
    config = run_config(data_path=[prefix], split="1,0,0")
    build_datasets(config, ByteTokenizer(), SampleCounts(40, 0, 0))


def test_fewer_rows_than_one_global_batch(tmp_path: Path):
    prefix = write_corpus(tmp_path / "c", [[5] * 30 + [256]] * 4)
    refused(
        "the train split holds 3 rows of --seq-length 32, fewer than one global batch of 4",
        split="1,0,0",
        data_path=[prefix],
    )


def test_split_without_documents(corpus: str):
    # megatron-core alone would loop for ever here.
    refused(
        r"the test split of --data-path .* has 0 of its 200 documents and 0 tokens "
        r"\(--split 969,30,1\), and the run asks for 4 rows",
        counts=(40, 4, 4),
        data_path=[corpus],
    )


def test_cache_folder(corpus: str, tmp_path: Path):
    (tmp_path / "file").write_text("")
    refused(
        "--data-cache-path .*: can't write in folder .*file",
        data_path=[corpus],
        data_cache_path=str(tmp_path / "file"),
    )
    refused(
        "--data-cache-path .*: can't write",
        mock_data=True,
        data_cache_path=str(tmp_path / "file"),
    )
    Path(corpus).write_text("a file where the default cache folder would go")
    refused(r"index files of .* \(without --data-cache-path\): can't write", data_path=[corpus])


def test_missing_compiled_helpers(corpus: str, monkeypatch: pytest.MonkeyPatch):
    def fail(name: str) -> None:
        raise ImportError("no helpers_cpp")

    monkeypatch.setattr("megatron.packed.data.builders.importlib.import_module", fail)
    refused("compiled dataset helpers can't be loaded .*pip install", data_path=[corpus])


@pytest.mark.parametrize(
    "words, prefixes, weights",
    [
        (["a"], ("a",), None),
        (["7"], ("7",), None),
        (["a", "b"], ("a", "b"), None),
        (["a", "b", "c"], ("a", "b", "c"), None),
        (["0.3", "a", "7", " b "], ("a", "b"), (0.3, 7.0)),
        (["1", "a"], ("a",), (1.0,)),
        (["1", "7"], ("7",), (1.0,)),
    ],
)
def test_blends(words: list[str], prefixes: tuple[str, ...], weights: tuple[float, ...] | None):
    blend = parse_blend("--data-path", words)
    assert (blend.prefixes, blend.weights) == (prefixes, weights)


@pytest.mark.parametrize("words", [["0.3", "a", "b"], ["0.3", "a", "b", "0.7"], ["a", "1"]])
def test_weights_and_prefixes_must_alternate(words: list[str]):
    with pytest.raises(ConfigurationError, match="--data-path .*: weights and prefixes must"):
        parse_blend("--data-path", words)


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf"])
def test_weights_must_be_positive(weight: str):
    with pytest.raises(ConfigurationError, match="must be a positive number"):
        parse_blend("--data-path", [weight, "a", "1", "b"])


@pytest.mark.parametrize("split", ["a,b", "1,2,3,4", "-1,2,3", "0,1,1", "nan,1,1", "1,,1"])
def test_bad_split(split: str):
    with pytest.raises(ConfigurationError, match="give the proportions"):
        resolve_corpora(run_config(data_path=["a"], split=split).data)


def test_numbered_documents_are_accepted_as_they_are(corpus: str):
    """The fixture itself passes every check, so each refusal above has one cause."""
    config = run_config(data_path=[corpus])
    assert build_datasets(config, ByteTokenizer(), SampleCounts(40, 4, 0)).train is not None
    assert len(numbered_documents(3)) == 3
