"""The C++ kernels for training on a CPU, where they were built and the tensors suit them.

Every operation that uses them keeps a torch path beside it, for other dtypes and devices and for
an installation without the extension; tests hold the two together.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from megatron.packed.extensions import load_extension

# What its functions take; raised with every change, in csrc/cpu_ops/module.cpp too.
_INTERFACE = 3


@cache
def load() -> ModuleType | None:
    """The extension, tied to torch's thread pool; None where it was not built.

    ``MEGATRON_PACKED_CPU_OPS=0`` in the environment turns it off, to compare.
    """
    if os.environ.get("MEGATRON_PACKED_CPU_OPS") == "0":
        return None
    try:
        extension = load_extension("_cpu_ops")
    except ModuleNotFoundError:
        return None
    if getattr(extension, "interface", 1) != _INTERFACE:
        warnings.warn(
            "the C++ kernels for training on a CPU were built from other sources and are not used, "
            "which is slower. Build them with `python setup.py build_ext --inplace`.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    extension.use_gomp(_gomp_parallel())
    extension.use_sgemm(_blas("sgemm_"))
    extension.use_blas_threads(_blas("MKL_Set_Num_Threads_Local"))
    return extension


def suitable(*tensors: Tensor) -> ModuleType | None:
    """The extension if it can work on these tensors, which must be fp32 on the CPU."""
    if all(x.dtype == torch.float32 and x.device.type == "cpu" for x in tensors):
        return load()
    return None


def threads() -> int:
    """Threads that torch itself would use."""
    return torch.get_num_threads()


def _gomp_parallel() -> int:
    """Address of GOMP_parallel in the libgomp that torch has loaded, 0 if it runs on another.

    A library of our own would bring a second pool, whose threads and torch's spin against each
    other. The name in the wheel carries a hash, so the process's own map is asked.
    """
    try:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            paths = {line.split()[-1] for line in maps if "libgomp" in line}
    except OSError:
        return 0
    if len(paths) != 1:
        return 0
    try:
        function = ctypes.CDLL(paths.pop()).GOMP_parallel
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _blas(name: str) -> int:
    """Address of a function in the BLAS that torch itself calls, 0 if its library exports none."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = getattr(ctypes.CDLL(str(library)), name)
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0
