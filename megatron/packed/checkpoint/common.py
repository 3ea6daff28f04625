"""What all ranks of a checkpoint have alike: plain data, of the types that a run takes it for."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from megatron.packed.checkpoint.storage import COMMON
from megatron.packed.checkpoint.trust import weights_only
from megatron.packed.errors import DataError

# What a run reads, where it is there, and as what.
_TYPES: dict[str, type | tuple[type, ...]] = {
    "iteration": int,
    "consumed_samples": int,
    "args": argparse.Namespace,
    "opt_param_scheduler": dict,
    "optimizer_step": int,
    "bad_batches": int,
    "layout": dict,
    "data": (dict, type(None)),
    "grad_scaler": (dict, type(None)),
}


def read_common(path: Path) -> dict[str, Any]:
    """Read what every rank has alike.

    Raises:
        DataError: the file is missing or damaged, or holds code.
    """
    file = path / COMMON
    try:
        with weights_only():
            common = torch.load(file, map_location="cpu", weights_only=True)
        _check_common(common)
        return common
    except FileNotFoundError as error:
        raise DataError(f"{file}: missing") from error
    except Exception as error:  # a damaged archive can fail in any way
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{file}: damaged, or not plain data ({reason[:160]})") from error


def _check_common(common: Any) -> None:
    """Raise a ValueError for what isn't of its type."""
    if not isinstance(common, dict) or "iteration" not in common:
        raise ValueError("it names no iteration")
    # Upstream's own checkpoints count samples among the arguments.
    counted = getattr(common.get("args"), "consumed_train_samples", 0)
    for key, types in _TYPES.items():
        if key not in common and key != "consumed_samples":
            continue
        value: Any = common.get(key, counted)
        fits = isinstance(value, types) and not isinstance(value, bool)
        if not fits or (types is int and value < 0):
            raise ValueError(f"its {key} is {str(value)[:40]!r}")
