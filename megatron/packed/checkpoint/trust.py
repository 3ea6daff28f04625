"""Loading without running code: what pickles inside a checkpoint may name.

torch.distributed.checkpoint keeps its index (`.metadata`) as a pickle, and unpickles objects of
every rank without restriction. Both are checked here: the index is first read by an unpickler that
knows a short list of harmless names, and objects are read with torch's `weights_only`.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron.packed.errors import DataError

_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_HARMLESS_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.planner",
    "torch.distributed.checkpoint.filesystem",
)
_HARMLESS_NAMES = {
    ("builtins", "list"),
    ("builtins", "dict"),
    ("builtins", "set"),
    ("builtins", "tuple"),
    ("builtins", "slice"),
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _HARMLESS_NAMES:
            return super().find_class(module, name)
        if module in _HARMLESS_MODULES and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:  # no module it imports
                return found
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def read_index(path: Path) -> Any:
    """Read a checkpoint's index without running anything it may have been made to run.

    Args:
        path: a `.metadata` file.

    Raises:
        DataError: the file is missing, damaged, or names what no index needs.
    """
    try:
        with open(path, "rb") as stream:
            return _IndexUnpickler(stream).load()
    except OSError as error:
        raise DataError(f"{path}: can't be read ({error.strerror})") from error
    except pickle.UnpicklingError as error:
        raise DataError(f"{path}: not loaded, {error}") from error
    except Exception as error:  # a damaged pickle can fail in any way
        raise DataError(f"{path}: damaged ({type(error).__name__}: {error})") from error


@contextlib.contextmanager
def weights_only() -> Iterator[None]:
    """Inside, every torch.load reads tensors and plain values only, whatever its caller asks."""
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    harmless = [argparse.Namespace, collections.OrderedDict, collections.defaultdict]
    try:
        with torch.serialization.safe_globals(harmless):
            yield
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before
