"""YAML read as the command line is: values keep their spelling, and nothing is guessed.

Plain YAML turns `010` into 8, `12:30` into 750 and `1.10` into 1.1, takes the last of two settings
of one name, and fails with errors of its own on a bad date. Here a number stays the text that
stands in the file, which the flag's own rule then reads.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TextIO

import yaml

_MAPPING = "tag:yaml.org,2002:map"
_MERGE = "tag:yaml.org,2002:merge"
_SPELLED = ("int", "float", "timestamp")
_STRUCTURES = ("null", "str", "seq")


class PlainText(str):
    """A value as it was spelled; shown without quotes, as it has none in the file."""

    def __repr__(self) -> str:
        return str(self)


class _Loader(yaml.SafeLoader):
    """Texts, true, false, null, lists and mappings; any other tag is an error."""

    # Replaced, not added to: what SafeLoader knows besides is no setting.
    yaml_constructors: dict[Any, Any] = {}

    def spelled(self, node: yaml.Node) -> PlainText:
        """A scalar's own text."""
        return PlainText(self.construct_scalar(node))  # type: ignore[arg-type]

    def truth(self, node: yaml.Node) -> bool:
        """true or false."""
        text = str(self.construct_scalar(node))  # type: ignore[arg-type]
        if text.lower() not in self.bool_values:
            raise yaml.YAMLError(f"{text} must be true or false")
        return self.bool_values[text.lower()]

    def unique_mapping(self, node: yaml.MappingNode) -> dict[Hashable, Any]:
        """A mapping whose keys all differ."""
        places: dict[Any, int] = {}
        # The constructor says what is wrong with a list that was tagged as a mapping.
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            if key.value in places:
                first = places[key.value]
                raise yaml.YAMLError(f"{key.value}: set twice, in lines {first} and {line}")
            places[key.value] = line
        return self.construct_mapping(node, deep=True)


def _register() -> None:
    known = yaml.SafeLoader.yaml_constructors
    for name in _STRUCTURES:
        _Loader.yaml_constructors[f"tag:yaml.org,2002:{name}"] = known[f"tag:yaml.org,2002:{name}"]
    for name in _SPELLED:
        _Loader.add_constructor(f"tag:yaml.org,2002:{name}", _Loader.spelled)
    _Loader.add_constructor("tag:yaml.org,2002:bool", _Loader.truth)
    _Loader.add_constructor(_MAPPING, _Loader.unique_mapping)
    _Loader.add_constructor(None, yaml.SafeLoader.construct_undefined)


_register()


def read_yaml(stream: TextIO) -> Any:
    """Read one document of texts, true, false, null, lists and mappings.

    Args:
        stream: an open file.

    Raises:
        ValueError: it is anything else; says what, and where.
    """
    try:
        return yaml.load(stream, _Loader)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
