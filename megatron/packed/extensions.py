"""Where the compiled modules come from."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from types import ModuleType


def load_extension(name: str) -> ModuleType:
    """A compiled module of this package.

    `MEGATRON_PACKED_EXTENSION_DIR` in the environment names a build folder to take it from instead
    of the package's own, such as one built with sanitisers.

    Args:
        name: `_C` or `_cpu_ops`.

    Raises:
        ImportError: where it was not built.
    """
    whole = f"megatron.packed.{name}"
    folder = os.environ.get("MEGATRON_PACKED_EXTENSION_DIR")
    if not folder:
        return importlib.import_module(whole)
    found = sorted(Path(folder).glob(f"megatron/packed/{name}.*"))
    if not found:
        raise ImportError(f"MEGATRON_PACKED_EXTENSION_DIR: no megatron/packed/{name}.* in {folder}")
    spec = importlib.util.spec_from_file_location(whole, found[0])
    if spec is None or spec.loader is None:
        raise ImportError(f"MEGATRON_PACKED_EXTENSION_DIR: {found[0]} is no extension module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
