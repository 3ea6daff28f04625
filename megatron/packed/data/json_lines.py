"""JSON lines files as documents; every malformed line is reported with its place."""

from __future__ import annotations

import glob
import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.packed.errors import DataError


@dataclass(frozen=True)
class JsonLine:
    """One unparsed line; parsing is left to whichever process has the time.

    Attributes:
        source: file and line number, as in corpus.jsonl:17.
        raw: the line's bytes.
    """

    source: str
    raw: bytes

    def parse(self) -> Any:
        """What the line says.

        Raises:
            DataError: if it is no JSON.
        """
        try:
            return json.loads(self.raw)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{self.source} is no JSON ({error}); each line must be one JSON object"
            ) from error

    def texts(self, key: str) -> list[str]:
        """Text under `key`: one for a string, several for a list of strings.

        Args:
            key: key of the JSON object.

        Raises:
            DataError: if the line is no JSON object with text under `key`.
        """
        entry = self.parse()
        if not isinstance(entry, dict) or key not in entry:
            known = ", ".join(sorted(entry)) if isinstance(entry, dict) else type(entry).__name__
            raise DataError(
                f"{self.source} has no key {key!r} (it has: {known}); name the key of the text "
                "with --json-keys"
            )
        value = entry[key]
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise DataError(
                f"{self.source}: {key!r} holds {type(value).__name__}; it must be a string or a "
                "list of strings"
            )
        return texts

    def weight(self, key: str) -> float:
        """The number under `key`: finite and not negative.

        Args:
            key: key of the JSON object.

        Raises:
            DataError: if there is none.
        """
        entry = self.parse()
        value = entry.get(key) if isinstance(entry, dict) else None
        number = float(value) if isinstance(value, int | float) else float("nan")
        if isinstance(value, bool) or not 0 <= number < float("inf"):
            raise DataError(
                f"{self.source}: {key!r} holds {value!r}; with --weights-key it must be a number "
                "from 0 on"
            )
        return number


class JsonLines:
    """Non-blank lines of one or more files, in order.

    Args:
        inputs: paths or glob patterns; .gz files are unpacked on the fly.
        flag: the flag that named them, for messages.

    Raises:
        DataError: if an input matches no file, or a file is empty or unreadable.
    """

    def __init__(self, inputs: Sequence[str], flag: str = "--input") -> None:
        self.flag = flag
        self.paths: list[Path] = []
        for entry in inputs:
            matches = [entry] if os.path.isfile(entry) else sorted(glob.glob(entry, recursive=True))
            files = [Path(match) for match in matches if os.path.isfile(match)]
            if not files:
                raise DataError(f"{flag} {entry}: there is no such file; check the path")
            self.paths += files
        for path in self.paths:
            try:
                with open(path, "rb") as stream:
                    empty = not stream.read(1)
            except OSError as error:
                raise DataError(
                    f"{flag} {path}: can't be read ({error.strerror}); check its permissions"
                ) from error
            if empty:
                raise DataError(f"{flag} {path} is empty; give a file of JSON lines")

    @property
    def total_bytes(self) -> int:
        """Size of all files on disk."""
        return sum(path.stat().st_size for path in self.paths)

    def __iter__(self) -> Iterator[JsonLine]:
        for path in self.paths:
            unpack = gzip.open if path.suffix == ".gz" else open
            try:
                with unpack(path, "rb") as stream:
                    for number, raw in enumerate(stream, start=1):
                        if raw.strip():
                            yield JsonLine(f"{path}:{number}", raw)
            except (gzip.BadGzipFile, zlib.error, EOFError) as error:
                raise DataError(
                    f"{self.flag} {path} is no whole gzip file ({error}); pack it again"
                ) from error
