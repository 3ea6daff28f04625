"""HuggingFaceTokenizer: a `tokenizer.json`, read by the `tokenizers` library alone."""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.packed.data.tokenizer_base import (
    GPT2_EOD,
    PackedTokenizer,
    TokenizerOptions,
    encodable,
)
from megatron.packed.data.vocabulary_files import file_sha256, read_settings, rows_for
from megatron.packed.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    import tokenizers

USUAL_EOD_TOKENS = (GPT2_EOD, "</s>")


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
        settings = read_settings(path.with_name("tokenizer_config.json"))
        self.eod = _find_eod(vocabulary, settings, eod_token, path)
        pad_token = _token_text(settings.get("pad_token"))
        self.pad = vocabulary.get(pad_token, self.eod) if pad_token else self.eod
        self._inv_vocab: dict[int, str] | None = None
        self.unique_identifiers = OrderedDict(
            {
                "class": "HuggingFaceTokenizer",
                "sha256": file_sha256(path),
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


def build_hugging_face(options: TokenizerOptions) -> PackedTokenizer:
    """Build HuggingFaceTokenizer from `--tokenizer-model`."""
    if not options.tokenizer_model:
        raise ConfigurationError(
            f"--tokenizer-type {options.tokenizer_type} needs --tokenizer-model; "
            "give a tokenizer.json or a folder that holds one"
        )
    adds = not options.tokenizer_hf_no_include_special_tokens
    return HuggingFaceTokenizer(options.tokenizer_model, options.eod_token, adds)


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


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


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
