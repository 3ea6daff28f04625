"""Chooses between the C++ core and the numpy reference, once.

Both offer the same functions; `core` is the one in use. `MEGATRON_PACKED_NATIVE=0` forces the
reference, which is how a suspected fault of the C++ is told from one of the plan.
"""

from __future__ import annotations

import os
import warnings
from types import ModuleType

from megatron.packed.extensions import load_extension
from megatron.packed.packing import reference


def _load() -> ModuleType:
    if os.environ.get("MEGATRON_PACKED_NATIVE", "1") == "0":
        return reference
    if os.environ.get("MEGATRON_PACKED_EXTENSION_DIR"):
        return load_extension("_C")  # and nothing else where it is not there
    try:
        module = load_extension("_C")
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
