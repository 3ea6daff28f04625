"""What a whole checkpoint consists of: every file's size and SHA-256, written last."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.packed.errors import DataError
from megatron.packed.json_text import read_json

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
_BLOCK = 1 << 22


@dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint.

    Attributes:
        bytes: its size.
        sha256: hexadecimal digest of its content.
    """

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The files of one checkpoint.

    Attributes:
        iteration: of the checkpoint.
        files: records by name, relative to the checkpoint's folder.
        format_version: of this record.
    """

    iteration: int
    files: Mapping[str, FileRecord]
    format_version: int = FORMAT_VERSION

    def write(self, folder: Path) -> None:
        """Write the manifest with a digest of itself."""
        content = {
            "format_version": self.format_version,
            "iteration": self.iteration,
            "files": {name: asdict(record) for name, record in sorted(self.files.items())},
        }
        document = {**content, "sha256": _digest_of(content)}
        with open(folder / MANIFEST, "w", encoding="utf-8") as stream:
            json.dump(document, stream, indent=1)

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Read a checkpoint's manifest; None where there is none (another program's checkpoint).

        Raises:
            DataError: it is damaged, or of a version that this program doesn't know.
        """
        path = folder / MANIFEST
        try:
            document = read_json(path)
            content = {key: document[key] for key in ("format_version", "iteration", "files")}
            if document["sha256"] != _digest_of(content):
                raise ValueError("its digest doesn't match its content")
            files = {name: FileRecord(**record) for name, record in content["files"].items()}
            iteration = int(content["iteration"])
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataError(f"{path}: can't be read ({error.strerror})") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}: damaged ({_short(error)})") from error
        if content["format_version"] != FORMAT_VERSION:
            raise DataError(
                f"{path}: format version {content['format_version']}, but this program reads "
                f"version {FORMAT_VERSION}; load it with the version that wrote it"
            )
        for name in files:
            if not stays_inside(name):
                raise DataError(f"{path}: names {name!r}, which lies outside the checkpoint")
        return cls(iteration, files)

    def damage(self, folder: Path, names: Sequence[str], *, contents: bool = True) -> list[str]:
        """Compare files with their records.

        Args:
            folder: the checkpoint's folder.
            names: which of the manifest's files.
            contents: read them whole; else only look at sizes.

        Returns:
            One message a file that is missing or differs, naming it.
        """
        messages = []
        for name in names:
            path, record = folder / name, self.files[name]
            try:
                size = path.stat().st_size
                if size != record.bytes:
                    messages.append(f"{path}: {size} bytes, {record.bytes} were written")
                elif contents and digest(path) != record.sha256:
                    messages.append(f"{path}: content has changed since it was written")
            except FileNotFoundError:
                messages.append(f"{path}: missing")
            except OSError as error:
                messages.append(f"{path}: can't be read ({error.strerror})")
        return messages


def digest(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    state = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(_BLOCK):
            state.update(block)
    return state.hexdigest()


def record_of(path: Path) -> FileRecord:
    """Size and digest of a file as it is on disk."""
    return FileRecord(path.stat().st_size, digest(path))


def _digest_of(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def stays_inside(name: str) -> bool:
    """Whether a name from a checkpoint leads to a file below the checkpoint's folder."""
    path = Path(name)
    return (
        not path.is_absolute()
        and ".." not in path.parts
        and name not in ("", ".")
        and "\0" not in name
    )


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:120]
