"""Corpora, and files beside them, that are not what they claim to be."""

from __future__ import annotations

import gzip
import io
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest

from megatron.packed.arguments import config_from_flags
from megatron.packed.data.builders import SampleCounts, build_datasets
from megatron.packed.data.tokenizers import ByteTokenizer
from tests.unit.data.helpers import numbered_documents, write_corpus

from .table import Malformed, assert_refused, cases_of, each, written

COUNT = 40
HEADER = 34  # bytes: magic, version, dtype, sequences, boundaries
LENGTHS, POINTERS, BOUNDARIES = HEADER, HEADER + 4 * COUNT, HEADER + 12 * COUNT
FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
    "--train-iters 1 --lr 1e-3 --tokenizer-type ByteTokenizer --attention-dropout 0 "
    "--use-packed-sequence "
)
AGAIN = "run tools/preprocess_data.py again"


def _build(flags: str) -> None:
    """What a program does with the data flags: read them, then open what they name."""
    build_datasets(config_from_flags(FLAGS + flags), ByteTokenizer(), SampleCounts(4, 0, 0))


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """A corpus with nothing wrong with it."""
    return write_corpus(tmp_path / "c", numbered_documents(COUNT))


def test_the_corpus_is_fine_before_it_is_spoilt(prefix: str) -> None:
    _build(f"--split 1,0,0 --data-path {prefix}")


# --- the pair -------------------------------------------------------------------------------------

Change = Callable[[bytes], bytes]


def _put(place: int, form: str, *values: int) -> Change:
    """Other numbers at a place of the file."""
    packed = struct.pack(form, *values)
    return lambda content: content[:place] + packed + content[place + len(packed) :]


# Given: what becomes of which file.
PAIRS = cases_of(
    ("an empty index", (".idx", lambda c: b""), "--data-path", "c.idx is empty", AGAIN),
    ("half a header", (".idx", lambda c: c[:20]), "c.idx is truncated: 20 bytes can't hold"),
    ("another magic number", (".idx", _put(0, "<9s", b"MMIDIDX\0\1")), "c.idx is no index file",
     "starts with b'MMIDIDX\\x00\\x01'"),
    ("a text for an index", (".idx", lambda c: b"not an index at all, but some text...."),
     "c.idx is no index file: it starts with b'not an in'"),
    ("another version", (".idx", _put(9, "<Q", 2)), "c.idx is no index file", "version 2"),
    ("an unknown dtype", (".idx", _put(17, "<B", 77)), "c.idx declares dtype code 77", "integers"),
    ("floating-point tokens", (".idx", _put(17, "<B", 7)), "c.idx declares dtype float32"),
    ("a wider dtype", (".idx", _put(17, "<B", 5)), "c.idx is corrupt", "byte offsets don't follow"),
    ("more sequences than it has", (".idx", _put(18, "<Q", 41)), "c.idx is truncated",
     "claims 41 sequences"),
    ("more sequences than there can be", (".idx", _put(18, "<Q", 1 << 63)),
     "claims 9223372036854775808 sequences"),
    ("no sequences", (".idx", lambda c: c[:18] + struct.pack("<QQq", 0, 1, 0)),
     "c.idx holds no document"),
    ("an index cut short", (".idx", lambda c: c[:-1]), "c.idx is truncated", "and it has"),
    ("an index with more behind it", (".idx", lambda c: c + b"xxx"), "c.idx is corrupt"),
    ("a negative length", (".idx", _put(LENGTHS + 40, "<i", -3)), "a document has -3 tokens"),
    ("lengths beyond the file", (".idx", _put(LENGTHS, "<i", 2**31 - 1)), "c.idx is corrupt",
     "don't follow from its lengths"),
    ("a pointer out of bounds", (".idx", _put(POINTERS + 8, "<q", 1 << 40)), "byte offsets"),
    ("a negative pointer", (".idx", _put(POINTERS, "<q", -2)), "byte offsets don't follow"),
    ("boundaries that start late", (".idx", _put(BOUNDARIES, "<q", 1)), "must run from 0 to 40"),
    ("boundaries that end early", (".idx", _put(BOUNDARIES + 8 * COUNT, "<q", 39)), "c.idx",
     "boundaries must run from 0 to 40"),
    ("boundaries that go back", (".idx", _put(BOUNDARIES + 8, "<qq", 5, 2)), "boundaries go back"),
    ("no tokens", (".bin", lambda c: b""), "c.bin has 0", "broke off"),
    ("tokens cut short", (".bin", lambda c: c[:-1]), "c.idx claims", "c.bin has", "copy it again"),
    ("an id past the vocabulary", (".bin", _put(20, "<H", 9999)), "token id 9999 in", "document 0",
     "outside the tokenizer's vocabulary [0, 258)"),
)  # fmt: skip


