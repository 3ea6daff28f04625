"""Weights of documents, beside a corpus: `<prefix>.weights.npy`, one number a document."""

from __future__ import annotations

import os
from pathlib import Path

import numpy

from megatron.packed.errors import DataError

SUFFIX = ".weights.npy"


def weights_path(prefix: str) -> Path:
    """Where the weights of a corpus are.

    Args:
        prefix: path without .bin/.idx.
    """
    return Path(f"{prefix}{SUFFIX}")


def open_weights(flag: str, prefix: str) -> numpy.ndarray:
    """Map the weights of a corpus.

    Args:
        flag: the flag that named the corpus.
        prefix: path without .bin/.idx.

    Returns:
        Floating-point `[sequences]`.

    Raises:
        DataError: if there is no such file, or it is no vector of floating-point numbers.
    """
    path = weights_path(prefix)
    if not os.path.isfile(path):
        raise DataError(
            f"--use-document-weights: {flag} {prefix} has no {path}; make it with "
            "tools/preprocess_data.py --weights-key, or leave the flag out"
        )
    try:
        # Not numpy.load: it would open a zip archive, too.
        weights = numpy.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # numpy reads the header with Python's parser: anything can be wrong
        raise DataError(f"{path} is no .npy file ({_first_line(error)}); make it again") from error
    if weights.ndim != 1 or weights.dtype.kind != "f":
        raise DataError(
            f"{path} holds {weights.dtype} of shape {weights.shape}; it must be a vector of "
            "floating-point numbers, one for each document"
        )
    return weights


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def check_weights(flag: str, prefix: str, sequences: int) -> None:
    """Check that a corpus has one weight for each of its documents.

    Args:
        flag: the flag that named the corpus.
        prefix: path without .bin/.idx.
        sequences: documents of the corpus.

    Raises:
        DataError: if the number differs, or a weight is negative or no number, or all are 0.
    """
    weights = open_weights(flag, prefix)
    path = weights_path(prefix)
    if len(weights) != sequences:
        raise DataError(
            f"{path} holds {len(weights)} weights for the {sequences} documents of {flag} "
            f"{prefix}; make both again from one input"
        )
    bad = numpy.flatnonzero(~(numpy.isfinite(weights) & (weights >= 0)))
    if len(bad):
        raise DataError(
            f"{path}: document {bad[0]} has weight {weights[bad[0]]}; weights are finite and not "
            "negative"
        )
    if not weights.any():
        raise DataError(f"{path}: all weights are 0, so nothing would be learnt")
