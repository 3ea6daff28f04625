from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest

from megatron.packed.data.hugging_face_tokenizer import HuggingFaceTokenizer
from megatron.packed.data.index_files import inspect_corpus
from megatron.packed.data.tokenizers import ByteTokenizer
from megatron.packed.errors import ConfigurationError, DataError

from .helpers import TOOLS, load_tool


def write_lines(path: Path, entries: list[object]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def preprocess(folder: Path, source: Path | str, *flags: str) -> str:
    """Run preprocess_data.py with bytes in this process; returns the output prefix."""
    load_tool("preprocess_data").main(
        [
            *("--input", str(source), "--output-prefix", str(folder / "out")),
            *("--tokenizer-type", "ByteTokenizer", "--workers", "1", *flags),
        ]
    )
    return str(folder / "out_text_document")


# make_corpus


def test_corpus_of_the_standard_library(tmp_path: Path):
    output = tmp_path / "corpus.jsonl"
    tool = load_tool("make_corpus")
    tool.main(["--output", str(output), "--max-documents", "20"])
    entries = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(entries) == 20
    assert all(entry["text"].strip() and entry["source"].endswith(".py") for entry in entries)
    assert not any("site-packages" in entry["source"] for entry in entries)
    first = output.read_bytes()
    tool.main(["--output", str(output), "--max-documents", "20"])
    assert output.read_bytes() == first


def test_corpus_limits_and_odd_files(tmp_path: Path):
    root = tmp_path / "root"
    (root / "site-packages").mkdir(parents=True)
    (root / "site-packages" / "foreign.py").write_text("x = 1")
    (root / "blank.py").write_text(" \n")
    (root / "latin.py").write_bytes("# coding: latin-1\nx = 'é'\n".encode("latin-1"))
    (root / "broken.py").write_bytes(b"\xff\xfe\xff")
    for name in "abc":
        (root / f"{name}.py").write_text(name * 100)
    output = tmp_path / "corpus.jsonl"
    tool = load_tool("make_corpus")
    tool.main(["--output", str(output), "--root", str(root)])
    entries = {e["source"]: e["text"] for e in map(json.loads, output.read_text().splitlines())}
    assert set(entries) == {"latin.py", "a.py", "b.py", "c.py"} and "é" in entries["latin.py"]
    tool.main(["--output", str(output), "--root", str(root), "--limit-bytes", "250"])
    texts = [json.loads(line)["text"] for line in output.read_text().splitlines()]
    assert 0 < sum(len(text.encode()) for text in texts) <= 250


def test_corpus_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture):
    output = tmp_path / "corpus.jsonl"
    tool = load_tool("make_corpus")
    for flags, message in (
        (["--root", str(tmp_path / "nowhere")], "is no folder"),
        (["--root", str(tmp_path)], r"holds no \*.py file"),
        (["--limit-bytes", "1"], "no readable document"),
    ):
        with pytest.raises(DataError, match=message):
            tool.main(["--output", str(output), *flags])
    with pytest.raises(SystemExit):
        tool.main(["--output", str(output), "--max-documents", "0"])
    assert "--max-documents 0 must be at least 1" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# train_tokenizer


def test_trained_tokenizer_is_exact_and_repeatable(tmp_path: Path, corpus_jsonl: Path):
    tool = load_tool("train_tokenizer")
    for name in ("one", "two"):
        tool.main(
            [
                *("--input", str(corpus_jsonl), "--vocab-size", "500"),
                *("--output", str(tmp_path / name), "--limit-bytes", "100000"),
            ]
        )
    files = [(tmp_path / name / "tokenizer.json").read_bytes() for name in ("one", "two")]
    assert files[0] == files[1]
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    tokenizer = HuggingFaceTokenizer(tmp_path / "one")
    assert (tokenizer.vocab_size, tokenizer.eod) == (500, 0)
    text = "def naïve(𝄞):\n\treturn  1 # \x00\n"
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert len(tokenizer.tokenize("import")) < 6


def test_train_tokenizer_bad_input(tmp_path: Path, corpus_jsonl: Path):
    tool = load_tool("train_tokenizer")
    output = ["--output", str(tmp_path / "t")]
    with pytest.raises(ConfigurationError, match="--vocab-size 100 can't hold 256 bytes"):
        tool.main(["--input", str(corpus_jsonl), "--vocab-size", "100", *output])
    with pytest.raises(DataError, match="there is no such file"):
        tool.main(["--input", str(tmp_path / "x"), "--vocab-size", "300", *output])
    with pytest.raises(DataError, match="has no key 'body'"):
        tool.main(
            ["--input", str(corpus_jsonl), "--vocab-size", "300", "--json-key", "body", *output]
        )
    assert not (tmp_path / "t" / "tokenizer.json").exists()


# preprocess_data


def test_documents_are_tokenized_and_closed(tmp_path: Path, awkward_documents: list[str]):
    source = write_lines(tmp_path / "in.jsonl", [{"text": text} for text in awkward_documents])
    corpus = inspect_corpus("-", preprocess(tmp_path, source, "--append-eod"))
    tokenizer = ByteTokenizer()
    expected = [[*tokenizer.tokenize(t), tokenizer.eod] for t in awkward_documents if t]
    assert corpus.sequence_lengths.tolist() == [len(ids) for ids in expected]
    assert corpus.tokens.tolist() == [token for ids in expected for token in ids]
    assert corpus.tokens.dtype == numpy.uint16


