"""Weights beside a corpus reach the segments of packs, and what is wrong with them is said."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest

from megatron.packed.arguments import config_from_flags
from megatron.packed.data.builders import SampleCounts, build_datasets
from megatron.packed.data.document_weights import weights_path
from megatron.packed.data.tokenizers import ByteTokenizer
from megatron.packed.errors import DataError
from megatron.packed.training.collation import build_collator

from .helpers import numbered_documents, write_corpus
from .test_tools import preprocess, write_lines

FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--train-iters 1 --lr 1e-3 --tokenizer-type ByteTokenizer --attention-dropout 0 --split 1,0,0 "
    "--use-packed-sequence --use-document-weights "
)


def weigh(prefix: str, weights: object) -> None:
    numpy.save(weights_path(prefix), numpy.asarray(weights))


def build(*prefixes: str, more: str = ""):
    config = config_from_flags(f"{FLAGS} {more} --data-path {' '.join(prefixes)}")
    return config, build_datasets(config, ByteTokenizer(), SampleCounts(60, 0, 0)).train


@pytest.mark.parametrize("strategy", ["rows", "next_fit"])
@pytest.mark.parametrize("fim", ["", "--fim-data --fim-rate 0.0"])
def test_segments_carry_their_documents_weights(strategy: str, fim: str, tmp_path: Path):
    from megatron.packed.training.packs import build_packer, segments_of_pack

    generator = numpy.random.RandomState(0)
    prefixes, expected = [], []
    for seed, name in enumerate("ab"):
        count = 50 - 17 * seed
        prefix = write_corpus(tmp_path / name, numbered_documents(count, seed=seed))
        expected.append(generator.rand(count).round(3))
        weigh(prefix, expected[-1].astype(numpy.float32))
        prefixes.append(prefix)
    from megatron.packed.data.fim import add_fim_tokens

    config = config_from_flags(
        f"{FLAGS} {fim} --packing-strategy {strategy} --data-path {' '.join(prefixes)}"
    )
    tokenizer, _ = add_fim_tokens(config, ByteTokenizer())
    train = build_datasets(config, tokenizer, SampleCounts(60, 0, 0)).train
    seen = 0
    if strategy == "rows":
        collate = build_collator(config, 256)
        for index in range(20):
            segments = collate([train[index], train[index + 20]]).packed_seq_params.segments
            for dataset, document, weight in zip(
                segments.datasets, segments.documents, segments.weights, strict=True
            ):
                assert weight == numpy.float32(expected[dataset][document])
                seen += 1
    else:
        packer = build_packer(config, train, 261)
        for pack in packer.epoch_packs():
            segments = segments_of_pack(pack, train, None)
            for dataset, document, weight in zip(
                segments.datasets, segments.documents, segments.weights, strict=True
            ):
                assert weight == numpy.float32(expected[dataset][document])
                seen += 1
    assert seen >= 60


def test_preprocessing_writes_weights(tmp_path: Path):
    lines = [{"text": "one", "w": 0.5}, {"text": "", "w": 9}, {"text": ["a", "b"], "w": 2}]
    source = write_lines(tmp_path / "in.jsonl", lines * 20)
    prefix = preprocess(tmp_path, source, "--append-eod", "--weights-key", "w", "--workers", "2")
    # One a sequence: an empty text has none, a list has several.
    assert numpy.load(weights_path(prefix)).tolist() == [0.5, 2.0, 2.0] * 20
    build(prefix)
    for bad in (None, -1, True, "1", float("nan")):
        write_lines(source, [*lines, {"text": "x", "w": bad}])
        with pytest.raises(DataError, match="in.jsonl:4: 'w' holds .*; with --weights-key it must"):
            preprocess(tmp_path, source, "--weights-key", "w")


def test_weights_that_do_not_fit(corpus: str):
    path = weights_path(corpus)
    with pytest.raises(DataError, match=f"--use-document-weights: --data-path .* has no {path}"):
        build(corpus)
    for weights, message in (
        (numpy.ones(199), "holds 199 weights for the 200 documents of --data-path"),
        (numpy.ones((200, 1)), "of shape .200, 1.; it must be a vector"),
        (numpy.ones(200, dtype=int), "holds int64 of shape"),
        (numpy.zeros(200), "all weights are 0"),
        (numpy.where(numpy.arange(200) == 7, -0.5, 1.0), "document 7 has weight -0.5"),
        (numpy.where(numpy.arange(200) == 8, numpy.nan, 1.0), "document 8 has weight nan"),
    ):
        weigh(corpus, weights)
        with pytest.raises(DataError, match=message):
            build(corpus)
    weigh(corpus, numpy.ones(200))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match="is no .npy file"):
        build(corpus)
    path.write_text(json.dumps([1]))
    with pytest.raises(DataError, match="is no .npy file"):
        build(corpus)
