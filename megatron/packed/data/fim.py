"""Fill in the middle: parts of a document change places, so that a model learns to insert.

```
document        prefix middle suffix
PSM             <pre> prefix <suf> suffix <mid> middle
SPM             <pre> <suf> suffix <mid> prefix middle
```

What becomes of a row or a document is a pure function of (seed, its index), whoever reads it, and
nothing crosses the end of a document. Rows are cut at characters and tokenized again, as upstream
does; whole documents are cut between tokens, since packing must know how long they become.

Source: Bavarian et al. 2022 (Efficient Training of Language Models to Fill in the Middle);
megatron/training/datasets/fim_dataset.py
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

from megatron.packed.data.tokenizer_base import PackedTokenizer
from megatron.packed.errors import ConfigurationError

if TYPE_CHECKING:
    from megatron.packed.arguments import Config

Ids = numpy.ndarray
Cut = Callable[[Ids, numpy.random.Generator], Sequence[Any]]
# Seed sequences ignore trailing zeros: every use of a seed ends in a tag of its own.
_OF_FIM = 5


class TokenizerWithAddedTokens(PackedTokenizer):
    """A tokenizer with more tokens after its vocabulary; text never becomes one of them.

    Args:
        tokenizer: the tokenizer.
        added: texts of the further tokens.
    """

    def __init__(self, tokenizer: PackedTokenizer, added: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        first = tokenizer.vocab_size
        self._added = {text: first + number for number, text in enumerate(added)}
        self.vocab_size = first + len(self._added)
        self.eod = tokenizer.eod
        self.pad = tokenizer.pad
        self.unique_identifiers = OrderedDict(tokenizer.unique_identifiers)
        self.unique_identifiers["added"] = list(added)

    def tokenize(self, text: str) -> list[int]:
        """Ids of one text."""
        return self._tokenizer.tokenize(text)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts."""
        return self._tokenizer.tokenize_batch(texts)

    def tokenize_chat(self, text: str) -> list[int]:
        """Ids of a piece of a conversation."""
        return self._tokenizer.tokenize_chat(text)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ids; added tokens are left out."""
        first = self._tokenizer.vocab_size
        return self._tokenizer.detokenize([token for token in ids if token < first])

    def token_id(self, token: str) -> int | None:
        """Id of a token by its text."""
        return self._added.get(token, self._tokenizer.token_id(token))


@dataclass(frozen=True)
class FimRates:
    """How often what happens.

    Attributes:
        rate: share of documents (of a row) that are changed.
        spm_rate: share of those whose suffix comes first.
        fragment_rate: share of fragments, in documents that hold the token that splits them.
    """

    rate: float
    spm_rate: float
    fragment_rate: float = 0.0


class FillInTheMiddle:
    """Changes rows and documents.

    Args:
        tokenizer: has the three tokens.
        seed: of all choices.
        rates: how often what happens.
        tokens: texts of the prefix, the suffix and the middle token.
        split_token: text of the one token that splits documents into fragments, or None.
        no_prefix: text that a fragment begins with if it is to be left alone, or None.

    Raises:
        ConfigurationError: if a text is no token.
    """

    def __init__(
        self,
        tokenizer: PackedTokenizer,
        seed: int,
        rates: FimRates,
        tokens: tuple[str, str, str],
        *,
        split_token: str | None = None,
        no_prefix: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.seed = seed
        self.rates = rates
        self.prefix, self.suffix, self.middle = (_required(tokenizer, text) for text in tokens)
        self.split_id = None
        if split_token is not None:
            ids = tokenizer.tokenize_chat(split_token)
            if len(ids) != 1:
                raise ConfigurationError(
                    f"--fim-split-sample {split_token!r}: is {len(ids)} tokens; it must be one of "
                    "the tokenizer's own"
                )
            self.split_id = ids[0]
        self.no_prefix = no_prefix

    def row(self, text: Ids, lengths: Ids, index: int) -> tuple[Ids, Ids]:
        """Change the documents of a row, each by itself, at characters.

        Args:
            text: int64 `[n]`, the real ids of a row.
            lengths: int64 `[documents]`, real ids of each; their sum is n.
            index: of the row.

        Returns:
            The new ids, cut at n where they have become more, and the new lengths; documents that
            fall behind the cut are left out.
        """
        generator = self._generator(index, 0)
        room = len(text)
        documents: list[Ids] = []
        sizes: list[int] = []
        for document in numpy.split(text, numpy.cumsum(lengths)[:-1]):
            changed = self._part_of_row(document, generator)[:room]
            room -= len(changed)
            documents.append(changed)
            sizes.append(len(changed))
        kept = max((n for n, size in enumerate(sizes, start=1) if size), default=len(sizes))
        return numpy.concatenate(documents), numpy.array(sizes[:kept], dtype=numpy.int64)

    def chosen(self, lengths: Ids) -> numpy.ndarray:
        """Which whole documents are changed: bool `[documents]`.

        Args:
            lengths: integers `[documents]`, tokens of each; one token alone is left as it is.
        """
        generator = numpy.random.Generator(numpy.random.PCG64([self.seed, 2, _OF_FIM]))
        return (generator.random(len(lengths)) < self.rates.rate) & (lengths >= 2)

    def document(self, tokens: Ids, index: int) -> Ids:
        """Change a whole document that was chosen, between tokens; its last EOD stays.

        Args:
            tokens: int64 `[n]`, at least 2.
            index: of the document.

        Returns:
            3 ids more for each changed fragment, which is the document where nothing splits it.
        """
        generator = self._generator(index, 1)
        end = len(tokens) - int(tokens[-1] == self.tokenizer.eod)
        changed = self._fragments(tokens[:end], generator, self._between_tokens)
        return numpy.concatenate([changed, tokens[end:]])

    @property
    def reads_content(self) -> bool:
        """Whether the length of a changed document depends on its tokens."""
        return self.split_id is not None or self.no_prefix is not None

    def _generator(self, index: int, kind: int) -> numpy.random.Generator:
        return numpy.random.Generator(numpy.random.PCG64([self.seed, index, kind, _OF_FIM]))

    def _part_of_row(self, tokens: Ids, generator: numpy.random.Generator) -> Ids:
        """Change what stands between ends of documents, which stay where they are."""
        parts = []
        for text, end in _between(tokens, self.tokenizer.eod):
            if len(text) and generator.random() < self.rates.rate:
                text = self._fragments(text, generator, self._at_characters)
            parts += [text, end]
        return numpy.concatenate(parts)

    def _fragments(self, tokens: Ids, generator: numpy.random.Generator, permute: Cut) -> Ids:
        if self.split_id is None or not (tokens == self.split_id).any():
            return self._permuted(tokens, generator, permute)
        parts = []
        for text, end in _between(tokens, self.split_id):
            if len(text) and generator.random() < self.rates.fragment_rate:
                text = self._permuted(text, generator, permute)
            parts += [text, end]
        return numpy.concatenate(parts)

    def _permuted(self, tokens: Ids, generator: numpy.random.Generator, permute: Cut) -> Ids:
        if self.no_prefix is not None:
            text = self.tokenizer.detokenize(tokens.tolist())
            if text.startswith(self.no_prefix):
                return tokens
        prefix, middle, suffix = permute(tokens, generator)
        if generator.random() < self.rates.spm_rate:
            parts = [[self.prefix, self.suffix], suffix, [self.middle], prefix, middle]
        else:
            parts = [[self.prefix], prefix, [self.suffix], suffix, [self.middle], middle]
        return numpy.concatenate([numpy.asarray(part, dtype=numpy.int64) for part in parts])

    def _at_characters(self, tokens: Ids, generator: numpy.random.Generator) -> Sequence[Any]:
        text = self.tokenizer.detokenize(tokens.tolist())
        if "\ufffd" in text:
            # A row may begin inside a character, whose bytes no text could bring back.
            return self._between_tokens(tokens, generator)
        first, last = sorted(generator.integers(0, len(text) + 1, size=2).tolist())
        parts = (text[:first], text[first:last], text[last:])
        return [self.tokenizer.tokenize_chat(part) if part else [] for part in parts]

    @staticmethod
    def _between_tokens(tokens: Ids, generator: numpy.random.Generator) -> tuple[Ids, ...]:
        first, last = sorted(generator.integers(0, len(tokens) + 1, size=2).tolist())
        return tokens[:first], tokens[first:last], tokens[last:]


def _between(tokens: Ids, separator: int) -> list[tuple[Ids, Ids]]:
    """Runs of tokens between separators, each with the one that ends it, if one does."""
    ends = numpy.flatnonzero(tokens == separator)
    starts = [0, *(ends + 1).tolist()]
    stops = [*ends.tolist(), len(tokens)]
    return [
        (tokens[start:stop], tokens[stop : stop + 1])
        for start, stop in zip(starts, stops, strict=True)
    ]


def _required(tokenizer: PackedTokenizer, text: str) -> int:
    found = tokenizer.token_id(text)
    if found is None:
        raise ConfigurationError(f"the tokenizer has no token {text!r}, which --fim-data needs")
    return found


def add_fim_tokens(config: Config, tokenizer: PackedTokenizer) -> tuple[PackedTokenizer, list[str]]:
    """The tokenizer with ids for the tokens of `--fim-data` that it lacks.

    Args:
        config: the run; `data` is read.
        tokenizer: the run's tokenizer.

    Returns:
        The tokenizer, and the tokens that were added after its vocabulary.

    Raises:
        ConfigurationError: if two tokens are one, or `--fim-eod-token` isn't what ends documents.
    """
    data = config.data
    if not data.fim_data:
        return tokenizer, []
    texts = fim_tokens(config)
    if len(set(texts)) != len(texts):
        raise ConfigurationError(
            f"--fim-prefix-token, --fim-suffix-token and --fim-middle-token: {' '.join(texts)} "
            "must be three different tokens"
        )
    if config.is_given("fim_eod_token") and tokenizer.token_id(data.fim_eod_token) != tokenizer.eod:
        raise ConfigurationError(
            f"--fim-eod-token {data.fim_eod_token!r}: documents end with id {tokenizer.eod} of "
            f"{data.tokenizer_type}, which is another token; leave the flag out"
        )
    lacking = [text for text in texts if tokenizer.token_id(text) is None]
    return (TokenizerWithAddedTokens(tokenizer, lacking) if lacking else tokenizer), lacking


def fim_tokens(config: Config) -> tuple[str, str, str]:
    """Texts of the prefix, the suffix and the middle token."""
    data = config.data
    return data.fim_prefix_token, data.fim_suffix_token, data.fim_middle_token


def build_fim(config: Config, tokenizer: PackedTokenizer) -> FillInTheMiddle | None:
    """What `--fim-data` does to rows and documents; None without it.

    Args:
        config: the run; `data` and `training` are read.
        tokenizer: as `add_fim_tokens` gave it.

    Raises:
        ConfigurationError: if `--fim-split-sample` is no token.
    """
    data = config.data
    if not data.fim_data:
        return None
    return FillInTheMiddle(
        tokenizer,
        config.training.seed,
        FimRates(data.fim_rate, data.fim_spm_rate, data.fim_fragment_rate or 0.0),
        fim_tokens(config),
        split_token=data.fim_split_sample,
        no_prefix=data.fim_no_prefix,
    )
