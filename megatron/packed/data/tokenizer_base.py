"""What a tokenizer is, the flags it is built from, and what is true of a text in all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

GPT2_EOD = "<|endoftext|>"


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
