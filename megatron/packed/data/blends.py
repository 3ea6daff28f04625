"""Which corpora feed which split, read from the flags."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from megatron.packed.errors import ConfigurationError, DataError
from megatron.packed.json_text import parse_json

SPLIT_NAMES = ("train", "valid", "test")
DEFAULT_SPLIT = "969,30,1"


class CorpusOptions(Protocol):
    """The flags that name corpora; `config.data` has them."""

    @property
    def data_path(self) -> tuple[str, ...] | None: ...
    @property
    def split(self) -> str | None: ...
    @property
    def train_data_path(self) -> tuple[str, ...] | None: ...
    @property
    def valid_data_path(self) -> tuple[str, ...] | None: ...
    @property
    def test_data_path(self) -> tuple[str, ...] | None: ...
    @property
    def data_args_path(self) -> str | None: ...
    @property
    def per_split_data_args_path(self) -> str | None: ...
    @property
    def mock_data(self) -> bool: ...


@dataclass(frozen=True)
class Blend:
    """Corpora to mix.

    Attributes:
        flag: where they were named, for messages.
        prefixes: paths without .bin/.idx.
        weights: shares to draw, one a prefix; None draws each corpus once.
    """

    flag: str
    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None

    @property
    def repeats(self) -> bool:
        """Whether megatron-core goes over the corpora as often as the run needs."""
        return self.weights is not None or len(self.prefixes) == 1

    def as_core(self) -> tuple[list[str], list[float] | None]:
        """In megatron-core's form."""
        return list(self.prefixes), list(self.weights) if self.weights is not None else None


@dataclass(frozen=True)
class Corpora:
    """Corpora of a run: one blend that `split` cuts, or a blend for each split.

    Attributes:
        blend: the blend that all splits are cut from, or None.
        split: proportions of training, validation and test; None with `per_split`.
        per_split: blends of training, validation and test, or None.
    """

    blend: Blend | None
    split: str | None
    per_split: tuple[Blend | None, ...] | None

    def blends(self) -> list[Blend]:
        """All blends there are."""
        return [b for b in (self.blend, *(self.per_split or ())) if b is not None]


def resolve_corpora(options: CorpusOptions) -> Corpora | None:
    """Read the flags.

    Args:
        options: corpus flags, such as `config.data`.

    Returns:
        The corpora; None with `--mock-data`.

    Raises:
        ConfigurationError: if flags are missing, malformed or exclude each other.
        DataError: if a file that names corpora can't be used.
    """
    one, per_split = _one_blend(options), _blend_per_split(options)
    if options.mock_data:
        if one or per_split:
            raise ConfigurationError(
                "--mock-data generates its corpus and excludes --data-path, --train-data-path, "
                "--valid-data-path and --test-data-path; drop one of them"
            )
        return None
    if one and per_split:
        raise ConfigurationError(
            "--data-path excludes --train-data-path, --valid-data-path and --test-data-path; "
            "give either one blend with --split, or a blend for each split"
        )
    if one:
        split = options.split or DEFAULT_SPLIT
        check_split_string(split)
        return Corpora(one, split, None)
    if per_split is None or per_split[0] is None:
        raise ConfigurationError(
            "no training corpus: give --data-path (or --train-data-path), or --mock-data"
        )
    return Corpora(None, None, per_split)


def _one_blend(options: CorpusOptions) -> Blend | None:
    path = options.data_args_path
    if path is None:
        return parse_blend("--data-path", options.data_path) if options.data_path else None
    if options.data_path:
        raise ConfigurationError(f"--data-args-path {path}: excludes --data-path; keep one")
    words = _read_text("--data-args-path", path).split()
    if not words:
        raise DataError(f"--data-args-path {path}: is empty; write the blend into it")
    return parse_blend(f"--data-args-path {path}:", words)


def _blend_per_split(options: CorpusOptions) -> tuple[Blend | None, ...] | None:
    path = options.per_split_data_args_path
    values = (options.train_data_path, options.valid_data_path, options.test_data_path)
    if path is None:
        if not any(values):
            return None
        return tuple(
            parse_blend(f"--{name}-data-path", words) if words else None
            for name, words in zip(SPLIT_NAMES, values, strict=True)
        )
    if any(values):
        raise ConfigurationError(
            f"--per-split-data-args-path {path}: excludes --train-data-path, --valid-data-path and "
            "--test-data-path; keep one"
        )
    flag = f"--per-split-data-args-path {path}"
    content = _read_json("--per-split-data-args-path", path)
    if not isinstance(content, dict) or not set(content) <= set(SPLIT_NAMES):
        raise DataError(f"{flag}: must be a JSON object with keys train, valid and test")
    if not content.get("train"):
        raise DataError(f'{flag}: names no training corpus; add "train": ["corpus"]')
    return tuple(_named_blend(flag, name, content.get(name)) for name in SPLIT_NAMES)


