"""The one place that knows one generation of megatron-core from another.

Two are supported: 0.16.1 (the newest for Python 3.11) and 0.19 (Python 3.12 and newer). What
differs between them and touches this project is named here, as functions and facts that the rest
of the code asks for; no other file compares versions.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
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
