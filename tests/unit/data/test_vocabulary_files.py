from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import pytest

from megatron.packed.data.tokenizer_base import PackedTokenizer
from megatron.packed.data.tokenizers import build_tokenizer
from megatron.packed.errors import ConfigurationError, DataError

from .test_tokenizers import options

TEXT = "the cat sat on the mat; the naïve cat  ate 42 rats\n\tand left."


def byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in of each byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in kept}
    spare = 256
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(spare)
            spare += 1
    return table


MERGES = ["t h", "th e", "Ġ the", "a t", "c at", "Ġ cat"]


def write_bpe(folder: Path, merges: list[str] = MERGES, **extra: int) -> dict[str, str]:
    tokens = [*byte_alphabet().values(), *("".join(merge.split()) for merge in MERGES)]
    vocabulary = {token: number for number, token in enumerate([*tokens, "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps({**vocabulary, **extra}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    return {
        "tokenizer_type": "GPT2BPETokenizer",
        "vocab_file": str(folder / "vocab.json"),
        "merge_file": str(folder / "merges.txt"),
    }


def bpe_by_hand(text: str, vocabulary: dict[str, int]) -> list[int]:
    """Merge the lowest rank first, word by word, as the BPE paper says."""
    import regex

    words = regex.findall(
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", text
    )
    table, ids = byte_alphabet(), []
    ranks = {tuple(merge.split()): rank for rank, merge in enumerate(MERGES)}
    for word in words:
        parts = [table[byte] for byte in word.encode()]
        while True:
            pairs = [
                (ranks.get((a, b), 1 << 30), i)
                for i, (a, b) in enumerate(zip(parts[:-1], parts[1:], strict=True))
            ]
            rank, at = min(pairs, default=(1 << 30, 0))
            if rank == 1 << 30:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [vocabulary[part] for part in parts]
    return ids


def test_gpt2_merges_as_by_hand_and_reads_back(tmp_path: Path):
    flags = write_bpe(tmp_path)
    tokenizer = build_tokenizer(options(**flags))
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    ids = tokenizer.tokenize(TEXT)
    assert ids == bpe_by_hand(TEXT, vocabulary)
    assert tokenizer.tokenize_batch([TEXT, ""]) == [ids, []]
    assert tokenizer.detokenize(ids) == TEXT
    assert tokenizer.vocab_size == len(vocabulary)
    assert tokenizer.eod == tokenizer.pad == vocabulary["<|endoftext|>"]
    assert tokenizer.token_id("cat") == vocabulary["cat"] and tokenizer.token_id("zz") is None
    # A document can't end itself.
    assert tokenizer.eod not in tokenizer.tokenize("<|endoftext|>")


def test_gpt2_faults(tmp_path: Path):
    flags = write_bpe(tmp_path)
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    good = vocab.read_text(), merges.read_text()

    def check(message: str, *, vocabulary: str = good[0], merge: str | bytes = good[1]) -> None:
        vocab.write_text(vocabulary)
        merges.write_bytes(merge if isinstance(merge, bytes) else merge.encode())
        with pytest.raises(DataError, match=message):
            build_tokenizer(options(**flags))

    whole = json.loads(good[0])
    check("is no JSON", vocabulary="{")
    check("must be a JSON object", vocabulary="[]")
    check("must be a JSON object", vocabulary="{}")
    check("has id 'x'", vocabulary=json.dumps({**whole, "a": "x"}))
    check("has id -1", vocabulary=json.dumps({**whole, "a": -1}))
    check("two tokens share an id", vocabulary=json.dumps({**whole, "a": 0, "b": 0}))
    check(
        "holds no <|endoftext|>".replace("|", "\\|"),
        vocabulary=json.dumps({t: i for t, i in whole.items() if t != "<|endoftext|>"}),
    )
    check(
        "no token for 1 of the 256 bytes",
        vocabulary=json.dumps({t: i for t, i in whole.items() if t != "a"}),
    )
    check("merges.txt:2 holds 3 tokens", merge="#version: 0.2\nt h e\n")
    check("merges.txt:2 holds 1 tokens", merge="#version: 0.2\nth\n")
    check("uses 'xx'", merge="x x\n")
    check("is no UTF-8 text", merge=b"\xff\xfe")
    vocab.write_text(good[0])
    merges.unlink()
    with pytest.raises(DataError, match="merges.txt: can't be read"):
        build_tokenizer(options(**flags))
    with pytest.raises(ConfigurationError, match="needs --vocab-file and --merge-file"):
        build_tokenizer(options(tokenizer_type="GPT2BPETokenizer"))


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("sentencepiece")
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join([TEXT, "a dog and a frog sat here", "rats ate the mat"] * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "m"),
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
        byte_fallback=False,
    )
    return str(folder / "m.model")


def sentencepiece(kind: str, model: str, **flags: object) -> PackedTokenizer:
    return build_tokenizer(options(tokenizer_type=kind, tokenizer_model=model, **flags))


def test_sentencepiece_kinds_add_what_upstream_adds(sentencepiece_model: str):
    from megatron.core.tokenizers.text.libraries.sentencepiece_tokenizer import (
        SentencePieceTokenizer as Core,
    )

    core = Core(sentencepiece_model)
    expected = core.text_to_ids("the cat sat")
    size = core.tokenizer.get_piece_size()
    gpt = sentencepiece("GPTSentencePieceTokenizer", sentencepiece_model)
    assert gpt.tokenize("the cat sat") == expected
    assert (gpt.vocab_size, gpt.eod) == (size, core.tokenizer.eos_id())
    llama = sentencepiece("Llama2Tokenizer", sentencepiece_model)
    assert llama.tokenize("the cat sat") == [core.tokenizer.bos_id(), *expected]
    assert (llama.vocab_size, llama.eod) == (size, core.tokenizer.eos_id())

    plain = sentencepiece("SentencePieceTokenizer", sentencepiece_model, vocab_extra_ids=3)
    assert plain.tokenize("the cat sat") == expected
    # After the model's own: five specials, then the extra ids; BOS and EOS are the model's.
    added = ["<CLS>", "<SEP>", "<EOD>", "<MASK>", "<PAD>", *(f"<extra_id_{i}>" for i in range(3))]
    assert [plain.token_id(token) - size for token in added] == list(range(8))
    assert (plain.vocab_size, plain.eod, plain.pad) == (size + 8, size + 2, size + 4)
    assert plain.detokenize([*expected, plain.eod, *expected]) == "the cat sat<EOD>the cat sat"
    assert plain.token_id("no such token") is None


def test_sentencepiece_faults(
    sentencepiece_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    kind = "GPTSentencePieceTokenizer"
    broken = tmp_path / "broken.model"
    broken.write_bytes(Path(sentencepiece_model).read_bytes()[:100])
    with pytest.raises(DataError, match="is no SentencePiece model"):
        sentencepiece(kind, str(broken))
    with pytest.raises(DataError, match="there is no such file"):
        sentencepiece(kind, str(tmp_path / "none.model"))
    with pytest.raises(ConfigurationError, match="needs --tokenizer-model"):
        build_tokenizer(options(tokenizer_type=kind))
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ConfigurationError, match=r"pip install megatron-packed\[sentencepiece\]"):
        sentencepiece(kind, sentencepiece_model)


def write_tiktoken(path: Path, words: tuple[str, ...] = ("the", " the", " cat")) -> str:
    tokens = [bytes([byte]) for byte in range(256)] + [word.encode() for word in words]
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(t).decode(), "token_str": t.decode("latin1")}
        for rank, t in enumerate(tokens)
    ]
    path.write_text(json.dumps(entries))
    return str(path)


