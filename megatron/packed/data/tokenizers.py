"""Tokenizers: text to ids and back, chosen by `--tokenizer-type` from one registry."""

from __future__ import annotations

import contextlib
import hashlib
import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron.packed.errors import ConfigurationError, DataError
from megatron.packed.json_text import read_json

if TYPE_CHECKING:
    import tokenizers

GPT2_EOD = "<|endoftext|>"
# Ids without a token that a vocabulary may have, beside as many as it has tokens.
_SPARE_IDS = 1 << 17
USUAL_EOD_TOKENS = (GPT2_EOD, "</s>")


class TokenizerOptions(Protocol):
    """The flags a tokenizer is built from; `config.data` has them."""

    @property
    def tokenizer_type(self) -> str | None: ...
    @property
    def tokenizer_model(self) -> str | None: ...
    @property
    def vocab_size(self) -> int | None: ...
    @property
    def eod_token(self) -> str | None: ...
    @property
    def vocab_file(self) -> str | None: ...
    @property
    def merge_file(self) -> str | None: ...
    @property
    def vocab_extra_ids(self) -> int: ...
    @property
    def tiktoken_pattern(self) -> str | None: ...
    @property
    def tiktoken_num_special_tokens(self) -> int: ...
    @property
    def tiktoken_special_tokens(self) -> Sequence[str] | None: ...
    @property
    def special_tokens(self) -> Sequence[str] | None: ...
    @property
    def null_tokenizer_eod_id(self) -> int | None: ...
    @property
    def tokenizer_hf_no_include_special_tokens(self) -> bool: ...


class PackedTokenizer(ABC):
    """What the data path and megatron-core's GPTDataset ask of a tokenizer.

    Attributes:
        vocab_size: one more than the largest id, before padding to a multiple.
        eod: id that ends a document.
        pad: id that fills the end of a row; may equal `eod`, since masks go by position.
        unique_identifiers: what tells this tokenizer from another; part of the index cache key.
    """

    vocab_size: int
    eod: int
    pad: int
    unique_identifiers: OrderedDict[str, Any]

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Ids of one text, without EOD.

        Args:
            text: any string.
        """

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts; faster than one by one where the library has a batch call.

        Args:
            texts: any strings.
        """
        return [self.tokenize(text) for text in texts]

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ids.

        Args:
            ids: ids in `[0, vocab_size)`.
        """

    def tokenize_chat(self, text: str) -> list[int]:
        """Ids of a piece of a rendered conversation.

        Nothing is added in front, and names of special tokens are special tokens where the
        tokenizer has them.

        Args:
            text: any string.
        """
        return self.tokenize(text)

    def token_id(self, token: str) -> int | None:
        """Id of a token by its text; None where the vocabulary has none of that text.

        Args:
            token: text of one token, such as `<fim_prefix>`.
        """
        return None


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


class HuggingFaceTokenizer(PackedTokenizer):
    """A `tokenizer.json`, read by the `tokenizers` library alone.

    Special tokens of the file's own post-processor (such as a BOS) are added to every text, as
    upstream does by default.

    Args:
        model: a tokenizer.json, or a folder that holds one.
        eod_token: the document separator; None takes `eos_token` of tokenizer_config.json, else
            `<|endoftext|>` or `</s>` where the vocabulary has it.
        adds_special_tokens: False leaves out what the post-processor adds.

    Raises:
        DataError: if the file is missing or malformed, or no EOD can be found.
    """

    def __init__(
        self, model: str | Path, eod_token: str | None = None, adds_special_tokens: bool = True
    ) -> None:
        self._path = path = _tokenizer_json(Path(model))
        self._tokenizer = _read_tokenizer_json(path)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"--tokenizer-model {path}: the vocabulary is empty; train it anew")
        # Not len(): ids may have gaps, and the embedding must hold the largest.
        self.vocab_size = rows_for(f"--tokenizer-model {path}", vocabulary)
        settings = _read_settings(path.with_name("tokenizer_config.json"))
        self.eod = _find_eod(vocabulary, settings, eod_token, path)
        pad_token = _token_text(settings.get("pad_token"))
        self.pad = vocabulary.get(pad_token, self.eod) if pad_token else self.eod
        self._inv_vocab: dict[int, str] | None = None
        self.unique_identifiers = OrderedDict(
            {
                "class": "HuggingFaceTokenizer",
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
                "eod": self.eod,
            }
        )
        self._adds_special_tokens = adds_special_tokens
        if not adds_special_tokens:
            self.unique_identifiers["adds_special_tokens"] = False

    @property
    def inv_vocab(self) -> dict[int, str]:
        """Token text by id."""
        if self._inv_vocab is None:
            vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
            self._inv_vocab = {token: text for text, token in vocabulary.items()}
        return self._inv_vocab

    def tokenize(self, text: str) -> list[int]:
        """Ids of `text`."""
        adds = self._adds_special_tokens
        with self._complaints():
            return self._tokenizer.encode(encodable(text), add_special_tokens=adds).ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts in one call of the library."""
        # encode_batch_fast leaves out the character offsets, which nothing here reads.
        clean = [encodable(text) for text in texts]
        encode, adds = self._tokenizer.encode_batch_fast, self._adds_special_tokens
        with self._complaints():
            return [encoding.ids for encoding in encode(clean, add_special_tokens=adds)]

    def tokenize_chat(self, text: str) -> list[int]:
        """Ids of `text` without what the post-processor adds."""
        with self._complaints():
            return self._tokenizer.encode(encodable(text), add_special_tokens=False).ids

    @contextlib.contextmanager
    def _complaints(self) -> Iterator[None]:
        """Turn the library's errors about a text into one that names the file."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # what panics in Rust is no Exception
            raise DataError(
                f"--tokenizer-model {self._path}: can't tokenize a text ({_first_line(error)}); "
                "give it an unknown token, or save it again with tools/train_tokenizer.py"
            ) from error

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def token_id(self, token: str) -> int | None:
        """Id of a token of the vocabulary."""
        return self._tokenizer.token_to_id(token)


def _build_byte(options: TokenizerOptions) -> PackedTokenizer:
    return ByteTokenizer()


def _build_null(options: TokenizerOptions) -> PackedTokenizer:
    if options.vocab_size is None or options.vocab_size < 1:
        raise ConfigurationError(
            f"--tokenizer-type NullTokenizer needs --vocab-size of at least 1, "
            f"got {options.vocab_size}; give --vocab-size N for ids 0..N-1 (EOD becomes N)"
        )
    return NullTokenizer(options.vocab_size, options.null_tokenizer_eod_id)


def _build_hugging_face(options: TokenizerOptions) -> PackedTokenizer:
    if not options.tokenizer_model:
        raise ConfigurationError(
            f"--tokenizer-type {options.tokenizer_type} needs --tokenizer-model; "
            "give a tokenizer.json or a folder that holds one"
        )
    adds = not options.tokenizer_hf_no_include_special_tokens
    return HuggingFaceTokenizer(options.tokenizer_model, options.eod_token, adds)


def _from_vocabulary_files(builder: str) -> Callable[[TokenizerOptions], PackedTokenizer]:
    def build(options: TokenizerOptions) -> PackedTokenizer:
        from megatron.packed.data import vocabulary_files  # which builds on this module

        return getattr(vocabulary_files, builder)(options)

    return build


TOKENIZER_BUILDERS: dict[str, Callable[[TokenizerOptions], PackedTokenizer]] = {
    "GPT2BPETokenizer": _from_vocabulary_files("build_gpt2"),
    "HuggingFaceTokenizer": _build_hugging_face,
    "SFTTokenizer": _build_hugging_face,
    "SentencePieceTokenizer": _from_vocabulary_files("build_sentencepiece"),
    "GPTSentencePieceTokenizer": _from_vocabulary_files("build_sentencepiece"),
    "Llama2Tokenizer": _from_vocabulary_files("build_sentencepiece"),
    "TikTokenizer": _from_vocabulary_files("build_tiktoken"),
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


def encodable(text: str) -> str:
    """The text with "?" for lone surrogates, which JSON escapes can carry and UTF-8 can't.

    Args:
        text: any string.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text


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