def test_without_append_eod_no_eod(tmp_path: Path):
    source = write_lines(tmp_path / "in.jsonl", [{"text": "ab"}])
    assert inspect_corpus("-", preprocess(tmp_path, source)).tokens.tolist() == [97, 98]


def test_lists_are_sequences_of_one_document(tmp_path: Path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    source = write_lines(tmp_path / "in.jsonl", [{"text": ["a", "", "bc"]}, {"text": "d"}])
    dataset = IndexedDataset(preprocess(tmp_path, source, "--append-eod"))
    assert [dataset[i].tolist() for i in range(3)] == [[97], [98, 99, 256], [100, 256]]
    assert dataset.document_indices.tolist() == [0, 2, 3]


def test_workers_change_nothing(tmp_path: Path, corpus_jsonl: Path, monkeypatch):
    monkeypatch.setattr(load_tool("preprocess_data"), "_CHUNK_LINES", 3)
    outputs = []
    for workers in ("1", "2"):
        folder = tmp_path / workers
        prefix = preprocess(folder, corpus_jsonl, "--append-eod", "--workers", workers)
        outputs.append([Path(prefix + s).read_bytes() for s in (".bin", ".idx")])
    assert outputs[0] == outputs[1]


def test_several_keys_files_and_gzip(tmp_path: Path):
    entries = [{"text": "ab", "title": "t"}, {"text": "c", "title": ""}]
    write_lines(tmp_path / "a.jsonl", entries[:1])
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as stream:
        stream.write(json.dumps(entries[1]) + "\n\n")
    preprocess(tmp_path, f"{tmp_path}/*.jsonl*", "--json-keys", "text", "title")
    assert inspect_corpus("-", f"{tmp_path}/out_text_document").tokens.tolist() == [97, 98, 99]
    assert inspect_corpus("-", f"{tmp_path}/out_title_document").tokens.tolist() == [ord("t")]


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "in.jsonl:2 is no JSON"),
        ("[1]", "in.jsonl:2 has no key 'text'"),
        ('{"body": "x"}', r"has no key 'text' \(it has: body\)"),
        ('{"text": 3}', "'text' holds int"),
        ('{"text": ["a", 3]}', "'text' holds list"),
    ],
)
def test_malformed_line_leaves_nothing_behind(
    tmp_path: Path, line: str, message: str, workers: str
):
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        preprocess(tmp_path, source, "--workers", workers)
    assert list(tmp_path.iterdir()) == [source]


def test_preprocess_bad_input(tmp_path: Path):
    source = write_lines(tmp_path / "in.jsonl", [{"text": ""}])
    with pytest.raises(DataError, match="holds no text under 'text'"):
        preprocess(tmp_path, source)
    with pytest.raises(DataError, match="there is no such file"):
        preprocess(tmp_path, tmp_path / "nothing.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match="is empty"):
        preprocess(tmp_path, tmp_path / "empty.jsonl")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 100)[:-12])
    with pytest.raises(DataError, match="is no whole gzip file"):
        preprocess(tmp_path, tmp_path / "cut.gz")
    with pytest.raises(DataError, match="--output-prefix .*: can't write in folder"):
        preprocess(source, write_lines(tmp_path / "b.jsonl", [{"text": "a"}]))
    assert {path.name for path in tmp_path.iterdir()} == {
        "in.jsonl",
        "empty.jsonl",
        "cut.gz",
        "b.jsonl",
    }


def test_a_failed_run_keeps_the_output_of_the_last_good_one(tmp_path: Path):
    prefix = preprocess(tmp_path, write_lines(tmp_path / "a.jsonl", [{"text": "a"}]))
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "b"}\n{')
    with pytest.raises(DataError):
        preprocess(tmp_path, bad)
    assert inspect_corpus("-", prefix).tokens.tolist() == [97]


def test_a_tool_prints_one_line_and_fails(tmp_path: Path):
    result = subprocess.run(
        [
            *(sys.executable, str(TOOLS / "preprocess_data.py"), "--input", "nothing.jsonl"),
            *("--tokenizer-type", "ByteTokenizer", "--output-prefix", str(tmp_path / "out")),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert result.returncode == 1
    assert result.stderr.strip() == (
        "error: --input nothing.jsonl: there is no such file; check the path"
    )


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_leaves_nothing_that_looks_whole(tmp_path: Path, sent: signal.Signals):
    source = write_lines(tmp_path / "in.jsonl", [{"text": "word " * 2000}] * 4000)
    process = subprocess.Popen(
        [
            *(sys.executable, str(TOOLS / "preprocess_data.py"), "--input", str(source)),
            *("--tokenizer-type", "ByteTokenizer", "--workers", "2"),
            *("--output-prefix", str(tmp_path / "out")),
        ],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # A suite that a shell started in the background ignores SIGINT, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob(".out*")):  # the first chunk is being written
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(sent)
    process.communicate(timeout=30)  # waits for the workers too: they hold the pipes
    assert process.returncode != 0
    assert not list(tmp_path.glob("out*"))
    if sent != signal.SIGKILL:
        assert not list(tmp_path.glob(".out*"))