@each(PAIRS)
def test_a_corpus_is_refused(case: Malformed, prefix: str) -> None:
    suffix, change = case.given
    path = Path(prefix + suffix)
    path.write_bytes(change(path.read_bytes()))
    assert_refused(case, lambda: _build(f"--split 1,0,0 --data-path {prefix}"))


# --- what is where --------------------------------------------------------------------------------


def _without_eod(prefix: str) -> str:
    write_corpus(prefix, [[1, 2, 3]] * COUNT)
    return f"--split 1,0,0 --data-path {prefix}"


def _remove(prefix: str, suffix: str) -> str:
    os.remove(prefix + suffix)
    return f"--split 1,0,0 --data-path {prefix}"


# Given: a function of the prefix that makes the flags.
PLACES = cases_of(
    ("no corpus", lambda p: f"--data-path {p}x", "cx: no such corpus", "did you mean"),
    ("a file in place of its prefix", lambda p: f"--data-path {p}.bin", "c.bin: no such corpus",
     "give the prefix without .bin"),
    ("no folder", lambda p: f"--data-path {p}/x/y", "the folder", "c/x does not exist"),
    ("a name too long", lambda p: "--data-path " + "a" * 300, "--data-path aaa", "no such corpus"),
    ("no tokens beside the index", lambda p: _remove(p, ".bin"), "c.bin is missing beside"),
    ("no index beside the tokens", lambda p: _remove(p, ".idx"), "c.idx is missing beside"),
    ("documents without an end", _without_eod, "--use-packed-sequence needs documents that end",
     "--document-boundaries index"),
    ("a split without documents", lambda p: f"--split 1,99999,0 --data-path {p}",
     "the train split of --data-path", "0 of its 40 documents", "larger share"),
    ("less than one batch", lambda p: f"--split 1,0,0 --global-batch-size 512 --data-path {p}",
     "fewer than one global batch of 512", "lower --global-batch-size"),
    ("weights without an end", lambda p: f"--data-path 0.5 {p} 0.5", "0.5", "must alternate"),
    ("a negative weight", lambda p: f"--data-path -1 {p} 2 {p}", "--data-path -1",
     "weight -1.0 must be a positive number"),
    ("a file of corpora that isn't there", lambda p: "--data-args-path none", "--data-args-path",
     "none: can't be read (No such file"),
    ("a cache that is a file", lambda p: f"--split 1,0,0 --data-path {p} --data-cache-path {p}.bin",
     "--data-cache-path", "can't write in folder"),
)  # fmt: skip


@each(PLACES)
def test_data_flags_are_refused(case: Malformed, prefix: str) -> None:
    flags = case.given(prefix)
    assert_refused(case, lambda: _build(flags))


# --- files beside a corpus ------------------------------------------------------------------------


def _npy(value: numpy.ndarray) -> bytes:
    stream = io.BytesIO()
    numpy.save(stream, value, allow_pickle=True)
    return stream.getvalue()


def _npz() -> bytes:
    stream = io.BytesIO()
    numpy.savez(stream, numpy.ones(COUNT))
    return stream.getvalue()


WHOLE = _npy(numpy.ones(COUNT))
CHAT = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'


def _bent_gzip() -> bytes:
    content = bytearray(gzip.compress(CHAT.encode() * 300))
    content[20:26] = b"\xff\x55\xff\x55\xff\x55"
    return bytes(content)


