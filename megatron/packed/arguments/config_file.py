"""Settings from a YAML file: the same names and the same rules as on the command line."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from megatron.packed.arguments.config import all_specs
from megatron.packed.arguments.declare import FlagSpec
from megatron.packed.errors import ConfigurationError

Convert = Callable[[FlagSpec, str], Any]


class ConfigFileError(ConfigurationError):
    """A file of settings that can't be read; the program's exit code is 2, as for a bad flag."""

    exit_code = 2


def read_config_file(path: str, convert: Convert) -> dict[str, Any]:
    """Read settings by field name.

    Keys are flags (with or without their dashes in front) or field names. A switch takes true or
    false, a list flag a list or one value; null leaves a setting alone.

    Args:
        path: YAML file with one mapping.
        convert: Turns text into a flag's value, or raises argparse.ArgumentTypeError.

    Returns:
        Values by field name, of the fields' own types.

    Raises:
        ConfigFileError: The file can't be read, or holds something that no flag takes; every
            problem is listed.
    """
    values: dict[str, Any] = {}
    problems = []
    for key, value in _load(path).items():
        try:
            dest, setting = _read_setting(str(key), value, convert)
        except argparse.ArgumentTypeError as error:
            problems.append(str(error))
            continue
        if dest in values:
            problems.append(f"{key}: set twice")
        if setting is not None:
            values[dest] = setting
    if problems:
        raise ConfigFileError("\n".join(f"--config-file {path}: {problem}" for problem in problems))
    return values


def _load(path: str) -> Mapping[Any, Any]:
    # Only needed where there is a file; --help shall stay quick.
    from megatron.packed.arguments.yaml_settings import read_yaml

    try:
        with open(path, encoding="utf-8") as file:
            content = read_yaml(file)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigFileError(f"--config-file {path}: can't be read ({reason})") from None
    except ValueError as error:  # one of an encoding, too
        raise ConfigFileError(f"--config-file {path}: isn't YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ConfigFileError(
            f"--config-file {path}: must hold settings, one `name: value` a line, not a "
            f"{type(content).__name__}"
        )
    return content


def _read_setting(key: str, value: Any, convert: Convert) -> tuple[str, Any]:
    """Return (field name, value or None); problems are argparse's errors, as on a command line."""
    flags = {name: spec for spec in all_specs().values() for name in spec.names}
    spec = flags.get("--" + key.lstrip("-")) or flags.get("--" + key.replace("_", "-"))
    by_field = key in all_specs()
    if by_field:
        spec = all_specs()[key]
    if spec is None:
        raise argparse.ArgumentTypeError(_unknown(key, [*flags, *all_specs()]))
    if not spec.names:
        raise argparse.ArgumentTypeError(f"{key}: is the launcher's, which sets {spec.environment}")
    if spec.dest == "config_file":
        raise argparse.ArgumentTypeError(f"{key}: a file can't name another one")
    if value is None:
        return spec.dest, None
    if not spec.takes_value:
        return spec.dest, _switch(key, spec, value, by_field)
    if spec.is_list and isinstance(value, str):
        value = _words(key, value)
    items = value if isinstance(value, list) else [value]
    if not items and spec.is_list:
        raise argparse.ArgumentTypeError(f"{key}: needs one or more values, or no value at all")
    if len(items) != 1 and not spec.is_list:
        raise argparse.ArgumentTypeError(f"{key}: takes one value, not {len(items)}")
    converted = tuple(_one_value(key, spec, item, convert) for item in items)
    return spec.dest, converted if spec.is_list else converted[0]


def _words(key: str, value: str) -> list[str]:
    """What a shell would make of a text."""
    try:
        return shlex.split(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{key}: {value!r}: {error}; close it, or write a list"
        ) from None


def _switch(key: str, spec: FlagSpec, value: Any, by_field: bool) -> bool | None:
    """A flag that is false wasn't given; a field has the value that stands there."""
    if not isinstance(value, bool):
        raise argparse.ArgumentTypeError(f"{key}: {value!r} must be true or false")
    if by_field:
        return value
    return not spec.negative if value else None


def _one_value(key: str, spec: FlagSpec, value: Any, convert: Convert) -> Any:
    if not isinstance(value, str):
        kinds = {bool: "true or false (a text of that name takes quotes)", type(None): "null"}
        kind = kinds.get(type(value), f"a {type(value).__name__}")
        raise argparse.ArgumentTypeError(f"{key}: takes a value, not {kind}")
    try:
        return convert(spec, str(value))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{key}: {error}") from None


def _unknown(key: str, known: list[str]) -> str:
    import difflib

    plain = {name.lstrip("-").replace("_", "-"): name for name in reversed(known)}
    nearest = difflib.get_close_matches(key.lstrip("-").replace("_", "-"), plain, n=1, cutoff=0.5)
    hint = f"did you mean {plain[nearest[0]]}?" if nearest else "--help lists every flag"
    return f"unknown setting {key}: {hint}"
