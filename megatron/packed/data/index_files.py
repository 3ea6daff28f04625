"""The `.bin/.idx` pair: written as a stream, read with distrust.

megatron-core's reader asserts the magic number and trusts the rest; a pair cut short by a full
disk then fails deep inside a data worker, or not at all. Its writer imports torch and half of
megatron-core; the one here writes the same bytes and needs numpy alone.

Format, little-endian: 9 bytes magic, uint64 version, uint8 dtype code, uint64 sequences, uint64
document boundaries; int32 lengths, int64 byte offsets into the .bin file, int64 boundaries.

Source: megatron/core/datasets/indexed_dataset.py, `_IndexWriter`
"""

from __future__ import annotations

import difflib
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy

from megatron.packed.data.document_weights import weights_path
from megatron.packed.data.files import temporary_name
from megatron.packed.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TOKEN_DTYPES = {
    1: numpy.uint8,
    2: numpy.int8,
    3: numpy.int16,
    4: numpy.int32,
    5: numpy.int64,
    8: numpy.uint16,
}
_FLOAT_CODES = {6: "float64", 7: "float32"}
# Beyond these the last offset vouches for the rest; a start-up need not read gigabytes.
_CHECKED_POINTERS = 1 << 24
_REMEDY = "run tools/preprocess_data.py again"


@dataclass(frozen=True)
class IndexedCorpus:
    """An inspected corpus.

    Attributes:
        prefix: path without .bin/.idx.
        sequence_lengths: int32 `[sequences]`, tokens of each.
        sequence_pointers: int64 `[sequences]`, byte offset of each in the .bin file.
        tokens: the .bin file as a read-only map of token ids, `[all tokens]`.
        document_boundaries: entries of the index that bound documents.
    """

    prefix: str
    sequence_lengths: numpy.ndarray
    sequence_pointers: numpy.ndarray
    tokens: numpy.ndarray
    document_boundaries: int

    def locate(self, place: int) -> tuple[int, int]:
        """Document and offset in it of the token at `place` of the .bin file."""
        byte = place * self.tokens.itemsize
        document = int(numpy.searchsorted(self.sequence_pointers, byte, side="right")) - 1
        return document, place - int(self.sequence_pointers[document]) // self.tokens.itemsize


class CorpusWriter:
    """Writes a corpus under temporary names; `files.publish` makes it visible.

    Args:
        prefix: final path without .bin/.idx.
        dtype: dtype of the token ids.
    """

    def __init__(self, prefix: str, dtype: type) -> None:
        self.prefix = prefix
        self.dtype = numpy.dtype(dtype)
        self.tokens = 0
        # The index goes last: a reader that finds it finds the tokens too.
        self.files = [
            (temporary_name(path), path) for path in (Path(f"{prefix}.bin"), Path(f"{prefix}.idx"))
        ]
        self._stream = open(self.files[0][0], "wb")  # noqa: SIM115
        self._lengths: list[numpy.ndarray] = []
        self._weights: list[numpy.ndarray] = []
        self._document_sizes: list[numpy.ndarray] = []

    def add(
        self,
        tokens: numpy.ndarray,
        sequence_lengths: numpy.ndarray,
        sequences_per_document: numpy.ndarray,
        weights: numpy.ndarray | None = None,
    ) -> None:
        """Append documents.

        Args:
            tokens: `[all tokens]` in the writer's dtype.
            sequence_lengths: int32 `[sequences]`, tokens of each.
            sequences_per_document: int64 `[documents]`, sequences of each; may be 0.
            weights: float64 `[sequences]`, for the file of weights; always or never given.
        """
        if weights is not None:
            self._weights.append(weights)
        self._stream.write(tokens.astype(self.dtype, copy=False).tobytes())
        self._lengths.append(sequence_lengths.astype(numpy.int32, copy=False))
        self._document_sizes.append(sequences_per_document.astype(numpy.int64, copy=False))
        self.tokens += len(tokens)

    def finalize(self) -> list[tuple[Path, Path]]:
        """Write the index, and weights where there are any.

        Returns:
            (temporary, final) names, the index last.
        """
        if self._weights:
            path = weights_path(self.prefix)
            self.files.insert(0, (temporary_name(path), path))
            with open(self.files[0][0], "wb") as file:
                numpy.save(file, numpy.concatenate(self._weights))
        index = self.files[-1][0]
        self._stream.close()
        lengths = numpy.concatenate([numpy.empty(0, numpy.int32), *self._lengths])
        steps = lengths.astype(numpy.int64) * self.dtype.itemsize
        documents = numpy.concatenate([numpy.zeros(1, numpy.int64), *self._document_sizes])
        code = next(code for code, dtype in _TOKEN_DTYPES.items() if dtype == self.dtype.type)
        with open(index, "wb") as stream:
            stream.write(_HEADER.pack(_MAGIC, 1, code, len(lengths), len(documents)))
            stream.write(lengths.tobytes())
            stream.write((numpy.cumsum(steps) - steps).tobytes())
            stream.write(numpy.cumsum(documents).tobytes())
        return self.files

    def discard(self) -> None:
        """Remove what is left under temporary names."""
        self._stream.close()
        for temporary, _ in self.files:
            temporary.unlink(missing_ok=True)