def _named_blend(flag: str, name: str, words: Any) -> Blend | None:
    if words is None or words == []:
        return None
    if not isinstance(words, list) or not all(
        isinstance(word, str | int | float) and not isinstance(word, bool) for word in words
    ):
        raise DataError(
            f'{flag}: "{name}" must be a list of prefixes, or of weights and prefixes in turn'
        )
    return parse_blend(f'{flag}: "{name}"', [str(word) for word in words])


def read_sequence_counts(path: str) -> dict[str, tuple[int, int]]:
    """Read `--per-dataset-sequences-path`.

    Args:
        path: a JSON object of prefix to [sequences, document boundaries].

    Raises:
        DataError: if the file can't be read or holds something else.
    """
    content = _read_json("--per-dataset-sequences-path", path)
    counts: dict[str, tuple[int, int]] = {}
    for prefix, pair in content.items() if isinstance(content, dict) else [(None, None)]:
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in pair)
        ):
            where = f" for {prefix}" if prefix else ""
            raise DataError(
                f"--per-dataset-sequences-path {path}: must be a JSON object of prefix to "
                f"[sequences, document boundaries], and holds {pair!r}{where}"
            )
        counts[str(prefix)] = (pair[0], pair[1])
    return counts


def validation_sets(corpora: Corpora) -> list[Blend]:
    """Each corpus of the validation blend as a blend of its own (`--multiple-validation-sets`).

    Args:
        corpora: what the data flags name.
    """
    blend = corpora.per_split[1] if corpora.per_split is not None else None
    if blend is None:
        return []
    return [replace(blend, prefixes=(prefix,), weights=None) for prefix in blend.prefixes]


def _read_text(flag: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise DataError(f"{flag} {path}: can't be read ({reason}); check the path") from error


def _read_json(flag: str, path: str) -> Any:
    text = _read_text(flag, path)
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(f"{flag} {path}: is no JSON ({error}); repair it") from error


def training_datasets(options: CorpusOptions) -> tuple[str, ...]:
    """Names of the training corpora, in the order in which datasets number them.

    Args:
        options: corpus flags, such as `config.data`.
    """
    corpora = resolve_corpora(options)
    if corpora is None:
        return ("mock",)
    blend = corpora.per_split[0] if corpora.per_split is not None else corpora.blend
    return blend.prefixes if blend is not None else ()


def parse_blend(flag: str, values: tuple[str, ...] | list[str]) -> Blend:
    """Read `weight prefix weight prefix ...` or `prefix prefix ...`.

    Args:
        flag: the flag the values belong to.
        values: its words.

    Returns:
        The blend.

    Raises:
        ConfigurationError: if weights and prefixes don't alternate, or a weight is not positive.

    Source: megatron/core/datasets/utils.py, `get_blend_from_list`
    """
    words = [word.strip() for word in values]
    shown = " ".join(words)
    numbers = [_number(word) for word in words]
    if all(number is None for number in numbers) or len(words) == 1:
        return Blend(flag, tuple(words), None)
    weights, prefixes = numbers[::2], words[1::2]
    if len(words) % 2 or any(w is None for w in weights):
        raise ConfigurationError(
            f"{flag} {shown}: weights and prefixes must alternate, as in 0.3 corpus_a 0.7 corpus_b "
            "(or give prefixes alone; a prefix that looks like a number can be written ./7)"
        )
    for weight in weights:
        if weight is None or not 0 < weight < float("inf"):
            raise ConfigurationError(
                f"{flag} {shown}: weight {weight} must be a positive number; "
                "drop a corpus that is not wanted"
            )
    return Blend(flag, tuple(prefixes), tuple(w for w in weights if w is not None))


def check_split_string(split: str) -> None:
    """Check `--split`.

    Args:
        split: such as "969,30,1".

    Raises:
        ConfigurationError: if it is not one to three proportions with a positive first one.
    """
    shares = [_number(word) for word in re.split(r"\s*[,/]\s*|\s+", split.strip())]
    if (
        not 1 <= len(shares) <= 3
        or any(share is None or not 0 <= share < float("inf") for share in shares)
        or not shares[0]
    ):
        raise ConfigurationError(
            f"--split {split}: give the proportions of training, validation and test, "
            "none negative and the first above 0, as in 969,30,1"
        )


def split_of(
    corpora: Corpora | None, split: str | None, place: int
) -> tuple[Blend | None, tuple[float, float] | None]:
    """The blend of a split, and which share of each corpus's documents belongs to it.

    Args:
        corpora: what the data flags name; None for generated documents.
        split: `--split`, read for generated documents.
        place: 0, 1, 2 for training, validation, test.

    Returns:
        The blend (None for generated documents, or a split without one), and (first, last) as
        fractions; None for a split without a share.
    """
    # Imported here: tools read blends without megatron-core.
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    if corpora is not None and corpora.per_split is not None:
        return corpora.per_split[place], (0.0, 1.0)
    if corpora is not None:
        split = corpora.split
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    return corpora.blend if corpora is not None else None, matrix[place]


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
