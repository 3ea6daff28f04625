"""Files cut short or changed at any place: read as they are, or refused in one line."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import numpy
import pytest

from megatron.packed.arguments import config_from_flags
from megatron.packed.data.builders import SampleCounts, build_datasets
from megatron.packed.data.index_files import inspect_corpus
from megatron.packed.data.tokenizers import ByteTokenizer
from megatron.packed.errors import DataError

from .helpers import numbered_documents, write_corpus

HEADER = 34
SEQUENCES = 40


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, bytes, bytes]:
    prefix = write_corpus(tmp_path / "c", numbered_documents(SEQUENCES))
    return prefix, Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()


def check(prefix: str, index: bytes, tokens: bytes) -> str | None:
    """What is wrong with a pair; None if it reads, and then every document is within the file."""
    Path(f"{prefix}.idx").write_bytes(index)
    Path(f"{prefix}.bin").write_bytes(tokens)
    try:
        corpus = inspect_corpus("--data-path", prefix)
    except DataError as error:
        assert "\n" not in str(error) and prefix in str(error)
        return str(error)
    ends = corpus.sequence_pointers // corpus.tokens.itemsize + corpus.sequence_lengths
    assert corpus.sequence_pointers.min() >= 0 and ends.max() == len(corpus.tokens)
    assert corpus.sequence_lengths.min() >= 0
    return None


def test_an_index_cut_anywhere_is_refused(pair: tuple[str, bytes, bytes]):
    prefix, index, tokens = pair
    assert check(prefix, index, tokens) is None
    for size in [*range(0, 60), *range(60, len(index), 17), len(index) - 1]:
        message = check(prefix, index[:size], tokens)
        assert message is not None and ("truncated" in message or "empty" in message), size
    assert "corrupt" in (check(prefix, index + b"x", tokens) or "")


def test_tokens_cut_anywhere_are_refused(pair: tuple[str, bytes, bytes]):
    prefix, index, tokens = pair
    for size in (0, 1, len(tokens) // 2, len(tokens) - 2, len(tokens) - 1):
        assert "the copy or the preprocessing broke off" in (
            check(prefix, index, tokens[:size]) or ""
        )
    # What an interrupted copy leaves behind the last token is never read.
    assert check(prefix, index, tokens + b"xx") is None


def test_a_changed_byte_of_the_index_is_refused_or_harmless(pair: tuple[str, bytes, bytes]):
    prefix, index, tokens = pair
    generator = random.Random(0)
    refused = 0
    for _ in range(300):
        place = generator.randrange(len(index))
        changed = bytearray(index)
        changed[place] ^= 1 << generator.randrange(8)
        message = check(prefix, bytes(changed), tokens)
        refused += message is not None
        # Only inner document boundaries, which nothing here reads, may change unnoticed.
        assert message is not None or place >= HEADER + SEQUENCES * 12
    assert refused > 150


def test_dtypes(pair: tuple[str, bytes, bytes]):
    prefix, index, tokens = pair
    for code in range(256):
        message = check(prefix, index[:17] + struct.pack("<B", code) + index[18:], tokens)
        # int16 is as wide as uint16: what it makes of the ids is the vocabulary's check.
        assert (message is None) == (code in (3, 8)), code
        if code in (6, 7):
            assert message and "token ids must be integers" in message


FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
    "--train-iters 1 --lr 1e-3 --tokenizer-type ByteTokenizer --attention-dropout 0 --split 1,0,0 "
    "--use-packed-sequence "
)
CHATML = "--sft --sft-tokenizer-prompt-format chatml"


@pytest.mark.parametrize("strategy", ["rows", "next_fit"])
def test_an_id_past_the_vocabulary_is_found_wherever_it_is_read(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The start looks at samples of a large corpus; every read looks at what it read."""
    from megatron.packed.data import validation

    documents = numbered_documents(100)
    documents[57][-2] = 9999
    prefix = write_corpus(tmp_path / "c", documents)
    config = config_from_flags(f"{FLAGS} --packing-strategy {strategy} --data-path {prefix}")
    where = rf"9999 in .*document 57, offset {len(documents[57]) - 2}\)"
    with pytest.raises(DataError, match=where):
        build_datasets(config, ByteTokenizer(), SampleCounts(40, 0, 0))
    monkeypatch.setattr(validation, "check_vocabulary", lambda *args: None)
    train = build_datasets(config, ByteTokenizer(), SampleCounts(40, 0, 0)).train
    offset = len(documents[57]) - 2
    with pytest.raises(DataError, match=rf"token id 9999 in document 57 of .*\(offset {offset}"):
        if strategy == "rows":
            for index in range(len(train)):
                train[index]
        else:
            for number in range(len(train)):
                train.read(number, 0, int(train.lengths[number]))


def test_supervision_that_does_not_fit_its_tokens(tmp_path: Path):
    tokens = numbered_documents(30)
    prefix = write_corpus(tmp_path / "c", tokens)
    config = config_from_flags(
        f"{FLAGS} --sft --sft-tokenizer-prompt-format chatml --data-path {prefix}"
    )

    def build() -> None:
        build_datasets(config, ByteTokenizer(), SampleCounts(4, 0, 0))

    with pytest.raises(DataError, match="c_supervised.idx isn't there"):
        build()
    ones = [[1] * len(document) for document in tokens]
    beside = str(tmp_path / "c_supervised")
    for wrong, dtype, message in (
        ([*ones[:-1], [1]], numpy.uint8, "has documents of other lengths"),
        ([*ones[:-1], [2] * len(ones[-1])], numpy.uint8, "must hold bytes of 0 and 1"),
        (ones, numpy.uint16, "must hold bytes of 0 and 1"),
        ([[0] * len(each) for each in ones], numpy.uint8, "supervises nothing"),
    ):
        write_corpus(beside, wrong, dtype)
        with pytest.raises(DataError, match=message):
            build()
    write_corpus(beside, ones, numpy.uint8)
    build()
    Path(f"{beside}.bin").write_bytes(b"")
    with pytest.raises(DataError, match="c_supervised.bin has 0"):
        build()


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "chats.jsonl is empty; give a file of JSON lines"),
        ("\n \n", "holds no conversation"),
        ('{"messages": []}\n', "chats.jsonl:1: 'messages' must be a list"),
        ('\n{"a": 1\n', "chats.jsonl:2 is no JSON"),
        ("\xff", "is no JSON|one of the keys"),
    ],
)
def test_files_of_conversations(content: str, message: str, tmp_path: Path):
    path = tmp_path / "chats.jsonl"
    path.write_bytes(content.encode("latin-1"))
    config = config_from_flags(
        f"{FLAGS} --sft --sft-tokenizer-prompt-format chatml --data-path {path}"
    )
    with pytest.raises(DataError, match=message):
        build_datasets(config, ByteTokenizer(), SampleCounts(4, 0, 0))
    assert not list(tmp_path.glob("cache/*"))


def test_a_missing_file_of_conversations(tmp_path: Path):
    config = config_from_flags(f"{FLAGS} --sft --data-path {tmp_path / 'none.jsonl'}")
    with pytest.raises(DataError, match="--data-path .*none.jsonl: there is no such file"):
        build_datasets(config, ByteTokenizer(), SampleCounts(4, 0, 0))
