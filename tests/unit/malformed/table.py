"""Malformed inputs as a table: how each is made, and what its message must say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron.packed.errors import ConfigurationError, DataError


@dataclass(frozen=True)
class Malformed:
    """One malformed input.

    Attributes:
        name: what is wrong with it.
        given: the input itself, or how it is made; each module says which.
        says: parts of the message: the flag or file first, then value, rule or way out.
    """

    name: str
    given: Any
    says: tuple[str, ...]


def cases_of(*table: tuple[Any, ...]) -> tuple[Malformed, ...]:
    """Cases from rows of a name, the input, and parts of the message."""
    return tuple(Malformed(name, given, tuple(says)) for name, given, *says in table)


def each(cases: tuple[Malformed, ...]) -> Any:
    """Run a test for each case, named after it."""
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


def assert_refused(case: Malformed, attempt: Callable[[], object]) -> None:
    """Assert that an attempt ends in one of the errors that programs print without a traceback."""
    with pytest.raises((ConfigurationError, DataError)) as caught:
        attempt()
    message = str(caught.value)
    for part in case.says:
        assert part in message, message
    assert len(message) < 1500 and " object at 0x" not in message, message


def written(path: Path, content: str | bytes) -> Path:
    """A file of this content; lone surrogates are written as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    path.write_bytes(data)
    return path
