"""GPT2BPETokenizer: byte-level BPE from `vocab.json` and `merges.txt`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.packed.data.tokenizer_base import (
    GPT2_EOD,
    PackedTokenizer,
    TokenizerOptions,
    encodable,
)
from megatron.packed.data.vocabulary_files import file_sha256, read_flag_json, read_text, rows_for
from megatron.packed.errors import ConfigurationError, DataError


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
                "vocab_sha256": file_sha256(vocab_file),
                "merges_sha256": file_sha256(merge_file),
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


def build_gpt2(options: TokenizerOptions) -> PackedTokenizer:
    """Build GPT2BPETokenizer from `--vocab-file` and `--merge-file`."""
    if not options.vocab_file or not options.merge_file:
        raise ConfigurationError(
            "--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file: give the "
            "vocab.json and merges.txt of the corpus, or another --tokenizer-type"
        )
    return GPT2BPETokenizer(options.vocab_file, options.merge_file)


def _read_vocabulary(path: Path) -> dict[str, int]:
    vocabulary = read_flag_json("--vocab-file", path)
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
    for number, line in enumerate(read_text("--merge-file", merge_file).split("\n"), start=1):
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
