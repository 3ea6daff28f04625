"""Tokenizers from a SentencePiece model, each with the special tokens of upstream's class."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.packed.data.tokenizer_base import PackedTokenizer, TokenizerOptions, encodable
from megatron.packed.data.vocabulary_files import file_sha256, missing_library, model_file
from megatron.packed.errors import DataError


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
            {"class": kind, "sha256": file_sha256(model), "extra_ids": extra_ids}
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


def build_sentencepiece(options: TokenizerOptions) -> PackedTokenizer:
    """Build one of the SentencePiece tokenizers from `--tokenizer-model`."""
    kind = options.tokenizer_type
    assert kind is not None  # its name led here
    return SentencePieceTokenizer(model_file(options), kind, options.vocab_extra_ids)


def _load_sentencepiece(kind: str, path: Path) -> Any:
    try:
        import sentencepiece
    except ImportError as error:
        raise missing_library(kind, "sentencepiece") from error
    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as error:
        raise DataError(
            f"--tokenizer-model {path}: is no SentencePiece model "
            f"({str(error).strip().splitlines()[0]}); copy it again"
        ) from error
