"""JSON that a user or another program wrote: read, or refused with one kind of error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """What a JSON text says.

    Args:
        text: the whole of it; bytes are UTF-8.

    Raises:
        ValueError: it is no JSON, or an object has a key twice, which would lose the first value.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(path: Path) -> Any:
    """What a file of JSON says.

    Args:
        path: the file.

    Raises:
        OSError: it can't be read.
        ValueError: it is no JSON; see `parse_json`.
    """
    return parse_json(path.read_bytes())


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"an object has the key {twice!r} twice")
    return found
