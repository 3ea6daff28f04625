"""Tokenizers from vocabulary files of their own kind: GPT-2 BPE, SentencePiece, tiktoken.

Special tokens, their ids and the end of a document are those that upstream's classes of the same
name give, so that a corpus which upstream preprocessed means the same here.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.packed.data.tokenizers import (
    GPT2_EOD,
    PackedTokenizer,
    TokenizerOptions,
    encodable,
    rows_for,
)
from megatron.packed.errors import ConfigurationError, DataError
from megatron.packed.json_text import parse_json

TIKTOKEN_VOCABULARY = 1 << 17
_TIKTOKEN_REQUIRED = ("<unk>", "<s>", "</s>")


class GPT2BPETokenizer(PackedTokenizer):
    """GPT-2's byte-level BPE from `vocab.json` and `merges.txt`.

    The text of a special token is no special token: documents can't smuggle one in.

    Args:
        vocab_file: JSON object of token to id.
        merge_file: one merge a line.

    Raises:
        DataError: if a file is missing or malformed, or holds no `<|endoftext|>`.

    Source: megatron/training/tokenizer/gpt2_tokenization.py, `GPT2Tokenizer`
    """

    def __init__(self, vocab_file: str | Path, merge_file: str | Path) -> None:
        self._vocabulary = _read_vocabulary(Path(vocab_file))
        if GPT2_EOD not in self._vocabulary:
            raise DataError(
                f"--vocab-file {vocab_file}: holds no {GPT2_EOD}, which ends documents; "
                "add it, or use HuggingFaceTokenizer with --eod-token"
            )
        self.vocab_size = rows_for(f"--vocab-file {vocab_file}", self._vocabulary)
        self._tokenizer = _byte_level_bpe(self._vocabulary, Path(vocab_file), Path(merge_file))
        self.eod = self.pad = self._vocabulary[GPT2_EOD]
        self.unique_identifiers = OrderedDict(
            {
                "class": "GPT2BPETokenizer",
                "vocab_sha256": _sha256(vocab_file),
                "merges_sha256": _sha256(merge_file),
            }
        )

    def tokenize(self, text: str) -> list[int]:
        """Ids of `text`."""
        return self._tokenizer.encode(encodable(text)).ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts in one call of the library."""
        clean = [encodable(text) for text in texts]
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(clean)]

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def token_id(self, token: str) -> int | None:
        """Id of a token of the vocabulary."""
        return self._vocabulary.get(token)


