from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from megatron.packed.accelerator.compat import core_version
from megatron.packed.data.hugging_face_tokenizer import HuggingFaceTokenizer
from megatron.packed.data.tokenizers import (
    TOKENIZER_BUILDERS,
    ByteTokenizer,
    NullTokenizer,
    build_tokenizer,
    padded_vocab_size,
)
from megatron.packed.errors import ConfigurationError, DataError


def options(**flags: object) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            "tokenizer_type": None,
            "tokenizer_model": None,
            "vocab_size": None,
            "eod_token": None,
            "vocab_file": None,
            "merge_file": None,
            "vocab_extra_ids": 0,
            "tiktoken_pattern": None,
            "tiktoken_num_special_tokens": 1000,
            "tiktoken_special_tokens": None,
            "special_tokens": None,
            "null_tokenizer_eod_id": None,
            "tokenizer_hf_no_include_special_tokens": False,
            **flags,
        }
    )


def save_tokenizer(
    folder: Path, tokens: list[str], settings: object = None, bos: str | None = None
) -> Path:
    """A word-level tokenizer.json with exactly these tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokens.index(bos))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_bytes_round_trip():
    tokenizer = ByteTokenizer()
    text = "naïve 𝄞 text\n"
    ids = tokenizer.tokenize(text)
    assert ids == list(text.encode())
    assert tokenizer.detokenize([*ids, tokenizer.eod, tokenizer.pad]) == text
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (258, 256, 257)
    assert tokenizer.tokenize("\ud800") == [ord("?")]


def test_null_tokenizer_adds_one_id_for_eod_as_megatron_core_does():
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer as Core

    ours, core = NullTokenizer(100), Core(100)
    assert (ours.vocab_size, ours.eod) == (101, 100)
    if core_version() < (0, 19):  # which takes the last of the 100 for it; ours never moves an id
        assert (core.vocab_size, core.eod) == (101, 100)
    assert ours.tokenize(" 3 99  100") == [3, 99, 100]
    assert ours.detokenize([3, 99]) == "3 99"


@pytest.mark.parametrize("text", ["3 x", "101", "-1"])
def test_null_tokenizer_refuses_what_is_no_id(text: str):
    with pytest.raises(DataError, match="NullTokenizer"):
        NullTokenizer(100).tokenize(text)


def test_file_and_folder_are_the_same_tokenizer(tmp_path: Path):
    folder = save_tokenizer(tmp_path / "t", ["<unk>", "a", "b", "</s>"])
    from_folder = HuggingFaceTokenizer(folder)
    from_file = HuggingFaceTokenizer(folder / "tokenizer.json")
    assert from_folder.unique_identifiers == from_file.unique_identifiers
    assert from_folder.tokenize("a b a") == [1, 2, 1]
    assert from_folder.tokenize_batch(["a", "", "b b"]) == [[1], [], [2, 2]]
    assert from_folder.detokenize([1, 3]) == "a </s>"
    assert from_folder.inv_vocab[3] == "</s>"
    assert from_folder.vocab_size == 4


def test_lone_surrogates_become_question_marks(tmp_path: Path):
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path, ["<unk>", "a?", "</s>"]))
    assert tokenizer.tokenize("a\ud800") == tokenizer.tokenize_batch(["a\udfff"])[0] == [1]


def test_post_processor_tokens_are_kept(tmp_path: Path):
    tokenizer = HuggingFaceTokenizer(
        save_tokenizer(tmp_path, ["<unk>", "<s>", "a", "</s>"], bos="<s>")
    )
    assert tokenizer.tokenize("a a") == tokenizer.tokenize_batch(["a a"])[0] == [1, 2, 2]


def test_post_processor_tokens_are_left_out_on_request(tmp_path: Path):
    folder = save_tokenizer(tmp_path, ["<unk>", "<s>", "a", "</s>"], bos="<s>")
    flags = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}
    plain = build_tokenizer(options(**flags, tokenizer_hf_no_include_special_tokens=True))
    assert plain.tokenize("a a") == plain.tokenize_batch(["a a"])[0] == [2, 2]
    usual = build_tokenizer(options(**flags))
    assert usual.tokenize("a a") == [1, 2, 2]
    assert usual.unique_identifiers != plain.unique_identifiers


def test_null_tokenizer_ends_documents_with_the_id_it_is_given():
    flags = {"tokenizer_type": "NullTokenizer", "vocab_size": 100}
    last = build_tokenizer(options(**flags, null_tokenizer_eod_id=99))
    assert (last.vocab_size, last.eod, last.pad) == (100, 99, 99)
    first = build_tokenizer(options(**flags, null_tokenizer_eod_id=0))
    further = build_tokenizer(options(**flags, null_tokenizer_eod_id=100))
    assert (further.vocab_size, further.eod) == (101, 100)
    assert further.unique_identifiers == NullTokenizer(100).unique_identifiers
    assert first.unique_identifiers != NullTokenizer(99).unique_identifiers


def test_vocab_size_counts_gaps(tmp_path: Path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "</s>": 9}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert HuggingFaceTokenizer(tmp_path).vocab_size == 10


TOKENS = ["<unk>", "<|endoftext|>", "</s>", "<end>", "<pad>"]


@pytest.mark.parametrize(
    "tokens, settings, flag, eod",
    [
        (TOKENS, {"eos_token": "<end>"}, None, "<end>"),
        (TOKENS, {"eos_token": {"content": "<end>", "lstrip": False}}, None, "<end>"),
        (TOKENS, {"eos_token": None}, None, "<|endoftext|>"),
        (TOKENS, None, None, "<|endoftext|>"),
        (["<unk>", "</s>"], None, None, "</s>"),
        (["<unk>", "<end>"], None, "<end>", "<end>"),
        (TOKENS, {"eos_token": "<end>"}, "</s>", "</s>"),
    ],
)
def test_eod(tmp_path: Path, tokens: list[str], settings: object, flag: str | None, eod: str):
    folder = save_tokenizer(tmp_path, tokens, settings)
    assert HuggingFaceTokenizer(folder, flag).eod == tokens.index(eod)


def test_pad_is_the_files_own_or_eod(tmp_path: Path):
    with_pad = save_tokenizer(tmp_path / "a", TOKENS, {"pad_token": "<pad>"})
    assert HuggingFaceTokenizer(with_pad).pad == TOKENS.index("<pad>")
    without = HuggingFaceTokenizer(save_tokenizer(tmp_path / "b", TOKENS))
    assert without.pad == without.eod


def test_bad_tokenizer_files(tmp_path: Path):
    def check(model: Path, message: str, eod_token: str | None = None) -> None:
        flags = options(
            tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(model), eod_token=eod_token
        )
        with pytest.raises(DataError, match=message) as raised:
            build_tokenizer(flags)
        assert "\n" not in str(raised.value)

    check(tmp_path / "nowhere", "there is no such file")
    (tmp_path / "empty").mkdir()
    check(tmp_path / "empty", "the folder holds no tokenizer.json")
    broken = tmp_path / "broken.json"
    broken.write_text('{"model": ')
    check(broken, "is no tokenizer.json")
    broken.write_text('{"a": 1}')
    check(broken, "is no tokenizer.json")
    plain = save_tokenizer(tmp_path / "plain", ["<unk>", "a"])
    check(plain, "name one with --eod-token")
    check(plain, "--eod-token '<x>' is not in the vocabulary", "<x>")
    check(save_tokenizer(tmp_path / "eos", TOKENS, {"eos_token": "<x>"}), "eos_token '<x>'")
    check(save_tokenizer(tmp_path / "list", TOKENS, ["eos"]), "holds no JSON object")
    settings = save_tokenizer(tmp_path / "cut", TOKENS, {}) / "tokenizer_config.json"
    settings.write_text("{")
    check(tmp_path / "cut", "is no JSON")


@pytest.mark.parametrize(
    "flags, message",
    [
        ({}, "--tokenizer-type is not given"),
        ({"tokenizer_type": "Magic"}, "Magic is unknown; it must be one of GPT2BPETokenizer"),
        ({"tokenizer_type": "NullTokenizer"}, "needs --vocab-size"),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 0}, "needs --vocab-size"),
        ({"tokenizer_type": "HuggingFaceTokenizer"}, "needs --tokenizer-model"),
    ],
)
def test_bad_flags(flags: dict[str, object], message: str):
    with pytest.raises(ConfigurationError, match=message):
        build_tokenizer(options(**flags))


def test_every_kind_has_what_the_data_path_asks_for(tmp_path: Path):
    folder = save_tokenizer(tmp_path, TOKENS)
    # Those with files of their own kind are tested in test_vocabulary_files.py.
    for kind in ("HuggingFaceTokenizer", "SFTTokenizer", "ByteTokenizer", "NullTokenizer"):
        assert kind in TOKENIZER_BUILDERS
        tokenizer = build_tokenizer(
            options(tokenizer_type=kind, vocab_size=100, tokenizer_model=str(folder))
        )
        assert 0 <= tokenizer.eod < tokenizer.vocab_size
        assert 0 <= tokenizer.pad < tokenizer.vocab_size
        assert json.dumps(tokenizer.unique_identifiers)


def test_padded_vocab_size():
    assert padded_vocab_size(50257, 128, 1) == 50304
    assert padded_vocab_size(258, 128, 2) == 512
    assert padded_vocab_size(512, 128, 4) == 512
    for bad in ((0, 128, 1), (10, 0, 1), (10, 128, 0)):
        with pytest.raises(ConfigurationError, match="at least 1"):
            padded_vocab_size(*bad)


def test_the_module_loads_without_torch_and_transformers():
    code = (
        "import sys, megatron.packed.data.tokenizers as t; t.ByteTokenizer(); "
        "print([m for m in ('torch', 'transformers', 'tokenizers') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
