"""A run as somebody else wrote it down: flags with their values, from JSON lines or from YAML."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.packed.arguments import FlagSpec, all_specs
from megatron.packed.errors import DataError

Value = bool | int | float | str | list[str]


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        name: What it is called.
        kind: Its type, as upstream's functional tests name them (regular, ckpt-resume, ...).
        args: Value of each flag; True for a switch, a list for several values.
    """

    name: str
    kind: str
    args: Mapping[str, Value] = field(hash=False)


def read_cases(path: str | Path) -> list[Case]:
    """Read every case of a file.

    Args:
        path: JSON lines of `{"case", "type", "args"}`, or a model_config.yaml of upstream's
            functional tests (MODEL_ARGS, TEST_TYPE).

    Raises:
        DataError: The file can't be read, or holds something else.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: can't be read ({error})") from None
    if path.suffix in (".yaml", ".yml"):
        return [_read_yaml(path, text)]
    return list(_read_lines(path, text))


def _read_lines(path: Path, text: str) -> Iterator[Case]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            yield Case(str(entry["case"]), str(entry.get("type", "regular")), _args(entry["args"]))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DataError(
                f"{path} line {number}: must be a JSON object with `case` and `args`, which holds "
                "flag: value"
            ) from None


def _read_yaml(path: Path, text: str) -> Case:
    import yaml

    try:
        content = yaml.safe_load(text)
        args = _args(content["MODEL_ARGS"])
    except (yaml.YAMLError, KeyError, TypeError, AttributeError):
        raise DataError(f"{path}: must hold MODEL_ARGS, one flag: value a line") from None
    return Case(path.parent.name, str(content.get("TEST_TYPE", "regular")), args)


def _args(entries: Mapping[str, Any]) -> dict[str, Value]:
    """Values as a shell would see them; false and null are flags that weren't given."""
    args: dict[str, Value] = {}
    for name, value in entries.items():
        if value is None or value is False:
            continue
        if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
            value = shlex.split(value[1:-1].replace(",", " "))
        args[str(name)] = [str(item) for item in value] if isinstance(value, list) else value
    return args


def known_flags() -> Mapping[str, FlagSpec]:
    """Return every flag that this build reads, by spelling."""
    return {name: spec for spec in all_specs().values() for name in spec.names}


def command_line(args: Mapping[str, Value]) -> list[str]:
    """Return the flags as a program receives them.

    Args:
        args: Value of each flag.
    """
    lists = {name for name, spec in known_flags().items() if spec.is_list}
    words: list[str] = []
    for name, value in args.items():
        words.append(name)
        if isinstance(value, list):
            words += value
        elif value is not True:
            # A shell script's variable holds several values in one string.
            words += shlex.split(str(value)) if name in lists else [str(value)]
    return words
