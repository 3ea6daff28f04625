"""Flags of tokenizers that newer versions of upstream have: each class, each message."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron.packed.arguments import config_from_flags
from megatron.packed.errors import ConfigurationError
from megatron.packed.training.setup import padded_vocab

from .flags import MINIMAL


def refusal(flags: str, base: str = MINIMAL) -> str:
    with pytest.raises(ConfigurationError) as caught:
        config_from_flags(f"{base} {flags}", {"WORLD_SIZE": "2"})
    return str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tokenizer-hf-no-use-fast", "slow tokenizers are programs"),
        ("--tokenizer-metadata x.json", "--tokenizer-type says which one it is"),
        ("--chat-template x", "templates are read from the tokenizer's own files; put it there"),
        ("--tokenizer-prompt-format x", "for conversations give --sft-tokenizer-prompt-format"),
        (
            "--no-tokenizer-sentencepiece-ignore-extra-whitespaces",
            "blanks are kept or dropped as the model was trained to",
        ),
    ],
)
def test_what_would_give_other_ids_is_refused_by_name(flags: str, message: str) -> None:
    text = refusal(flags)
    assert text.startswith(f"{flags} is refused: ") and message in text and "\n" not in text


def test_another_spelling_of_a_refused_flag() -> None:
    assert "--tokenizer-metadata x.json is refused" in refusal("--metadata-path x.json")


@pytest.mark.parametrize(
    ("flags", "used", "why"),
    [
        ("--trust-remote-code", "tokenizer.json", "nothing of it is run"),
        ("--null-tokenizer-pad-id 3", "EOD's id", "padding goes by position"),
        ("--tokenizer-sentencepiece-legacy", "the model's ids", "both give the same ids"),
    ],
)
def test_what_gives_the_same_ids_is_replaced(flags: str, used: str, why: str) -> None:
    (row,) = config_from_flags(f"{MINIMAL} {flags}").replacements
    assert (row.flag, row.used) == (flags.split()[0], used)
    assert why in row.why


def test_what_is_always_so_is_accepted_in_silence() -> None:
    flags = "--tokenizer-hf-use-fast --tokenizer-hf-include-special-tokens"
    assert config_from_flags(f"{MINIMAL} {flags}").replacements == ()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--tokenizer-special-tokens a b",
            "--tokenizer-special-tokens a b: are TikTokenizer's; those of NullTokenizer are in its",
        ),
        (
            "--tokenizer-hf-include-special-tokens --tokenizer-hf-no-include-special-tokens",
            "no-include-special-tokens: exclude each other; keep one",
        ),
        (
            "--null-tokenizer-eod-id 101",
            "--null-tokenizer-eod-id 101: must be at most --vocab-size 100",
        ),
        (
            "--padded-vocab-size 127 --tensor-model-parallel-size 2",
            "--padded-vocab-size 127: must be a multiple of --tensor-model-parallel-size 2",
        ),
    ],
)
def test_flags_of_one_kind_beside_another(flags: str, message: str) -> None:
    text = refusal(flags)
    assert message in text and "\n" not in text


def test_special_tokens_are_named_once() -> None:
    base = MINIMAL.replace(
        "NullTokenizer", "TikTokenizer --tokenizer-model m --tiktoken-pattern v1"
    )
    text = refusal("--tokenizer-special-tokens a --tiktoken-special-tokens a", base)
    assert text.startswith("--tokenizer-special-tokens and --tiktoken-special-tokens: are the same")
    byte = MINIMAL.replace("NullTokenizer", "ByteTokenizer")
    assert "is NullTokenizer's, not ByteTokenizer's" in refusal("--null-tokenizer-eod-id 0", byte)


def test_rows_of_the_embedding() -> None:
    def rows(flags: str, ids: int = 101, processes: int = 1) -> int:
        config = config_from_flags(f"{MINIMAL} {flags}", {"WORLD_SIZE": str(processes)})
        return padded_vocab(config, SimpleNamespace(vocab_size=ids))  # type: ignore[arg-type]

    tensor = " --tensor-model-parallel-size 2"
    assert rows("") == 128
    assert rows("--padded-vocab-size 102") == 102
    assert rows("--padded-vocab-size 102" + tensor, processes=2) == 102
    assert rows("--no-pad-vocab-size") == 101
    assert rows("--no-pad-vocab-size" + tensor, 102, 2) == 102
    with pytest.raises(ConfigurationError, match="--padded-vocab-size 100: must hold the 101 ids"):
        rows("--padded-vocab-size 100")
    with pytest.raises(ConfigurationError, match="101 ids must be a multiple of .*size 2; leave"):
        rows("--no-pad-vocab-size" + tensor, processes=2)
