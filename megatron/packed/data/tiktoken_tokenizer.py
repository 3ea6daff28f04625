"""TikTokenizer: special tokens, then the ranks of a tiktoken vocabulary."""

from __future__ import annotations

import base64
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from megatron.packed.data.tokenizer_base import PackedTokenizer, TokenizerOptions, encodable
from megatron.packed.data.vocabulary_files import (
    file_sha256,
    missing_library,
    model_file,
    read_flag_json,
)
from megatron.packed.errors import ConfigurationError, DataError

TIKTOKEN_VOCABULARY = 1 << 17
_TIKTOKEN_REQUIRED = ("<unk>", "<s>", "</s>")


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
            raise missing_library("TikTokenizer", "tiktoken") from error
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
                "sha256": file_sha256(model),
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


def build_tiktoken(options: TokenizerOptions) -> PackedTokenizer:
    """Build TikTokenizer from `--tokenizer-model` and the `--tiktoken-*` flags."""
    if options.tiktoken_pattern is None:
        raise ConfigurationError(
            "--tokenizer-type TikTokenizer needs --tiktoken-pattern: v1 or v2, whichever the "
            "vocabulary was made with"
        )
    return TikTokenizer(
        model_file(options),
        options.tiktoken_pattern,
        vocab_size=options.vocab_size,
        num_special_tokens=options.tiktoken_num_special_tokens,
        special_tokens=options.tiktoken_special_tokens or options.special_tokens,
    )


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
    entries = read_flag_json("--tokenizer-model", path)
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