def _tokenizer_json(model: Path) -> Path:
    is_folder = os.path.isdir(model)
    path = model / "tokenizer.json" if is_folder else model
    if os.path.isfile(path):
        return path
    reason = "the folder holds no tokenizer.json" if is_folder else "there is no such file"
    raise DataError(
        f"--tokenizer-model {model}: {reason}; give a tokenizer.json on this machine, or a folder "
        "that holds one (names of models on a hub are not looked up)"
    )


def _read_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    # Imported here: `--help`, ByteTokenizer and NullTokenizer do without the library.
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # bare Exception for every kind of bad file, or a panic
        raise DataError(
            f"--tokenizer-model {path} is no tokenizer.json of the `tokenizers` library "
            f"({_first_line(error)}); save it again with tools/train_tokenizer.py or "
            "Tokenizer.save()"
        ) from error


def rows_for(where: str, vocabulary: dict[str, int]) -> int:
    """Rows of an embedding that holds every id.

    Args:
        where: flag and file, for messages.
        vocabulary: ids by token.

    Raises:
        DataError: most rows would be of no token, as after a slip in one id.
    """
    token, largest = max(vocabulary.items(), key=lambda item: item[1])
    if largest >= 2 * len(vocabulary) + _SPARE_IDS:
        raise DataError(
            f"{where}: token {token!r} has id {largest}, and there are {len(vocabulary)} tokens: "
            "nearly all rows of the embedding would be of none; number the tokens from 0 on"
        )
    return largest + 1


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _read_settings(path: Path) -> dict[str, Any]:
    if not os.path.isfile(path):
        return {}
    try:
        settings = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no JSON ({error}); repair or remove it") from error
    if not isinstance(settings, dict):
        raise DataError(f"{path} holds no JSON object; repair or remove it")
    return settings


def _token_text(entry: Any) -> str | None:
    # transformers writes a token as a string, or as an object with its text in "content".
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _find_eod(
    vocabulary: dict[str, int], settings: dict[str, Any], eod_token: str | None, path: Path
) -> int:
    if eod_token is not None:
        if eod_token not in vocabulary:
            raise DataError(
                f"--eod-token {eod_token!r} is not in the vocabulary of {path}; "
                "give a token that it holds"
            )
        return vocabulary[eod_token]
    eos_token = _token_text(settings.get("eos_token"))
    if eos_token is not None:
        if eos_token not in vocabulary:
            raise DataError(
                f"eos_token {eos_token!r} of {path.with_name('tokenizer_config.json')} is not in "
                f"the vocabulary of {path}; name the document separator with --eod-token"
            )
        return vocabulary[eos_token]
    for token in USUAL_EOD_TOKENS:
        if token in vocabulary:
            return vocabulary[token]
    raise DataError(
        f"no end-of-document token for --tokenizer-model {path}: tokenizer_config.json names no "
        f"eos_token and the vocabulary lacks {' and '.join(USUAL_EOD_TOKENS)}; "
        "name one with --eod-token"
    )