class SentencePieceTokenizer(PackedTokenizer):
    """A SentencePiece model, with the special tokens that one of upstream's classes adds.

    Args:
        model: a `.model` file.
        kind: `SentencePieceTokenizer` adds `<CLS>`, `<SEP>`, `<EOD>`, `<MASK>`, `<PAD>`, `<BOS>`,
            `<EOS>` where the model lacks them and ends documents with `<EOD>`;
            `GPTSentencePieceTokenizer` and `Llama2Tokenizer` add nothing and end them with the
            model's own EOS; `Llama2Tokenizer` starts every text with BOS.
        extra_ids: `--vocab-extra-ids`, read by `SentencePieceTokenizer`.

    Raises:
        ConfigurationError: if the library isn't installed.
        DataError: if the file is missing or no model, or has no EOS where one is needed.

    Source: megatron/training/tokenizer/tokenizer.py, `_SentencePieceTokenizer` and its heirs
    """

    def __init__(self, model: str | Path, kind: str, extra_ids: int = 0) -> None:
        self._model = _load_sentencepiece(kind, Path(model))
        self.vocab_size = self._model.get_piece_size()
        self._added: dict[str, int] = {}
        pad = self._model.pad_id()
        if kind == "SentencePieceTokenizer":
            for token in ("<CLS>", "<SEP>", "<EOD>", "<MASK>"):
                self._add(token)
            self.eod = self._id("<EOD>")
            self._add("<PAD>" if pad < 0 else self._model.id_to_piece(pad))
            pad = self._id("<PAD>") if pad < 0 else pad
            for token, held in (("<BOS>", self._model.bos_id()), ("<EOS>", self._model.eos_id())):
                self._add(token if held < 0 else self._model.id_to_piece(held))
            for number in range(extra_ids):
                self._add(f"<extra_id_{number}>")
        else:
            self.eod = self._model.eos_id()
            if self.eod < 0:
                raise DataError(
                    f"--tokenizer-model {model}: the model has no end-of-sentence id, which ends "
                    f"documents with {kind}; train it with one, or use SentencePieceTokenizer"
                )
        self.pad = pad if pad >= 0 else self.eod
        self._prefix = [self._model.bos_id()] if kind == "Llama2Tokenizer" else []
        self.unique_identifiers = OrderedDict(
            {"class": kind, "sha256": _sha256(model), "extra_ids": extra_ids}
        )

    def _add(self, token: str) -> None:
        if self.token_id(token) is None:
            self._added[token] = self.vocab_size
            self.vocab_size += 1

    def _id(self, token: str) -> int:
        found = self.token_id(token)
        assert found is not None  # added before
        return found

    def tokenize(self, text: str) -> list[int]:
        """Ids of `text`, after BOS with `Llama2Tokenizer`."""
        return self._prefix + self._model.encode_as_ids(encodable(text))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ids; tokens that the model lacks are written by name."""
        names = {token: name for name, token in self._added.items()}
        pieces: list[str] = []
        run: list[int] = []
        for token in (*ids, -1):
            if token >= 0 and token not in names:
                run.append(int(token))
                continue
            if run:
                pieces.append(self._model.decode_ids(run))
                run = []
            if token >= 0:
                pieces.append(names[token])
        return "".join(pieces)

    def token_id(self, token: str) -> int | None:
        """Id of a piece or an added token."""
        if token in self._added:
            return self._added[token]
        found = self._model.piece_to_id(token)
        return None if found == self._model.unk_id() and token != "<unk>" else found


class TikTokenizer(PackedTokenizer):
    """A tiktoken vocabulary: special tokens first, then the file's tokens by rank.

    Args:
        model: JSON list of `{rank, token_bytes, token_str}`, by rank.
        pattern: `v1` or `v2`, the expressions of megatron-core that split text.
        vocab_size: ids in all; None means 131,072.
        num_special_tokens: ids kept for special tokens.
        special_tokens: their names, `<unk>`, `<s>` and `</s>` among them; None takes
            megatron-core's. The rest are called `<SPECIAL_n>`.

    Raises:
        ConfigurationError: if the library isn't installed or a flag can't be honoured.
        DataError: if the file is missing or malformed, or holds too few tokens.

    Source: megatron/core/tokenizers/text/libraries/tiktoken_tokenizer.py
    """

    def __init__(
        self,
        model: str | Path,
        pattern: str,
        *,
        vocab_size: int | None = None,
        num_special_tokens: int = 1000,
        special_tokens: Sequence[str] | None = None,
    ) -> None:
        try:
            import tiktoken
        except ImportError as error:
            raise _missing_library("TikTokenizer", "tiktoken") from error
        from megatron.core.tokenizers.text.libraries import tiktoken_tokenizer as core

        patterns = {"v1": core._PATTERN_TIKTOKEN_V1, "v2": core._PATTERN_TIKTOKEN_V2}
        if pattern not in patterns:
            raise ConfigurationError(f"--tiktoken-pattern {pattern}: must be one of v1, v2")
        self.vocab_size = vocab_size or TIKTOKEN_VOCABULARY
        names = list(special_tokens) if special_tokens is not None else list(core.SPECIAL_TOKENS)
        self._special = _special_tokens(names, num_special_tokens, self.vocab_size)
        ranks = _read_ranks(Path(model), self.vocab_size - num_special_tokens)
        self._model = tiktoken.Encoding(
            name=Path(model).stem,
            pat_str=patterns[pattern],
            mergeable_ranks={token: rank + num_special_tokens for token, rank in ranks.items()},
            special_tokens=self._special,
        )
        self.eod = self._special["</s>"]
        self.pad = self._special.get("<pad>", self.eod)
        self.unique_identifiers = OrderedDict(
            {
                "class": "TikTokenizer",
                "sha256": _sha256(model),
                "pattern": pattern,
                "vocab_size": self.vocab_size,
                "special_tokens": names,
                "num_special_tokens": num_special_tokens,
            }
        )

    def tokenize(self, text: str) -> list[int]:
        """Ids of `text`; the text of a special token is no special token."""
        return self._model.encode_ordinary(encodable(text))

    def tokenize_chat(self, text: str) -> list[int]:
        """Ids of `text`, in which names of special tokens are special tokens."""
        return self._model.encode(encodable(text), allowed_special="all")

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return self._model.decode(list(ids))

    def token_id(self, token: str) -> int | None:
        """Id of a special token, or of a token of the file."""
        if token in self._special:
            return self._special[token]
        try:
            return self._model.encode_single_token(token)
        except KeyError:
            return None


def build_gpt2(options: TokenizerOptions) -> PackedTokenizer:
    """Build GPT2BPETokenizer from `--vocab-file` and `--merge-file`."""
    if not options.vocab_file or not options.merge_file:
        raise ConfigurationError(
            "--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file: give the "
            "vocab.json and merges.txt of the corpus, or another --tokenizer-type"
        )
    return GPT2BPETokenizer(options.vocab_file, options.merge_file)


def build_sentencepiece(options: TokenizerOptions) -> PackedTokenizer:
    """Build one of the SentencePiece tokenizers from `--tokenizer-model`."""
    kind = options.tokenizer_type
    assert kind is not None  # its name led here
    return SentencePieceTokenizer(_model_of(options), kind, options.vocab_extra_ids)


def build_tiktoken(options: TokenizerOptions) -> PackedTokenizer:
    """Build TikTokenizer from `--tokenizer-model` and the `--tiktoken-*` flags."""
    if options.tiktoken_pattern is None:
        raise ConfigurationError(
            "--tokenizer-type TikTokenizer needs --tiktoken-pattern: v1 or v2, whichever the "
            "vocabulary was made with"
        )
    return TikTokenizer(
        _model_of(options),
        options.tiktoken_pattern,
        vocab_size=options.vocab_size,
        num_special_tokens=options.tiktoken_num_special_tokens,
        special_tokens=options.tiktoken_special_tokens or options.special_tokens,
    )


def _model_of(options: TokenizerOptions) -> str:
    if not options.tokenizer_model:
        raise ConfigurationError(
            f"--tokenizer-type {options.tokenizer_type} needs --tokenizer-model, its model file"
        )
    if not os.path.isfile(options.tokenizer_model):
        raise DataError(
            f"--tokenizer-model {options.tokenizer_model}: there is no such file; give the model "
            f"file of {options.tokenizer_type}"
        )
    return options.tokenizer_model


def _missing_library(kind: str, library: str) -> ConfigurationError:
    return ConfigurationError(
        f"--tokenizer-type {kind} needs the {library} library: "
        f"pip install megatron-packed[{library}]"
    )


def _sha256(path: str | Path) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _read_text(flag: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{flag} {path}: can't be read ({error.strerror}); check the path") from (
            error
        )
    except UnicodeDecodeError as error:
        raise DataError(f"{flag} {path}: is no UTF-8 text ({error.reason}); copy it again") from (
            error
        )


def _read_json(flag: str, path: Path) -> Any:
    text = _read_text(flag, path)
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(f"{flag} {path}: is no JSON ({error}); copy it again") from error


def _read_vocabulary(path: Path) -> dict[str, int]:
    vocabulary = _read_json("--vocab-file", path)
    if not isinstance(vocabulary, dict) or not vocabulary:
        raise DataError(
            f"--vocab-file {path}: must be a JSON object of token to id, as GPT-2's vocab.json"
        )
    for token, number in vocabulary.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise DataError(
                f"--vocab-file {path}: token {token!r} has id {number!r}; ids are numbers from 0 on"
            )
        if encodable(token) != token:
            raise DataError(f"--vocab-file {path}: token {token!r} is no text; copy the file again")
    if len(set(vocabulary.values())) != len(vocabulary):
        raise DataError(f"--vocab-file {path}: two tokens share an id; copy it again")
    return vocabulary


def _byte_level_bpe(vocabulary: dict[str, int], vocab_file: Path, merge_file: Path) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    missing = [byte for byte in pre_tokenizers.ByteLevel.alphabet() if byte not in vocabulary]
    if missing:
        raise DataError(
            f"--vocab-file {vocab_file}: holds no token for {len(missing)} of the 256 bytes, so "
            "some texts have no ids; give a byte-level vocabulary"
        )
    merges = []
    for number, line in enumerate(_read_text("--merge-file", merge_file).split("\n"), start=1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split()
        where = f"--merge-file {merge_file}:{number}"
        if len(pair) != 2:
            raise DataError(f"{where} holds {len(pair)} tokens; a merge has 2, as in GPT-2's")
        unknown = next((t for t in (*pair, "".join(pair)) if t not in vocabulary), None)
        if unknown is not None:
            raise DataError(
                f"{where} uses {unknown!r}, which --vocab-file {vocab_file} lacks; "
                "give two files that belong together"
            )
        merges.append((pair[0], pair[1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _load_sentencepiece(kind: str, path: Path) -> Any:
    try:
        import sentencepiece
    except ImportError as error:
        raise _missing_library(kind, "sentencepiece") from error
    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as error:
        raise DataError(
            f"--tokenizer-model {path}: is no SentencePiece model "
            f"({str(error).strip().splitlines()[0]}); copy it again"
        ) from error


def _special_tokens(names: list[str], count: int, vocab_size: int) -> dict[str, int]:
    lacking = [token for token in _TIKTOKEN_REQUIRED if token not in names]
    if lacking:
        raise ConfigurationError(
            f"--tiktoken-special-tokens {' '.join(names)}: must hold {' '.join(lacking)} too"
        )
    if len(set(names)) != len(names):
        raise ConfigurationError(
            f"--tiktoken-special-tokens {' '.join(names)}: names a token twice"
        )
    unwritable = [name for name in names if encodable(name) != name]
    if unwritable:
        raise ConfigurationError(
            f"--tiktoken-special-tokens: {unwritable[0]!r} is no UTF-8 text; write it anew"
        )
    if "" in names:
        raise ConfigurationError(
            f"--tiktoken-special-tokens {' '.join(names)}: names an empty token, which would stand "
            "between any two letters"
        )
    if not len(names) <= count < vocab_size:
        raise ConfigurationError(
            f"--tiktoken-num-special-tokens {count}: must hold the {len(names)} special tokens and "
            f"be less than the vocabulary of {vocab_size}"
        )
    filler = [f"<SPECIAL_{number}>" for number in range(len(names), count)]
    taken = sorted(set(names) & set(filler))
    if taken:
        raise ConfigurationError(
            f"--tiktoken-special-tokens {' '.join(names)}: names a token that the ids left over "
            f"have: {' '.join(taken)}"
        )
    return {token: number for number, token in enumerate([*names, *filler])}


def _read_ranks(path: Path, count: int) -> dict[bytes, int]:
    entries = _read_json("--tokenizer-model", path)
    if count < 256:
        raise ConfigurationError(
            f"--vocab-size leaves {count} tokens beside --tiktoken-num-special-tokens, fewer than "
            "the 256 bytes that texts are made of; raise it"
        )
    if not isinstance(entries, list):
        raise DataError(
            f"--tokenizer-model {path}: must be a JSON list of rank, token_bytes and token_str"
        )
    if len(entries) < count:
        raise DataError(
            f"--tokenizer-model {path}: holds {len(entries)} tokens, fewer than the {count} that "
            "--vocab-size leaves beside --tiktoken-num-special-tokens; lower --vocab-size"
        )
    ranks: dict[bytes, int] = {}
    for rank, entry in enumerate(entries[:count]):
        try:
            token = base64.b64decode(entry["token_bytes"], validate=True)
            well_formed = entry["rank"] == rank and (rank >= 256 or token == bytes([rank]))
        except (KeyError, TypeError, ValueError):
            well_formed = False
        if not well_formed or not token or token in ranks:
            raise DataError(
                f"--tokenizer-model {path}: entry {rank} must have rank {rank} and, base64-coded, "
                "token_bytes of its own (the first 256 being the bytes); copy it again"
            )
        ranks[token] = rank
    return ranks