def tiktoken(model: str, **flags: object) -> PackedTokenizer:
    return build_tokenizer(
        options(
            tokenizer_type="TikTokenizer",
            tokenizer_model=model,
            **{
                "tiktoken_pattern": "v2",
                "tiktoken_num_special_tokens": 20,
                "vocab_size": 20 + 259,
                **flags,
            },
        )
    )


def test_tiktoken_is_megatron_cores(tmp_path: Path):
    pytest.importorskip("tiktoken")
    from megatron.core.tokenizers.text.libraries.tiktoken_tokenizer import TikTokenTokenizer

    model = write_tiktoken(tmp_path / "vocab.json")
    for pattern in ("v1", "v2"):
        core = TikTokenTokenizer(model, num_special_tokens=20, vocab_size=279, pattern=pattern)
        ours = tiktoken(model, tiktoken_pattern=pattern)
        ids = ours.tokenize(TEXT)
        assert ids == core.tokenizer.encode(TEXT)
        assert ours.detokenize(ids) == TEXT
        assert (ours.vocab_size, ours.eod, ours.pad) == (279, core._eos_id, core._pad_id)
    assert ours.tokenize("</s>") != [ours.eod] and ours.tokenize_chat("</s>") == [ours.eod]
    assert ours.token_id("<SPECIAL_19>") == 19
    assert ours.token_id(" cat") == 20 + 258 and ours.token_id("zebra") is None
    short = tiktoken(model, tiktoken_special_tokens=["<unk>", "<s>", "</s>"])
    assert (short.eod, short.pad, short.token_id("<SPECIAL_3>")) == (2, 2, 3)
    newer = tiktoken(model, special_tokens=["<unk>", "<s>", "</s>"])
    assert newer.unique_identifiers == short.unique_identifiers


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"tiktoken_pattern": None}, "needs --tiktoken-pattern"),
        ({"tiktoken_pattern": "v3"}, "--tiktoken-pattern v3"),
        ({"tiktoken_special_tokens": ["<unk>", "<s>"]}, "must hold </s> too"),
        ({"tiktoken_special_tokens": ["<unk>", "<s>", "</s>", "<s>"]}, "names a token twice"),
        ({"tiktoken_num_special_tokens": 5}, "must hold the 7 special tokens"),
        ({"vocab_size": 10}, "be less than the vocabulary of 10"),
    ],
)
def test_tiktoken_flags(flags: dict[str, object], message: str, tmp_path: Path):
    pytest.importorskip("tiktoken")
    with pytest.raises(ConfigurationError, match=message):
        tiktoken(write_tiktoken(tmp_path / "vocab.json"), **flags)


def test_tiktoken_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("tiktoken")
    path = tmp_path / "vocab.json"
    model = write_tiktoken(path)
    entries = json.loads(path.read_text())

    def check(message: str, content: str) -> None:
        path.write_text(content)
        with pytest.raises(DataError, match=message):
            tiktoken(model)

    check("is no JSON", "[")
    check("must be a JSON list", "{}")
    check("holds 100 tokens, fewer than the 259", json.dumps(entries[:100]))
    check("entry 3 must have rank 3", json.dumps([*entries[:3], *entries[4:], entries[3]]))
    check("entry 258", json.dumps([*entries[:258], {**entries[257], "rank": 258}]))
    check("entry 5 must", json.dumps([*entries[:5], {"rank": 5}, *entries[6:]]))
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(ConfigurationError, match=r"pip install megatron-packed\[tiktoken\]"):
        tiktoken(model)
