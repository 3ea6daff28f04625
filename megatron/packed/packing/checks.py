"""Argument checks shared by this room: each names the argument, the value and the rule."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

INT64_MAX = 2**63 - 1
_INT64 = np.dtype(np.int64)


def integer_array(name: str, value: Any, ndim: int) -> NDArray[np.int64]:
    """Return `value` as an int64 array of `ndim` dimensions, last one contiguous.

    Raises:
        ValueError: for a dtype that is not an integer, a wrong rank, or values past int64.
    """
    if type(value) is np.ndarray and value.dtype is _INT64 and value.ndim == ndim:
        # The common case, several times a batch.
        if not ndim or value.strides[-1] == 8 or not value.size:
            return value
        return np.ascontiguousarray(value)
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{name}: not an integer array ({error})") from error
    if array.ndim != ndim:
        raise ValueError(f"{name}: must have {ndim} dimension(s), got shape {array.shape}")
    # An empty list becomes a float array of no values: that is no fault.
    empty = array.size == 0 and array.dtype.kind == "f"
    if array.dtype.kind not in "iu" and not empty:
        raise ValueError(f"{name}: must hold integers, got dtype {array.dtype}")
    if array.dtype == np.uint64 and array.size and int(array.max()) > INT64_MAX:
        raise ValueError(f"{name}: value {int(array.max())} does not fit in int64")
    if array.dtype != np.int64:
        array = array.astype(np.int64)
    if ndim and array.size and array.strides[-1] != array.itemsize:
        array = np.ascontiguousarray(array)
    return array


def integer(name: str, value: Any, minimum: int | None = None) -> int:
    """Return `value` as a Python int.

    Raises:
        ValueError: for anything that is not an integer, past int64, or below `minimum`.
    """
    lowest = -INT64_MAX - 1 if minimum is None else minimum
    if type(value) is int and lowest <= value <= INT64_MAX:
        return value  # the common case, several times a batch
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise ValueError(f"{name}: must be an integer, got {value!r}")
    if not -INT64_MAX - 1 <= int(value) <= INT64_MAX:
        raise ValueError(f"{name}: {value} does not fit in int64")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name}: must be at least {minimum}, got {value}")
    return int(value)


def boundary_array(name: str, value: Any) -> NDArray[np.int32]:
    """Return `value` as int32 boundaries `[n + 1]` that start at 0 and never fall.

    Raises:
        ValueError: when they don't, or when the last one exceeds 2**31 - 1.
    """
    if isinstance(value, np.ndarray) and value.dtype == np.int32 and value.ndim == 1:
        array = value
    else:
        array = integer_array(name, value, 1)
    if array.size == 0 or array[0] != 0:
        raise ValueError(f"{name}: must start at 0, got {array[:4].tolist()}")
    if array.size > 1 and np.any(array[1:] < array[:-1]):
        where = int(np.argmax(array[1:] < array[:-1]))
        raise ValueError(
            f"{name}: must not fall, got {array[where]} then {array[where + 1]} at {where + 1}"
        )
    if array[-1] > 2**31 - 1:
        raise ValueError(f"{name}: last boundary {array[-1]} exceeds 2**31 - 1")
    return np.ascontiguousarray(array, dtype=np.int32)
