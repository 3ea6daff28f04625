"""Files of tokenizers: read, or refused with the flag and the file that are at fault."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from megatron.packed.data.tokenizer_base import TokenizerOptions
from megatron.packed.errors import ConfigurationError, DataError
from megatron.packed.json_text import parse_json, read_json

# Ids without a token that a vocabulary may have, beside as many as it has tokens.
_SPARE_IDS = 1 << 17


def model_file(options: TokenizerOptions) -> str:
    """The file that `--tokenizer-model` names.

    Args:
        options: the flags.

    Raises:
        ConfigurationError: if the flag isn't given.
        DataError: if there is no such file.
    """
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


def read_settings(path: Path) -> dict[str, Any]:
    """The object of a JSON file that a tokenizer may come with; empty without the file.

    Args:
        path: `tokenizer_config.json`, mostly.

    Raises:
        DataError: for a file that holds something else.
    """
    if not os.path.isfile(path):
        return {}
    try:
        settings = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no JSON ({error}); repair or remove it") from error
    if not isinstance(settings, dict):
        raise DataError(f"{path} holds no JSON object; repair or remove it")
    return settings


def missing_library(kind: str, library: str) -> ConfigurationError:
    """The error to raise where a library that a tokenizer needs isn't installed.

    Args:
        kind: the `--tokenizer-type`.
        library: its name, also that of the extra which installs it.
    """
    return ConfigurationError(
        f"--tokenizer-type {kind} needs the {library} library: "
        f"pip install megatron-packed[{library}]"
    )


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file, in hexadecimal digits.

    Args:
        path: the file.
    """
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def read_text(flag: str, path: Path) -> str:
    """Text of a file in UTF-8.

    Args:
        flag: the flag that names it, for messages.
        path: the file.

    Raises:
        DataError: if it can't be read or isn't UTF-8.
    """
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


def read_flag_json(flag: str, path: Path) -> Any:
    """What a file of JSON says.

    Args:
        flag: the flag that names it, for messages.
        path: the file.

    Raises:
        DataError: if it can't be read or isn't JSON.
    """
    text = read_text(flag, path)
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(f"{flag} {path}: is no JSON ({error}); copy it again") from error


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