WEIGHTS, CHATS, BLENDS, COUNTS = "c.weights.npy", "chat.jsonl", "blends.json", "counts.json"
PACKED = "chat.jsonl.gz"
FLAGS_OF = {
    WEIGHTS: "--split 1,0,0 --data-path {folder}/c --use-document-weights",
    CHATS: "--split 1,0,0 --data-path {path} --sft --sft-tokenizer-prompt-format chatml",
    PACKED: "--split 1,0,0 --data-path {path} --sft --sft-tokenizer-prompt-format chatml",
    BLENDS: "--per-split-data-args-path {path}",
    COUNTS: "--split 1,0,0 --data-path {folder}/c --per-dataset-sequences-path {path}",
}

# Given: name and content of the file.
BESIDE = cases_of(
    ("weights in an archive", (WEIGHTS, _npz()), "c.weights.npy is no .npy file", "make it again"),
    ("weights with a bent header", (WEIGHTS, WHOLE[:10] + b"(" * 60 + WHOLE[70:]), "c.weights.npy",
     "is no .npy file (("),
    ("weights cut short", (WEIGHTS, WHOLE[:-8]), "c.weights.npy is no .npy file (mmap"),
    ("weights of Python objects", (WEIGHTS, _npy(numpy.array([{}]))), "Python objects in dtype"),
    ("weights of another length", (WEIGHTS, _npy(numpy.ones(3))), "holds 3 weights for the 40"),
    ("weights of whole numbers", (WEIGHTS, _npy(numpy.ones(COUNT, int))), "holds int64"),
    ("a weight that is no number", (WEIGHTS, _npy(numpy.full(COUNT, numpy.nan))), "has weight nan"),
    ("weights of nothing", (WEIGHTS, _npy(numpy.zeros(COUNT))), "all weights are 0"),
    ("no conversation", (CHATS, "\n"), "chat.jsonl: holds no conversation"),
    ("a conversation that is no JSON", (CHATS, CHAT + "{"), "chat.jsonl:2 is no JSON"),
    ("a conversation nested too deeply", (CHATS, "[" * 100_000), "chat.jsonl:1 is no JSON",
     "recursion"),
    ("nobody to learn from", (CHATS, CHAT.replace("assistant", "user")), "chat.jsonl:1",
     "without an assistant's turn"),
    ("a role that is none", (CHATS, CHAT.replace("user", "boss")), "message 1 has role 'boss'"),
    ("a turn without text", (CHATS, CHAT.replace('"a"', "null")), "message 1", "type NoneType"),
    ("an archive that is none", (PACKED, CHAT), "chat.jsonl.gz is no whole gzip file", "b'{\""),
    ("an archive cut short", (PACKED, gzip.compress(CHAT.encode() * 30)[:-9]), "chat.jsonl.gz",
     "ended before the end-of-stream"),
    ("an archive with flipped bits", (PACKED, _bent_gzip()), "chat.jsonl.gz", "is no whole gzip"),
    ("corpora nested too deeply", (BLENDS, "[" * 100_000), "--per-split-data-args-path",
     "blends.json: is no JSON (nested too deeply)"),
    ("training named twice", (BLENDS, '{"train": ["a"], "train": ["b"]}'), "blends.json",
     "has the key 'train' twice"),
    ("corpora in no UTF-8", (BLENDS, b"\xff"), "blends.json: can't be read (it is no UTF-8 text)"),
    ("corpora of an unknown split", (BLENDS, '{"tarin": []}'), "keys train, valid and test"),
    ("corpora as one text", (BLENDS, '{"train": "c"}'), '"train" must be a list of prefixes'),
    ("counts of another corpus", (COUNTS, '{"c": [1, 2]}'), "counts.json says no counts", "anew"),
    ("counts that are no numbers", (COUNTS, '{"c": [true, 2]}'), "counts.json", "holds [True, 2]"),
)  # fmt: skip


@each(BESIDE)
def test_a_file_beside_a_corpus_is_refused(case: Malformed, prefix: str, tmp_path: Path) -> None:
    name, content = case.given
    path = written(tmp_path / name, content)
    flags = FLAGS_OF[name].format(path=path, folder=tmp_path)
    assert_refused(case, lambda: _build(flags))


CASES = (*PAIRS, *PLACES, *BESIDE)
