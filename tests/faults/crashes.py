"""Places inside a save at which a process can be made to die, and disks that refuse."""

from __future__ import annotations

import errno
import functools
import os
import signal
from collections.abc import Callable
from typing import Any

# In the order in which a save passes them.
CRASH_POINTS = (
    "after prepare",
    "mid-write",
    "after write",
    "before manifest",
    "after manifest",
    "before rename",
    "between renames",
    "before tracker",
    "inside tracker",
    "after tracker",
)


def die() -> None:
    """End this process as a power cut would."""
    os.kill(os.getpid(), signal.SIGKILL)


def refuse() -> None:
    """Fail as a full disk does."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def deny() -> None:
    """Fail as a disk that turned read-only does."""
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def at_save(
    trainer: Any,
    point: str,
    iteration: int,
    action: Callable[[], None] = die,
    last: int | None = None,
    rank: int = 0,
) -> None:
    """Do something at a point of the saves of some iterations, on one rank.

    Args:
        trainer: whose saves.
        point: one of CRASH_POINTS.
        iteration: of the first of these saves.
        action: what happens.
        last: iteration of the last of these saves; that of the first by default.
        rank: where it happens.
    """
    if trainer.environment.rank != rank:
        return
    from megatron.packed.checkpoint import folder as folders
    from megatron.packed.checkpoint import storage

    saver, under_way = trainer.saver, [0]
    save = saver.save

    @functools.wraps(save)
    def on_save(progress: Any) -> None:
        under_way[0] = progress.iteration
        save(progress)

    saver.save = on_save

    def act() -> None:
        if iteration <= under_way[0] <= (iteration if last is None else last):
            action()

    match point:
        case "after prepare":
            _after(folders.CheckpointFolder, "prepare", act)
        case "mid-write":
            _before_nth_write(storage.HashingStream, act)
        case "after write":
            _after(storage.ShardedSave, "write", act)
        case "before manifest":
            _before(storage.Manifest, "write", act)
        case "after manifest":
            _after(storage.Manifest, "write", act)
        case "before rename":
            _before(folders.CheckpointFolder, "publish", act)
        case "between renames":  # of what was there under this name, and of the new one
            _around_replace(folders, act)
        case "before tracker":
            _before(folders.CheckpointFolder, "track", act)
        case "inside tracker":
            _before_replace_of(folders, folders.TRACKER, act)
        case "after tracker":
            _after(folders.CheckpointFolder, "track", act)
        case _:
            raise ValueError(f"{point}: must be one of {', '.join(CRASH_POINTS)}")


def _before(owner: Any, name: str, act: Callable[[], None]) -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        act()
        return function(*args, **kwargs)

    setattr(owner, name, wrapped)


def _after(owner: Any, name: str, act: Callable[[], None]) -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        act()
        return result

    setattr(owner, name, wrapped)


def _before_nth_write(stream: Any, act: Callable[[], None], number: int = 5) -> None:
    """What was written so far is on the disk: half a file."""
    write, count = stream.write, [0]

    def wrapped(self: Any, data: Any) -> int:
        count[0] += 1
        if count[0] % number == 0:
            self.flush()
            act()
        return write(self, data)

    stream.write = wrapped


def _around_replace(folders: Any, act: Callable[[], None]) -> None:
    """After the checkpoint has its name, or, where one is replaced, while there is none."""
    replace = os.replace

    def wrapped(source: Any, target: Any) -> None:
        replace(source, target)
        if str(target).endswith(".replaced"):
            act()

    folders.os = _Os(replace=wrapped)


def _before_replace_of(folders: Any, name: str, act: Callable[[], None]) -> None:
    replace = os.replace

    def wrapped(source: Any, target: Any) -> None:
        if str(target).endswith(name):
            act()
        replace(source, target)

    folders.os = _Os(replace=wrapped)


class _Os:
    """The module `os` with some functions replaced."""

    def __init__(self, **functions: Any) -> None:
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)
