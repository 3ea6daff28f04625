"""Outputs that appear whole or not at all: temporary name, fsync, rename."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron.packed.errors import DataError


def temporary_name(path: Path) -> Path:
    """Name beside `path` that no reader takes for a finished file.

    Args:
        path: the final name.
    """
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def publish(written: list[tuple[Path, Path]]) -> None:
    """Make finished temporary files visible under their final names, in the given order.

    A reader that opens the last file of the list finds all the others in place. What an earlier
    run left under the same names is unlinked first, last file first, so that a crash in between
    can't pair a new file with an old one.

    Args:
        written: (temporary path, final path) pairs on one file system.
    """
    for temporary, _ in written:
        _fsync(temporary)
    if len(written) > 1:
        for _, final in reversed(written):
            final.unlink(missing_ok=True)
    for temporary, final in written:
        os.replace(temporary, final)
    for folder in {final.parent for _, final in written}:
        _fsync(folder)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path; on success it becomes `path`, on any exception it is removed.

    Args:
        path: the final name; its folder is created.
    """
    require_writable_folder(path.parent, f"output file {path}")
    temporary = temporary_name(path)
    try:
        yield temporary
        publish([(temporary, path)])
    finally:
        temporary.unlink(missing_ok=True)


def require_writable_folder(folder: Path, purpose: str) -> None:
    """Create `folder` if need be and prove that a file can be written there.

    Args:
        folder: the folder.
        purpose: what the folder is for, in the words of the error message.

    Raises:
        DataError: if the folder can't be created or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise DataError(
            f"{purpose}: can't write in folder {folder} ({error.strerror or error}); "
            "give a folder that this user may create and write"
        ) from error


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
