"""Names of checkpoints in a folder, and how one becomes, or stops being, one of them.

checkpoints/
  iter_0000100/                         one whole checkpoint
  iter_0000200/
  latest_checkpointed_iteration.txt     "200"
  .iter_0000300.tmp/                    being written, or left by a crash; never read
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from megatron.packed.errors import DataError

TRACKER = "latest_checkpointed_iteration.txt"
_NAME = re.compile(r"iter_(\d{7,})")
_TEMPORARY = re.compile(r"\.iter_\d{7,}\.(tmp|replaced)")


@dataclass(frozen=True)
class CheckpointFolder:
    """A folder of checkpoints (`--save` or `--load`).

    Attributes:
        root: the folder; it need not exist.
        flag: the flag that named it, for messages.
    """

    root: Path
    flag: str = "--save"

    def path(self, iteration: int) -> Path:
        """Where the checkpoint of an iteration is, or would be."""
        return self.root / f"iter_{iteration:07d}"

    def temporary(self, iteration: int) -> Path:
        """Where the checkpoint of an iteration is written before it counts."""
        return self.root / f".iter_{iteration:07d}.tmp"

    def iterations(self) -> list[int]:
        """Iterations that have a checkpoint by name, oldest first; intact or not."""
        if not self.root.is_dir():
            return []
        found = (_NAME.fullmatch(entry.name) for entry in self.root.iterdir() if entry.is_dir())
        return sorted(int(match.group(1)) for match in found if match)

    def tracked(self) -> int | None:
        """The iteration that the tracker file names, or None without a tracker file.

        Raises:
            DataError: the file holds something else.
        """
        tracker = self.root / TRACKER
        try:
            text = tracker.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataError(f"{tracker}: can't be read ({error.strerror})") from error
        stripped = text.strip()
        if not stripped.isdigit() or len(stripped) > 18:
            shown = repr(text[:40])[1:]
            raise DataError(
                f"{tracker}: holds {shown}, where the number of an iteration should be; "
                "write that of an existing iter_* folder, or pass --ckpt-step"
            )
        return int(stripped)

    def prepare(self, iteration: int) -> Path:
        """Make an empty temporary folder, clearing what a crash has left.

        Returns:
            The folder to write to.

        Raises:
            OSError: the folder can't be made.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        for entry in self.root.iterdir():
            if _TEMPORARY.fullmatch(entry.name):
                shutil.rmtree(entry, ignore_errors=True)
        temporary = self.temporary(iteration)
        temporary.mkdir()
        return temporary

    def publish(self, iteration: int) -> None:
        """Turn the finished temporary folder into the checkpoint that the tracker names.

        A crash at any point leaves the tracker on a checkpoint that was whole before.

        Raises:
            OSError: the disk refuses.
        """
        temporary, final = self.temporary(iteration), self.path(iteration)
        sync_tree(temporary)
        replaced = self.root / f".{final.name}.replaced"
        if final.exists():
            os.replace(final, replaced)
        os.replace(temporary, final)
        sync(self.root)
        self.track(iteration)
        shutil.rmtree(replaced, ignore_errors=True)

    def track(self, iteration: int) -> None:
        """Make the tracker file name an iteration, at once or not at all."""
        tracker = self.root / TRACKER
        temporary = self.root / f".{TRACKER}.tmp"
        with open(temporary, "w", encoding="ascii") as stream:
            stream.write(str(iteration))
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, tracker)
        sync(self.root)

    def discard(self, iteration: int) -> None:
        """Drop a temporary folder that won't be finished."""
        shutil.rmtree(self.temporary(iteration), ignore_errors=True)

    def remove(self, iteration: int) -> None:
        """Delete a checkpoint, by a name first that no reader takes for one."""
        doomed = self.root / f".iter_{iteration:07d}.replaced"
        with contextlib.suppress(FileNotFoundError):
            os.replace(self.path(iteration), doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def superseded(iterations: list[int], newest: int, retain_interval: int | None) -> list[int]:
    """Checkpoints that retention gives up once a newer one is whole.

    Args:
        iterations: those on disk.
        newest: the one just written; it and later ones stay.
        retain_interval: multiples of it stay (`--save-retain-interval`); None keeps all.
    """
    if retain_interval is None:
        return []
    return [i for i in iterations if i < newest and i % retain_interval]


def sync(path: Path) -> None:
    """Have the disk know a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """`sync` every file below a folder, then the folders."""
    for directory, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(Path(directory) / name)
        sync(Path(directory))