def inspect_corpus(flag: str, prefix: str) -> IndexedCorpus:
    """Open a corpus and check that both files are what they claim to be.

    Args:
        flag: the flag that named it, for messages.
        prefix: path without .bin/.idx.

    Returns:
        The corpus, memory-mapped.

    Raises:
        DataError: if a file is missing, unreadable, empty, truncated or corrupt.
    """
    index_path, bin_path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    _require_both_files(flag, prefix, index_path, bin_path)
    try:
        with open(index_path, "rb") as stream:
            header = stream.read(_HEADER.size)
        index_bytes, bin_bytes = index_path.stat().st_size, bin_path.stat().st_size
        with open(bin_path, "rb"):
            pass
    except OSError as error:
        raise DataError(
            f"{flag} {prefix}: can't read {error.filename} ({error.strerror}); "
            "give this user read access"
        ) from error
    where = f"{flag} {prefix}: {index_path}"
    if index_bytes == 0:
        raise DataError(f"{where} is empty; {_REMEDY}")
    if len(header) < _HEADER.size:
        raise DataError(
            f"{where} is truncated: {index_bytes} bytes can't hold the {_HEADER.size}-byte "
            f"header; {_REMEDY}"
        )
    magic, version, code, sequences, documents = _HEADER.unpack(header)
    if magic != _MAGIC or version != 1:
        raise DataError(
            f"{where} is no index file: it starts with {magic!r}, version {version}, "
            f"instead of {_MAGIC!r}, version 1; {_REMEDY}"
        )
    if code not in _TOKEN_DTYPES:
        raise DataError(
            f"{where} declares dtype {_FLOAT_CODES.get(code, f'code {code}')}; token ids must be "
            f"integers; {_REMEDY}"
        )
    expected = _HEADER.size + sequences * (4 + 8) + documents * 8
    # A multimodal index carries one more byte for each sequence.
    if index_bytes not in (expected, expected + sequences):
        raise DataError(
            f"{where} is {'truncated' if index_bytes < expected else 'corrupt'}: its header "
            f"claims {sequences} sequences and {documents} document boundaries, {expected} bytes, "
            f"and it has {index_bytes}; {_REMEDY}"
        )
    if sequences == 0:
        raise DataError(f"{where} holds no document; give --input a corpus with text and {_REMEDY}")
    return _open_corpus(where, prefix, _TOKEN_DTYPES[code], sequences, documents, bin_bytes)


def _open_corpus(
    where: str, prefix: str, dtype: type, sequences: int, documents: int, bin_bytes: int
) -> IndexedCorpus:
    mapped = numpy.memmap(f"{prefix}.idx", mode="r", dtype=numpy.uint8)
    cuts = numpy.cumsum([_HEADER.size, sequences * 4, sequences * 8, documents * 8])
    lengths = mapped[cuts[0] : cuts[1]].view(numpy.int32)
    pointers = mapped[cuts[1] : cuts[2]].view(numpy.int64)
    boundaries = mapped[cuts[2] : cuts[3]].view(numpy.int64)
    itemsize = numpy.dtype(dtype).itemsize
    if int(lengths.min()) < 0:
        raise DataError(f"{where} is corrupt: a document has {lengths.min()} tokens; {_REMEDY}")
    if documents == 0 or boundaries[0] != 0 or boundaries[-1] != sequences:
        raise DataError(
            f"{where} is corrupt: its document boundaries must run from 0 to {sequences}; {_REMEDY}"
        )
    if (numpy.diff(boundaries[:_CHECKED_POINTERS]) < 0).any():
        raise DataError(f"{where} is corrupt: its document boundaries go back; {_REMEDY}")
    total = int(lengths.sum(dtype=numpy.int64))
    total_bytes = total * itemsize
    head = slice(0, _CHECKED_POINTERS)
    steps = lengths[head].astype(numpy.int64) * itemsize
    if (
        int(pointers[-1]) + int(lengths[-1]) * itemsize != total_bytes
        or (pointers[head] != numpy.cumsum(steps) - steps).any()
    ):
        raise DataError(
            f"{where} is corrupt: its byte offsets don't follow from its lengths; {_REMEDY}"
        )
    if bin_bytes < total_bytes:
        raise DataError(
            f"{where} claims {total_bytes} bytes of tokens and {prefix}.bin has {bin_bytes}: "
            f"the copy or the preprocessing broke off; copy it again or {_REMEDY}"
        )
    if total == 0:
        raise DataError(f"{where} holds no token: all its documents are empty; {_REMEDY}")
    tokens = numpy.memmap(f"{prefix}.bin", mode="r", dtype=dtype, shape=(total,))
    return IndexedCorpus(prefix, lengths, pointers, tokens, documents)


def _require_both_files(flag: str, prefix: str, index_path: Path, bin_path: Path) -> None:
    has_index, has_bin = os.path.isfile(index_path), os.path.isfile(bin_path)
    if has_index and has_bin:
        return
    if has_index or has_bin:
        missing, there = (bin_path, index_path) if has_index else (index_path, bin_path)
        raise DataError(
            f"{flag} {prefix}: {missing} is missing beside {there}; a corpus needs both: "
            f"copy it, or {_REMEDY}"
        )
    raise DataError(
        f"{flag} {prefix}: no such corpus (neither {index_path.name} nor {bin_path.name} in "
        f"{index_path.parent}); {_suggestion(prefix)}"
    )


def _suggestion(prefix: str) -> str:
    for suffix in (".idx", ".bin"):
        bare = prefix.removesuffix(suffix)
        if bare != prefix and os.path.isfile(f"{bare}.idx"):
            return f"give the prefix without {suffix}: {bare}"
    folder = Path(prefix).parent
    if not os.path.isdir(folder):
        return f"the folder {folder} does not exist"
    known = sorted(str(path.with_suffix("")) for path in folder.glob("*.idx"))
    nearest = difflib.get_close_matches(str(Path(prefix)), known, n=1, cutoff=0.0)
    if nearest:
        return f"did you mean {nearest[0]}?"
    return "that folder holds no corpus; make one with tools/preprocess_data.py"
