"""Tokenizers' files, and texts, that a tokenizer can't do anything with."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.packed.data.conversations import build_chat_format
from megatron.packed.data.tokenizers import build_tokenizer
from tests.unit.data.test_tokenizers import options

from .table import Malformed, assert_refused, cases_of, each, written

VOCABULARY = {"<unk>": 0, "hello": 1, "</s>": 2}


def _word_level(**changes: Any) -> dict[str, Any]:
    model = {"type": "WordLevel", "vocab": VOCABULARY, "unk_token": "<unk>"}
    return {
        "version": "1.0",
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": model,
    } | changes


def _model(**changes: Any) -> dict[str, Any]:
    return _word_level(model={**_word_level()["model"], **changes})


TEMPLATE_WITHOUT_ITS_TOKEN = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<x>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [],
    "special_tokens": {},
}
FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
MODEL = "--tokenizer-model"

# Given: contents of tokenizer.json and tokenizer_config.json.
HUGGING_FACE = cases_of(
    ("a tokenizer cut short", (json.dumps(_word_level())[:70], ""), MODEL, "is no tokenizer.json"),
    ("no tokenizer at all", ("", ""), MODEL, "is no tokenizer.json", "train_tokenizer.py"),
    ("bytes in place of a tokenizer", (b"\xff\xfe", ""), MODEL, "UTF-8"),
    ("JSON of something else", ("null", ""), MODEL, "expected struct Tokenizer"),
    ("an unknown part", (_word_level(pre_tokenizer={"type": "Nope"}), ""), MODEL, "PreTokenizer"),
    ("an open parenthesis", (_word_level(pre_tokenizer={
        "type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}), ""),
     MODEL, "unmatched parenthesis"),
    ("a negative id", (_model(vocab={**VOCABULARY, "x": -1}), ""), MODEL, "integer `-1`"),
    ("an id in the millions", (_model(vocab={**VOCABULARY, "x": 9_000_000}), ""), MODEL,
     "token 'x' has id 9000000, and there are 4 tokens", "number the tokens from 0 on"),
    ("a vocabulary of nothing", (_model(vocab={}), ""), MODEL, "the vocabulary is empty"),
    ("merges of unknown tokens", (_word_level(model={
        "type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a c"]}), ""), MODEL,
     "Token `c` out of vocabulary"),
    ("no end of documents", (_model(vocab={"<unk>": 0, "hello": 1}), ""), MODEL, "--eod-token",
     "no end-of-document token"),
    ("settings nested too deeply", (_word_level(), "[" * 100_000), CONFIG, "nested too deeply"),
    ("settings that are a list", (_word_level(), "[]"), CONFIG, "holds no JSON object"),
    ("settings in no UTF-8", (_word_level(), b"\xff"), CONFIG, "is no JSON", "repair or remove it"),
    ("a setting twice", (_word_level(), '{"eos_token": "</s>", "eos_token": "hello"}'), CONFIG,
     "the key 'eos_token' twice"),
    ("an end that is no token", (_word_level(), '{"eos_token": "zz"}'), "eos_token 'zz'", CONFIG,
     "--eod-token"),
    ("a word without an unknown token", (_model(unk_token="<none>"), ""), MODEL,
     "can't tokenize a text", "Missing [UNK] token"),
    ("a text without an unknown id", (_word_level(model={
        "type": "Unigram", "unk_id": None, "vocab": [["a", 0.0], ["</s>", 0.0]]}), ""), MODEL,
     "can't tokenize a text", "`unk_id` is missing"),
    ("a template without its token", (_word_level(post_processor=TEMPLATE_WITHOUT_ITS_TOKEN), ""),
     MODEL, "can't tokenize a text (no entry found for key)"),
)  # fmt: skip


@each(HUGGING_FACE)
def test_a_tokenizer_file_is_refused(
    case: Malformed, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file, settings = case.given
    written(tmp_path / FILE, json.dumps(file) if isinstance(file, dict) else file)
    if settings:
        written(tmp_path / CONFIG, settings)

    def use() -> None:
        flags = options(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
        build_tokenizer(flags).tokenize("hello you")

    assert_refused(case, use)


# --- GPT-2's files --------------------------------------------------------------------------------


def _bytes() -> dict[str, int]:
    from tokenizers.pre_tokenizers import ByteLevel

    return {byte: number for number, byte in enumerate(sorted(ByteLevel.alphabet()))}


def _gpt2(**more: int) -> str:
    return json.dumps({**_bytes(), "<|endoftext|>": 256, "he": 257, **more})


VOCAB, MERGES = "--vocab-file", "--merge-file"

# Given: contents of vocab.json and merges.txt.
GPT2 = cases_of(
    ("a vocabulary nested too deeply", ('{"a":' * 100_000, ""), VOCAB, "nested too deeply"),
    ("a vocabulary that is a list", ("[]", ""), VOCAB, "must be a JSON object of token to id"),
    ("a fraction for an id", ('{"a": 1.5}', ""), VOCAB, "token 'a' has id 1.5", "from 0 on"),
    ("an id for two tokens", (_gpt2(hi=257), ""), VOCAB, "two tokens share an id"),
    ("a token twice", (_gpt2()[:-1] + ', "he": 258}', ""), VOCAB, "the key 'he' twice"),
    ("an id beyond 64 bits", (_gpt2(hi=1 << 70), ""), VOCAB, "token 'hi' has id 1180591620"),
    ("half a character as a token", (_gpt2(**{"\ud800": 258}), ""), VOCAB, "is no text"),
    ("bytes without a token", ('{"a": 0, "<|endoftext|>": 1}', ""), VOCAB, "255 of the 256 bytes"),
    ("no end of text", (json.dumps(_bytes()), ""), VOCAB, "holds no <|endoftext|>"),
    ("a merge of three", (_gpt2(), "#version: 0.2\nh e l\n"), "merges.txt:2 holds 3 tokens"),
    ("a merge into nothing", (_gpt2(), "h i\n"), "merges.txt:1 uses 'hi'", "belong together"),
    ("merges in no UTF-8", (_gpt2(), b"\xff\xfe"), MERGES, "is no UTF-8 text"),
)  # fmt: skip


@each(GPT2)
def test_files_of_gpt2_are_refused(case: Malformed, tmp_path: Path) -> None:
    vocabulary, merges = case.given
    flags = options(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(written(tmp_path / "vocab.json", vocabulary)),
        merge_file=str(written(tmp_path / "merges.txt", merges)),
    )
    assert_refused(case, lambda: build_tokenizer(flags))


# --- SentencePiece and tiktoken -------------------------------------------------------------------


def _entries(change: Callable[[list[Any]], Any] = lambda entries: entries) -> str:
    tokens = [bytes([number]) for number in range(256)] + [b"a%d" % n for n in range(40)]
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": ""}
        for rank, token in enumerate(tokens)
    ]
    changed = change(entries)
    return json.dumps(entries if changed is None else changed)


TIKTOKEN = {
    "tokenizer_type": "TikTokenizer",
    "tiktoken_pattern": "v2",
    "vocab_size": 300,
    "tiktoken_num_special_tokens": 10,
}
SPECIAL = ("<unk>", "<s>", "</s>")

# Given: content of the model file, and flags.
MODELS = cases_of(
    ("a text for a SentencePiece model", (b"hello", {"tokenizer_type": "Llama2Tokenizer"}), MODEL,
     "is no SentencePiece model"),
    ("an empty SentencePiece model", (b"", {"tokenizer_type": "SentencePieceTokenizer"}), MODEL,
     "m.model"),
    ("zeros for a SentencePiece model", (
        bytes(99), {"tokenizer_type": "GPTSentencePieceTokenizer"}), MODEL,
     "is no SentencePiece model (", "copy it again"),
    ("ranks nested too deeply", ("[" * 100_000, TIKTOKEN), MODEL, "is no JSON (nested too deeply)"),
    ("ranks in an object", ("{}", TIKTOKEN), MODEL, "must be a JSON list of rank"),
    ("a token twice among ranks", (_entries(lambda e: e[270].update(token_bytes="YTA=")), TIKTOKEN),
     MODEL, "entry 270 must have rank 270", "token_bytes of its own"),
    ("a rank twice", (_entries(lambda e: e[260].update(rank=259)), TIKTOKEN), MODEL, "entry 260"),
    ("bytes out of order", (_entries(lambda e: e[1:2] + e[:1] + e[2:]), TIKTOKEN), "entry 0 must"),
    ("a token in no base64", (_entries(lambda e: e[258].update(token_bytes="!!")), TIKTOKEN),
     "entry 258 must have rank 258", "base64-coded"),
    ("an empty token", (_entries(lambda e: e[257].update(token_bytes="")), TIKTOKEN), "entry 257"),
    ("fewer ranks than the vocabulary", (_entries(lambda e: e[:100]), TIKTOKEN), MODEL,
     "holds 100 tokens, fewer than the 290", "lower --vocab-size"),
    ("an unknown pattern", (_entries(), TIKTOKEN | {"tiktoken_pattern": "v3"}),
     "--tiktoken-pattern v3: must be one of v1, v2"),
    ("a special token twice", (_entries(), TIKTOKEN | {
        "tiktoken_special_tokens": (*SPECIAL, "<s>")}), "--tiktoken-special-tokens", "twice"),
    ("a special token without text", (_entries(), TIKTOKEN | {
        "tiktoken_special_tokens": (*SPECIAL, "")}), "--tiktoken-special-tokens", "empty"),
    ("a special token named like a filler", (_entries(), TIKTOKEN | {
        "tiktoken_special_tokens": (*SPECIAL, "<SPECIAL_5>")}), "<SPECIAL_5>", "names a token"),
    ("special tokens without an end", (_entries(), TIKTOKEN | {
        "tiktoken_special_tokens": ("<unk>", "<s>")}), "must hold </s> too"),
    ("half a character as a special token", (_entries(), TIKTOKEN | {
        "tiktoken_special_tokens": (*SPECIAL, "\udcff")}), "'\\udcff' is no UTF-8 text"),
    ("no room for the bytes", (_entries(), TIKTOKEN | {"vocab_size": 100}),
     "--vocab-size leaves 90", "fewer than the 256 bytes"),
    ("no room for special tokens", (_entries(), TIKTOKEN | {"tiktoken_num_special_tokens": 300}),
     "--tiktoken-num-special-tokens 300", "less than the vocabulary of 300"),
)  # fmt: skip


@each(MODELS)
def test_a_model_file_is_refused(case: Malformed, tmp_path: Path) -> None:
    content, flags = case.given
    pytest.importorskip("tiktoken" if flags is TIKTOKEN else "sentencepiece")
    path = written(tmp_path / "m.model", content)
    assert_refused(case, lambda: build_tokenizer(options(tokenizer_model=str(path), **flags)))


# --- chat templates -------------------------------------------------------------------------------

CHAT_TEMPLATE, OWN = "the tokenizer's chat template", "chat_template.jinja"

# Given: name and content of the file that has the template.
TEMPLATES = cases_of(
    ("template settings that are null", (CONFIG, "null"), CONFIG, "holds no JSON object; repair"),
    ("a template without a name", (CONFIG, '{"chat_template": ["a"]}'), CONFIG, "holds a template"),
    ("a default that is empty", (CONFIG, '{"chat_template": [{"name": "default"}]}'), CONFIG,
     "nor chat_template.jinja beside it"),
    ("a template in no UTF-8", (OWN, b"\xff"), "chat_template.jinja can't be read"),
    ("an unfinished template", (OWN, "{% for %}"), CHAT_TEMPLATE, "can't be read, line 1"),
    ("an unknown filter", (OWN, "{{ 1 | nofilter }}"), CHAT_TEMPLATE, "No filter named"),
    ("a template nested too deeply", (OWN, "{{" + "(" * 2000 + "1" + ")" * 2000 + "}}"),
     CHAT_TEMPLATE, "nested too deeply"),
    ("a template that divides by 0", (OWN, "{{ 1 / 0 }}"), CHAT_TEMPLATE, "fails: division by"),
    ("a template that calls itself", (OWN, "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
     CHAT_TEMPLATE, "fails: maximum recursion"),
    ("a template that takes all memory", (OWN, "{{ 'a' * 10**15 }}"), CHAT_TEMPLATE, "MemoryError"),
    ("a template that leaves its sandbox", (OWN, "{{ ''.__class__.__mro__ }}"), CHAT_TEMPLATE,
     "'__class__' of 'str' object is unsafe"),
    ("a template that says no", (OWN, "{{ raise_exception('no tools here') }}"), "no tools here"),
)  # fmt: skip


@each(TEMPLATES)
def test_a_chat_template_is_refused(case: Malformed, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    from megatron.packed.data.chat_formats import Message

    name, content = case.given
    written(tmp_path / name, content)
    messages = [Message("user", "a"), Message("assistant", "b")]
    assert_refused(case, lambda: build_chat_format("chat-template", str(tmp_path)).render(messages))


CASES = (*HUGGING_FACE, *GPT2, *MODELS, *TEMPLATES)
