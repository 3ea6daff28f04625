"""Tokenizers: text to ids and back, chosen by `--tokenizer-type` from one registry.

Special tokens, their ids and the end of a document are those that upstream's classes of the same
name give, so that a corpus which upstream preprocessed means the same here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from megatron.packed.data.gpt2_tokenizer import build_gpt2
from megatron.packed.data.hugging_face_tokenizer import build_hugging_face
from megatron.packed.data.sentencepiece_tokenizer import build_sentencepiece
from megatron.packed.data.tiktoken_tokenizer import build_tiktoken
from megatron.packed.data.tokenizer_base import PackedTokenizer, TokenizerOptions, encodable
from megatron.packed.errors import ConfigurationError, DataError


class ByteTokenizer(PackedTokenizer):
    """UTF-8 bytes as ids 0..255, EOD 256, PAD 257. Needs no files."""

    def __init__(self) -> None:
        self.vocab_size = 258
        self.eod = 256
        self.pad = 257
        self.unique_identifiers = OrderedDict({"class": "ByteTokenizer"})

    def tokenize(self, text: str) -> list[int]:
        """UTF-8 bytes of `text`."""
        return list(encodable(text).encode())

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of the byte ids; EOD and PAD are left out."""
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")


class NullTokenizer(PackedTokenizer):
    """Texts that are ids already, separated by blanks. For benchmarks and tests.

    Ids 0..N-1 come from `--vocab-size N`; EOD is one more id, N, as in upstream up to 0.16, or one
    of the others.

    Source: megatron/core/tokenizers/text/libraries/null_tokenizer.py
    """

    def __init__(self, vocab_size: int, eod: int | None = None) -> None:
        self.eod = self.pad = vocab_size if eod is None else eod
        self.vocab_size = max(vocab_size, self.eod + 1)
        self.unique_identifiers = OrderedDict(
            {"class": "NullTokenizer", "vocab_size": self.vocab_size}
        )
        if self.eod != self.vocab_size - 1:
            self.unique_identifiers["eod"] = self.eod

    def tokenize(self, text: str) -> list[int]:
        """The integers in `text`.

        Raises:
            DataError: if a word is no integer of `[0, vocab_size)`.
        """
        words = text.split()
        try:
            ids = [int(word) for word in words]
        except ValueError as error:
            raise DataError(
                f"--tokenizer-type NullTokenizer reads texts made of integers; found {error}; "
                "use ByteTokenizer or HuggingFaceTokenizer for real text"
            ) from error
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise DataError(
                    f"id {token} in the text is outside NullTokenizer's [0, {self.vocab_size}); "
                    "raise --vocab-size"
                )
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """The ids as decimal numbers."""
        return " ".join(str(token) for token in ids)


def _build_byte(options: TokenizerOptions) -> PackedTokenizer:
    return ByteTokenizer()


def _build_null(options: TokenizerOptions) -> PackedTokenizer:
    if options.vocab_size is None or options.vocab_size < 1:
        raise ConfigurationError(
            f"--tokenizer-type NullTokenizer needs --vocab-size of at least 1, "
            f"got {options.vocab_size}; give --vocab-size N for ids 0..N-1 (EOD becomes N)"
        )
    return NullTokenizer(options.vocab_size, options.null_tokenizer_eod_id)


TOKENIZER_BUILDERS: dict[str, Callable[[TokenizerOptions], PackedTokenizer]] = {
    "GPT2BPETokenizer": build_gpt2,
    "HuggingFaceTokenizer": build_hugging_face,
    "SFTTokenizer": build_hugging_face,
    "SentencePieceTokenizer": build_sentencepiece,
    "GPTSentencePieceTokenizer": build_sentencepiece,
    "Llama2Tokenizer": build_sentencepiece,
    "TikTokenizer": build_tiktoken,
    "ByteTokenizer": _build_byte,
    "NullTokenizer": _build_null,
}


def build_tokenizer(options: TokenizerOptions) -> PackedTokenizer:
    """Build the tokenizer that `--tokenizer-type` names.

    Args:
        options: tokenizer flags, such as `config.data`.

    Returns:
        The tokenizer.

    Raises:
        ConfigurationError: if the type is missing or unknown, or a flag it needs is missing.
        DataError: if its files can't be used.
    """
    known = ", ".join(TOKENIZER_BUILDERS)
    if options.tokenizer_type is None:
        raise ConfigurationError(f"--tokenizer-type is not given; it must be one of {known}")
    builder = TOKENIZER_BUILDERS.get(options.tokenizer_type)
    if builder is None:
        raise ConfigurationError(
            f"--tokenizer-type {options.tokenizer_type} is unknown; it must be one of {known}"
        )
    return builder(options)


def padded_vocab_size(
    vocab_size: int, make_divisible_by: int, tensor_model_parallel_size: int
) -> int:
    """Embedding rows: the vocabulary rounded up so that tensor-parallel ranks share it evenly.

    Args:
        vocab_size: ids the tokenizer has.
        make_divisible_by: `--make-vocab-size-divisible-by`.
        tensor_model_parallel_size: tensor-parallel ranks.

    Returns:
        The smallest multiple of `make_divisible_by * tensor_model_parallel_size` that is not less
        than `vocab_size`.

    Raises:
        ConfigurationError: if a number is below 1.
    """
    for name, value in (
        ("vocabulary size", vocab_size),
        ("--make-vocab-size-divisible-by", make_divisible_by),
        ("--tensor-model-parallel-size", tensor_model_parallel_size),
    ):
        if value < 1:
            raise ConfigurationError(f"{name} is {value}; it must be at least 1")
    multiple = make_divisible_by * tensor_model_parallel_size
    return -(-vocab_size // multiple) * multiple
