"""Fill in the middle: undone by hand, nothing is lost and nothing crosses a document."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest

from megatron.packed.arguments import config_from_flags
from megatron.packed.data.builders import SampleCounts, build_datasets
from megatron.packed.data.fim import (
    FillInTheMiddle,
    FimRates,
    TokenizerWithAddedTokens,
    add_fim_tokens,
)
from megatron.packed.data.tokenizers import ByteTokenizer, build_tokenizer
from megatron.packed.errors import ConfigurationError

from .helpers import numbered_documents, write_corpus
from .test_tokenizers import options
from .test_vocabulary_files import write_bpe

TOKENS = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
EOD, PRE, SUF, MID = 256, 258, 259, 260


def transform(rate: float = 1.0, spm: float = 0.5, fragments: float = 1.0, **more: str | None):
    tokenizer = TokenizerWithAddedTokens(ByteTokenizer(), TOKENS)
    return FillInTheMiddle(tokenizer, 7, FimRates(rate, spm, fragments), TOKENS, **more)


def undo(ids: list[int]) -> list[int]:
    """What stood there before; ids without sentinels are themselves."""
    if PRE not in ids:
        return ids
    assert ids[0] == PRE and sorted(i for i in ids if i in (PRE, SUF, MID)) == [PRE, SUF, MID]
    suffix, middle = ids.index(SUF), ids.index(MID)
    if suffix == 1:  # suffix, prefix, middle
        return ids[middle + 1 :] + ids[2:middle]
    return ids[1:suffix] + ids[middle + 1 :] + ids[suffix + 1 : middle]


def documents(count: int = 40) -> list[numpy.ndarray]:
    return [numpy.array(document) for document in numbered_documents(count)]


def test_documents_come_back_whole():
    fim = transform()
    orders = {"psm": 0, "spm": 0}
    for number, document in enumerate(documents(200)):
        changed = fim.document(document, number).tolist()
        assert len(changed) == len(document) + 3 and changed[-1] == EOD
        assert undo(changed[:-1]) + [EOD] == document.tolist()
        orders["spm" if changed[1] == SUF and len(document) > 3 else "psm"] += 1
        assert changed == fim.document(document, number).tolist()
    assert 60 < orders["spm"] < 140
    assert fim.document(document, 0).tolist() != fim.document(document, 1).tolist()


def test_rates_are_shares_and_a_function_of_the_index():
    lengths = numpy.full(4000, 9)
    chosen = transform(rate=0.3).chosen(lengths)
    assert 1080 < chosen.sum() < 1320
    assert (transform(rate=0.3).chosen(lengths[:100]) == chosen[:100]).all()
    assert not transform(rate=0.0).chosen(lengths).any() and transform().chosen(lengths).all()
    assert transform().chosen(numpy.array([0, 1, 2])).tolist() == [False, False, True]
    only = [transform(spm=spm).document(documents(1)[0], 0).tolist() for spm in (0.0, 1.0)]
    assert only[0].index(SUF) > 1 or only[0][1] == SUF  # an empty prefix looks alike
    assert only[1][:2] == [PRE, SUF]


def test_rows_keep_documents_apart_and_cut_at_the_end():
    fim = transform()
    for index in range(30):
        parts = documents(4)
        lengths = numpy.array([len(part) for part in parts])
        text, sizes = fim.row(numpy.concatenate(parts), lengths, index)
        assert len(text) == lengths.sum() == sizes.sum()
        found = numpy.split(text, numpy.cumsum(sizes)[:-1])
        for changed, part in zip(found[:-1], parts, strict=False):
            if len(changed) == len(part) + 3:  # not the one that the end cuts
                assert [*undo(changed[:-1].tolist()), EOD] == part.tolist()
        assert text.tolist() == fim.row(numpy.concatenate(parts), lengths, index)[0].tolist()
    assert fim.row(numpy.concatenate(parts), lengths, 0)[0].tolist() != text.tolist()


def test_a_rate_of_zero_is_the_row_itself():
    parts = documents(5)
    lengths = numpy.array([len(part) for part in parts])
    text, sizes = transform(rate=0.0).row(numpy.concatenate(parts), lengths, 3)
    assert text.tolist() == numpy.concatenate(parts).tolist() and sizes.tolist() == lengths.tolist()


def test_texts_come_back_through_a_tokenizer_that_merges(tmp_path: Path):
    base = build_tokenizer(options(**write_bpe(tmp_path)))
    tokenizer = TokenizerWithAddedTokens(base, TOKENS)
    fim = FillInTheMiddle(tokenizer, 1, FimRates(1.0, 0.5), TOKENS)
    text = "the cat at the cat, the the naïve cat"
    ids = numpy.array([*tokenizer.tokenize(text), base.eod] * 2)
    lengths = numpy.array([len(ids) // 2] * 2)
    sentinels = {fim.prefix: PRE, fim.suffix: SUF, fim.middle: MID}
    for index in range(20):
        changed, sizes = fim.row(ids, lengths, index)
        first = changed[: sizes[0]]
        # Sentinels to numbers beyond a character's, and texts to the characters between them.
        characters: list[int] = []
        run: list[int] = []
        for token in [*first[:-1].tolist(), None]:
            if token is not None and token not in sentinels:
                run.append(token)
                continue
            characters += [ord(c) + 1000 for c in tokenizer.detokenize(run)]
            run = []
            if token is not None:
                characters.append(sentinels[token])
        # A character cut in two would read as two replacement characters.
        assert "".join(chr(c - 1000) for c in undo(characters)) == text
        assert first[-1] == base.eod


def test_fragments_and_what_is_left_alone():
    fim = transform(split_token="|")
    document = numpy.array([*b"first|second||third", EOD])
    changed = fim.document(document, 0).tolist()
    assert len(changed) == len(document) + 9
    parts = bytes_between(changed[:-1], ord("|"))
    assert [bytes(undo(part)) for part in parts] == [b"first", b"second", b"", b"third"]
    none = transform(split_token="|", fragments=0.0)
    assert none.document(document, 0).tolist() == document.tolist()

    fim = transform(no_prefix="fir")
    assert fim.document(document, 0).tolist() == document.tolist()
    assert len(fim.document(document[1:], 0)) == len(document) + 2
    assert fim.reads_content and not transform().reads_content
    with pytest.raises(ConfigurationError, match="--fim-split-sample 'ab': is 2 tokens"):
        transform(split_token="ab")


def bytes_between(ids: list[int], separator: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for token in ids:
        if token == separator:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
    "--train-iters 1 --lr 1e-3 --tokenizer-type ByteTokenizer --attention-dropout 0 --split 1,0,0 "
    "--fim-data --fim-rate 0.7 --use-packed-sequence "
)


@pytest.mark.parametrize("more", ["", "--fim-split-sample a --fim-fragment-rate 0.5"])
@pytest.mark.parametrize("strategy", ["rows", "next_fit"])
def test_datasets_hold_changed_documents(strategy: str, more: str, corpus: str):
    flags = f"{FLAGS} --packing-strategy {strategy} --data-path {corpus} {more}"
    config = config_from_flags(flags)
    tokenizer, added = add_fim_tokens(config, ByteTokenizer())
    assert added == list(TOKENS) and tokenizer.vocab_size == 261
    train = build_datasets(config, tokenizer, SampleCounts(100, 0, 0)).train
    again = build_datasets(config, tokenizer, SampleCounts(100, 0, 0)).train
    originals = [bytes(document[:-1]) for document in numbered_documents(200)]
    changed = 0
    if strategy == "rows":
        for index in range(60):
            row = train[index]
            assert row["length"] == row["document_lengths"].sum() <= 33
            assert len(row["document_ids"]) == len(row["document_lengths"])
            assert row["text"].tolist() == again[index]["text"].tolist()
            pieces = numpy.split(row["text"][: row["length"]], row["document_lengths"].cumsum())
            for number, piece in list(zip(row["document_ids"], pieces, strict=False))[:-1]:
                ids = piece.tolist()
                assert ids[-1] == EOD and EOD not in ids[:-1]
                fragments = bytes_between(ids[:-1], ord("a")) if more else [ids[:-1]]
                whole = b"a".join(bytes(undo(part)) for part in fragments)
                assert originals[number].endswith(whole)
                changed += PRE in ids
    else:
        for number, original in enumerate(originals):
            ids = train.read(number, 0, int(train.lengths[number])).tolist()
            assert len(ids) == train.lengths[number]
            assert ids == again.read(number, 0, len(ids)).tolist()
            assert train.read(number, 1, 1).tolist() == ids[1:2]
            fragments = bytes_between(ids[:-1], ord("a")) if more else [ids[:-1]]
            assert b"a".join(bytes(undo(part)) for part in fragments) == original
            changed += PRE in ids
        assert (train.lengths == again.lengths).all()
    assert changed > 20


def test_flags_that_cannot_be_honoured():
    def tokenizer_of(more: str):
        return add_fim_tokens(config_from_flags(f"{FLAGS} --data-path x {more}"), ByteTokenizer())

    with pytest.raises(ConfigurationError, match="must be three different tokens"):
        tokenizer_of("--fim-prefix-token <fim_suffix>")
    with pytest.raises(ConfigurationError, match="--fim-eod-token '<end>': documents end with id"):
        tokenizer_of("--fim-eod-token <end>")
    for flags, message in (
        ("--fim-split-sample a", "--fim-split-sample and --fim-fragment-rate: belong together"),
        ("--fim-rate 1.5", "must be at most 1"),
        ("--sft", "--fim-data: would cut conversations apart"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            tokenizer_of(flags)
    mock = FLAGS + "--mock-data"
    with pytest.raises(ConfigurationError, match="--fim-data: --mock-data has no text"):
        config_from_flags(mock)


def test_two_corpora_keep_their_documents(tmp_path: Path):
    prefixes = [
        write_corpus(tmp_path / name, numbered_documents(30, seed=seed))
        for seed, name in enumerate("ab")
    ]
    config = config_from_flags(
        f"{FLAGS} --packing-strategy next_fit --data-path {prefixes[0]} {prefixes[1]}"
    )
    tokenizer, _ = add_fim_tokens(config, ByteTokenizer())
    train = build_datasets(config, tokenizer, SampleCounts(10, 0, 0)).train
    originals = numbered_documents(30) + numbered_documents(30, seed=1)
    for number, original in enumerate(originals):
        ids = train.read(number, 0, int(train.lengths[number])).tolist()
        assert undo(ids[:-1]) + [EOD] == original
