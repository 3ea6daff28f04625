"""Write source files as a corpus of documents: one JSON line `{"text", "source"}` a file.

Without --root these are the Python standard library's own modules: real, long-tailed text that is
on every machine. The order is that of the sources' hashes: the same everywhere, and any prefix of
it (--max-documents, a --split) is a fair sample of the whole.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from megatron.packed.data.files import whole_file
from megatron.packed.errors import DataError

# Installed packages differ from machine to machine.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}


def source_files(root: Path, pattern: str) -> list[Path]:
    """Files under `root` that match `pattern`, in the order of their relative names' hashes.

    Args:
        root: folder to search.
        pattern: file-name pattern, such as "*.py".

    Raises:
        DataError: if there are none.
    """
    if not root.is_dir():
        raise DataError(f"--root {root} is no folder; give one that holds {pattern} files")
    found = [
        path
        for path in root.rglob(pattern)
        if path.is_file() and not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
    ]
    if not found:
        raise DataError(f"--root {root} holds no {pattern} file; give another folder or --pattern")
    return sorted(found, key=lambda path: _order_key(path.relative_to(root)))


def read_source(path: Path) -> str | None:
    """Text of a source file by its declared encoding; None if it has none.

    Args:
        path: the file.
    """
    raw = path.read_bytes()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        return raw.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError):
        # The standard library's own tests hold files that are broken on purpose.
        return None


def documents(
    root: Path, pattern: str, max_documents: int | None, limit_bytes: int | None
) -> Iterator[tuple[str, str]]:
    """Yield (text, source) of non-blank files until a limit is reached.

    Args:
        root: folder to search.
        pattern: file-name pattern.
        max_documents: most documents to yield; None for all.
        limit_bytes: most UTF-8 bytes of text to yield; None for all.
    """
    count, size = 0, 0
    for path in source_files(root, pattern):
        if max_documents is not None and count >= max_documents:
            return
        text = read_source(path)
        if text is None or not text.strip():
            continue
        size += len(text.encode("utf-8"))
        if limit_bytes is not None and size > limit_bytes:
            return
        count += 1
        yield text, path.relative_to(root).as_posix()


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="Path of the .jsonl to write.")
    parser.add_argument(
        "--root",
        type=Path,
        default=Path(sysconfig.get_path("stdlib")),
        help="Folder to search. Default: the standard library.",
    )
    parser.add_argument("--pattern", default="*.py", help="File names to take. Default: *.py")
    parser.add_argument("--max-documents", type=int, help="Most documents to write.")
    parser.add_argument("--limit-bytes", type=int, help="Most bytes of text to write.")
    options = parser.parse_args(arguments)
    for flag in ("max_documents", "limit_bytes"):
        value = getattr(options, flag)
        if value is not None and value < 1:
            parser.error(f"--{flag.replace('_', '-')} {value} must be at least 1")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Write the corpus.

    Args:
        arguments: command line without the program's name; None reads sys.argv.

    Raises:
        DataError: if nothing can be read or written.
    """
    options = parse_arguments(arguments)
    count, size = 0, 0
    with whole_file(options.output) as temporary:
        with open(temporary, "w", encoding="utf-8") as stream:
            for text, source in documents(
                options.root, options.pattern, options.max_documents, options.limit_bytes
            ):
                stream.write(json.dumps({"text": text, "source": source}) + "\n")
                count, size = count + 1, size + len(text)
        if count == 0:
            raise DataError(
                f"no readable document in --root {options.root} within the limits; "
                "raise --limit-bytes or give another folder"
            )
    print(f"{options.output}: {count} documents, {size / 1e6:.1f} M characters")


def _order_key(source: Path) -> bytes:
    return hashlib.sha256(source.as_posix().encode("utf-8", errors="surrogateescape")).digest()


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        sys.exit(f"error: {error}")
