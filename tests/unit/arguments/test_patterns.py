"""Layer patterns: what upstream's evaluation gives, without evaluating anything."""

from __future__ import annotations

import pytest

from megatron.packed.arguments.patterns import parse_pattern
from megatron.packed.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        (" 1 ", 1),
        ("[1]", (1,)),
        ("([0]*3+[1]*11)", (0,) * 3 + (1,) * 11),
        ("([0]*1+[1]*1)", (0, 1)),
        ("([1]*3+[0]*1)*3", (1, 1, 1, 0) * 3),
        ("3*[0, 1]", (0, 1) * 3),
        ("[1,1,1,0]*2", (1, 1, 1, 0) * 2),
    ],
)
def test_patterns(text: str, value: object) -> None:
    assert parse_pattern(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "1.5",
        "[1.5]",
        "True",
        "[[1]]",
        "[1]+2",
        "2+2",
        "2*2",
        "[1]*[1]",
        "[1]**2",
        "__import__('os').getcwd()",
        "[1]*1000000",
        "[1",
        "(" * 5000,
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="must be a whole number or a list of them"):
        parse_pattern(text)
