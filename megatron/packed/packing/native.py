"""Chooses between the C++ core and the numpy reference, once.

Both offer the same functions; `core` is the one in use. `MEGATRON_PACKED_NATIVE=0` forces the
reference, which is how a suspected fault of the C++ is told from one of the plan.
`MEGATRON_PACKED_EXTENSION_DIR` names a build folder to take the extension from instead of the
package's own, such as one built with sanitisers.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from pathlib import Path
from types import ModuleType

from megatron.packed.packing import reference


def _from_folder(folder: str) -> ModuleType:
    found = sorted(Path(folder).glob("megatron/packed/_C.*"))
    if not found:
        raise ImportError(f"MEGATRON_PACKED_EXTENSION_DIR: no megatron/packed/_C.* in {folder}")
    spec = importlib.util.spec_from_file_location("megatron.packed._C", found[0])
    if spec is None or spec.loader is None:
        raise ImportError(f"MEGATRON_PACKED_EXTENSION_DIR: {found[0]} is no extension module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _load() -> ModuleType:
    if os.environ.get("MEGATRON_PACKED_NATIVE", "1") == "0":
        return reference
    folder = os.environ.get("MEGATRON_PACKED_EXTENSION_DIR")
    if folder:
        return _from_folder(folder)
    try:
        module = importlib.import_module("megatron.packed._C")
        missing = [name for name in reference.__all__ if not hasattr(module, name)]
        if missing:
            raise ImportError(f"it was built from older sources and lacks {', '.join(missing)}")
    except ImportError as error:
        warnings.warn(
            f"the C++ packing core is not available ({error}); the numpy reference is used, "
            "which is slower. Build it with `python setup.py build_ext --inplace`.",
            RuntimeWarning,
            stacklevel=2,
        )
        return reference
    return module


core = _load()
is_native = core is not reference
