"""What megatron-core's own config dataclasses declare, read from their source.

The installed megatron-core is found without importing it, and its dataclasses are read as syntax:
`--help` and a bad flag are answered before torch is loaded, and a newer core brings its fields,
with their defaults and their help, by itself.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# (file below megatron/core, class), a base class before its heirs.
SOURCES = (
    ("model_parallel_config.py", "ModelParallelConfig"),
    ("transformer/transformer_config.py", "TransformerConfig"),
    ("transformer/transformer_config.py", "MLATransformerConfig"),
    ("optimizer/optimizer_config.py", "OptimizerConfig"),
    ("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),
)
_SCALARS = {"bool": bool, "int": int, "float": float, "str": str}
_LISTS = {"list", "List", "tuple", "Tuple", "Sequence"}


@dataclass(frozen=True)
class CoreField:
    """One field of megatron-core's configs whose type a command line can carry.

    Attributes:
        name: Field name.
        owners: Classes that declare it.
        value_type: Element type: bool, int, float or str.
        is_list: True if it takes one or more values.
        default: Core's default (a tuple for a list); None for unset.
        choices: Legal values; empty for any.
        names: Spellings that core's own metadata gives; empty for the usual ones.
        help: Core's text beside the field, in one line; empty if there is none.
    """

    name: str
    owners: tuple[str, ...]
    value_type: type
    is_list: bool
    default: Any
    choices: tuple[str, ...]
    names: tuple[str, ...]
    help: str


@functools.cache
def core_fields() -> Mapping[str, CoreField]:
    """Return the fields of the installed megatron-core by name, as the first class declares them.

    Fields of types that a command line can't carry (callables, dtypes, unions) are left out.
    """
    fields: dict[str, CoreField] = {}
    for path, class_name in SOURCES:
        for field in read_dataclass(_source(path), class_name):
            known = fields.get(field.name)
            if known is not None:
                owners = (*known.owners, class_name)
                field = CoreField(**{**vars(known), "owners": owners})
            fields[field.name] = field
    return fields


@functools.cache
def _source(path: str) -> str:
    spec = importlib.util.find_spec("megatron.core")  # imports the namespace `megatron` alone
    if spec is None or spec.origin is None:
        return ""
    return (Path(spec.origin).parent / path).read_text(encoding="utf-8")


def read_dataclass(source: str, class_name: str) -> Iterator[CoreField]:
    """Read the fields of one dataclass.

    Args:
        source: Python source that holds the class.
        class_name: Its name.

    Yields:
        The fields whose types a command line can carry, in order of declaration.
    """
    body = next(
        (
            node.body
            for node in _parse(source).body
            if isinstance(node, ast.ClassDef) and node.name == class_name
        ),
        [],
    )
    for statement, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            field = _read_field(statement, following, class_name)
            if field is not None:
                yield field


@functools.cache
def _parse(source: str) -> ast.Module:
    return ast.parse(source)


def _read_field(
    statement: ast.AnnAssign, following: ast.stmt | None, class_name: str
) -> CoreField | None:
    assert isinstance(statement.target, ast.Name)
    name = statement.target.id
    kind = _read_type(statement.annotation)
    known, default, meta = _read_default(statement.value)
    if kind is None or not known or name.startswith("_"):
        return None
    value_type, is_list, choices = kind
    if "default" in meta:
        default = meta["default"]
    return CoreField(
        name=name,
        owners=(class_name,),
        value_type=value_type,
        is_list=is_list,
        default=tuple(default) if is_list and default is not None else default,
        choices=choices,
        names=tuple(meta.get("arg_names", ())),
        help=_read_help(following),
    )


def _read_type(node: ast.expr) -> tuple[type, bool, tuple[str, ...]] | None:
    """Return (element type, is a list, choices), or None for a type no flag can carry."""
    match node:
        case ast.Name(id=name) if name in _SCALARS:
            return _SCALARS[name], False, ()
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return _read_type(inner)
        case ast.BinOp(left=inner, op=ast.BitOr(), right=ast.Constant(value=None)):
            return _read_type(inner)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=values):
            options = values.elts if isinstance(values, ast.Tuple) else [values]
            if all(isinstance(o, ast.Constant) and isinstance(o.value, str) for o in options):
                return str, False, tuple(o.value for o in options)  # type: ignore[attr-defined]
        case ast.Subscript(value=ast.Name(id=name), slice=inner) if name in _LISTS:
            element = _read_type(inner)
            if element is not None and not element[1] and element[0] is not bool:
                return element[0], True, element[2]
    return None


def _read_default(node: ast.expr | None) -> tuple[bool, Any, dict[str, Any]]:
    """Return (whether it could be read, default, upstream's argparse settings)."""
    if isinstance(node, ast.Call):
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        metadata = _literal(keywords["metadata"], {}) if "metadata" in keywords else {}
        factory = keywords.get("default_factory")
        default: Any = _UNREADABLE
        if isinstance(factory, ast.Name) and factory.id in ("list", "tuple"):
            default = ()
        elif "default" in keywords:
            default = _literal(keywords["default"], _UNREADABLE)
        return default is not _UNREADABLE, default, dict(metadata.get("argparse_meta", {}))
    default = _literal(node, _UNREADABLE) if node is not None else _UNREADABLE
    return default is not _UNREADABLE, default, {}


_UNREADABLE = object()


def _literal(node: ast.expr, otherwise: Any) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:  # an expression: numbers are worth computing
        if isinstance(node, ast.BinOp):
            left, right = _literal(node.left, None), _literal(node.right, None)
            if isinstance(left, (int, float)) and isinstance(right, (int, float)):
                match node.op:
                    case ast.Mult():
                        return left * right
                    case ast.Pow():
                        return left**right
        return otherwise


def _read_help(node: ast.stmt | None) -> str:
    match node:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return " ".join(inspect.cleandoc(text).split())
    return ""
