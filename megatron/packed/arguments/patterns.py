"""Which layers a flag means: `4` for every fourth, or a list expression such as `([0]*3+[1])*2`.

Upstream evaluates such expressions as Python. Here they are read as what they are, lists of whole
numbers with `+` and `*`, so that a flag can't run code.
"""

from __future__ import annotations

import ast

from megatron.packed.errors import ConfigurationError

_LONGEST = 100_000  # layers; an expression beyond it is a slip, not a model


def parse_pattern(text: str) -> int | tuple[int, ...]:
    """Read the value of a flag that chooses layers.

    Args:
        text: a whole number, or a Python list expression of whole numbers with + and *.

    Returns:
        The number, or the list it evaluates to.

    Raises:
        ConfigurationError: neither.
    """
    try:
        value = _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        raise ConfigurationError(
            f"{text!r}: must be a whole number or a list of them, such as 4 or ([0]*3+[1])*2"
        ) from None
    return value if isinstance(value, int) else tuple(value)


def _evaluate(node: ast.expr) -> int | list[int]:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return number
        case ast.List(elts=elements):
            items = [_evaluate(element) for element in elements]
            if all(isinstance(item, int) for item in items):
                return [item for item in items if isinstance(item, int)]
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult() as operator, right=right):
            return _combine(_evaluate(left), operator, _evaluate(right))
    raise ValueError("not a list expression")


def _combine(left: int | list[int], operator: ast.operator, right: int | list[int]) -> list[int]:
    if isinstance(operator, ast.Add):
        if isinstance(left, list) and isinstance(right, list):
            return left + right
    elif isinstance(left, list) != isinstance(right, list):
        items, times = (left, right) if isinstance(left, list) else (right, left)
        assert isinstance(items, list) and isinstance(times, int)
        if len(items) * times <= _LONGEST:
            return items * times
    raise ValueError("not a list expression")
