"""The one place that knows one generation of megatron-core from another.

Two are supported: 0.16.1 (the newest for Python 3.11) and 0.19 (Python 3.12 and newer). What
differs between them and touches this project is named here, as functions and facts that the rest
of the code asks for; no other file compares versions.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any


@functools.cache
def core_version() -> tuple[int, int]:
    """Major and minor version of the megatron-core that is installed."""
    major, minor = metadata.version("megatron-core").split(".")[:2]
    return int(major), int(minor)


def row_and_documents(parts: Sequence[Any]) -> tuple[Any, Any]:
    """Tokens and document ids of what GPTDataset assembles for a row.

    From 0.17 on, the lengths of the row's documents come as a third part.
    """
    return parts[0], parts[1]


def predicting_layer_name() -> str:
    """What a layer of multi-token prediction calls the transformer layer inside it."""
    return "transformer_layer" if core_version() < (0, 17) else "mtp_model_layer"


def lasting_name(name: str) -> str:
    """A parameter's name as 0.16 gives it, so that a seed starts the same model on both.

    Args:
        name: as the installed megatron-core gives it.
    """
    return name.replace(".mtp_model_layer.", ".transformer_layer.")


def detaches_predictions(config: Any) -> bool:
    """Whether deeper predictions leave all but their own layers alone: `mtp_detach_heads`.

    There is no such setting before 0.17.

    Args:
        config: a TransformerConfig.
    """
    return bool(getattr(config, "mtp_detach_heads", False))


def repeats_predicting_layer(config: Any) -> bool:
    """Whether one layer makes the predictions of every depth: `mtp_use_repeated_layer`.

    There is no such setting before 0.17.

    Args:
        config: a TransformerConfig.
    """
    return bool(getattr(config, "mtp_use_repeated_layer", False))


def accepted_by(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the named arguments that this generation's function takes.

    Args:
        function: one of megatron-core.
        arguments: what the newest generation hands through.
    """
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names}


def compiles_recomputation() -> bool:
    """Whether recomputed outputs are moved into place by an extension compiled at run time."""
    return core_version() >= (0, 19)


def builder_of(part: Any) -> Any:
    """The class, or the function, that a part of a layer's specification is made by.

    Up to 0.16 every part is a ModuleSpec or a class; from 0.17 on feed-forward layers and experts
    are `functools.partial` objects.

    Args:
        part: as it stands in the specification.
    """
    if isinstance(part, functools.partial):
        return part.func
    return getattr(part, "module", part)


def submodules_of(part: Any) -> Any:
    """What a part of a layer's specification consists of, to be changed in place; None if nothing.

    Args:
        part: see `builder_of`.
    """
    if isinstance(part, functools.partial):
        return part.keywords.get("submodules")
    return getattr(part, "submodules", None)


def made_by(part: Any, builder: Any) -> Any:
    """A part of a layer's specification that another class makes of the same things.

    Args:
        part: see `builder_of`.
        builder: the class, with the constructor of the one it replaces.
    """
    if isinstance(part, functools.partial):
        return functools.partial(builder, *part.args, **part.keywords)
    return dataclasses.replace(part, module=builder)


def dispatcher_settings(library: str, units: Mapping[str, int]) -> dict[str, int]:
    """How many multiprocessors the flex dispatcher's library takes, as TransformerConfig's fields.

    Up to 0.16 each library has its own field. 0.19 reads them as spellings of one setting, and
    raises where two differ.

    Args:
        library: that exchanges the tokens.
        units: multiprocessors by library.
    """
    read = units if core_version() < (0, 17) else {library: units[library]}
    return {f"moe_{name}_num_sms": count for name, count in read.items()}
