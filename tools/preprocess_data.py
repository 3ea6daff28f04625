"""Tokenize JSON lines into the `.bin/.idx` files that training reads.

Output is `<output-prefix>_<key>_document.bin` and `.idx`, as upstream names them. It appears under
these names only when complete.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))

from megatron.packed.data.files import publish, require_writable_folder
from megatron.packed.data.index_files import CorpusWriter
from megatron.packed.data.json_lines import JsonLine, JsonLines
from megatron.packed.data.tokenizer_base import PackedTokenizer
from megatron.packed.data.tokenizers import TOKENIZER_BUILDERS, build_tokenizer
from megatron.packed.errors import ConfigurationError, DataError

_CHUNK_BYTES = 1 << 20
_CHUNK_LINES = 1024
_CHUNKS_IN_FLIGHT = 3  # for each worker: enough to keep it busy, few enough to bound memory


@dataclass(frozen=True)
class EncodedChunk:
    """Documents of one chunk under one key.

    Attributes:
        tokens: `[all tokens of the chunk]`, in the dtype of the output.
        sequence_lengths: int32 `[sequences]`, tokens of each, documents one after the other.
        sequences_per_document: int64 `[documents]`: 1, or as many as a list has non-empty texts;
            0 for a document without tokens.
        weights: float64 `[sequences]`, each its document's; None without `--weights-key`.
    """

    tokens: numpy.ndarray
    sequence_lengths: numpy.ndarray
    sequences_per_document: numpy.ndarray
    weights: numpy.ndarray | None = None


class Encoder:
    """Tokenizes chunks of lines in a worker process.

    Args:
        tokenizer: text to ids.
        keys: JSON keys to tokenize.
        append_eod: end each non-empty document with EOD.
        dtype: dtype of the output.
        weights_key: JSON key of documents' weights, or None.
    """

    def __init__(
        self,
        tokenizer: PackedTokenizer,
        keys: list[str],
        append_eod: bool,
        dtype: type,
        weights_key: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.keys = keys
        self.append_eod = append_eod
        self.dtype = dtype
        self.weights_key = weights_key

    def encode(self, lines: list[JsonLine]) -> dict[str, EncodedChunk]:
        """Tokenize the lines under each key.

        Args:
            lines: documents.

        Raises:
            DataError: if a line is malformed.
        """
        return {key: self._encode_key(lines, key) for key in self.keys}

    def _encode_key(self, lines: list[JsonLine], key: str) -> EncodedChunk:
        texts_of = [line.texts(key) for line in lines]
        encoded = iter(
            self.tokenizer.tokenize_batch([text for texts in texts_of for text in texts])
        )
        ids: list[numpy.ndarray] = []
        sequence_lengths: list[int] = []
        sequences_per_document: list[int] = []
        for texts in texts_of:
            sequences = [sequence for sequence in (next(encoded) for _ in texts) if sequence]
            if sequences and self.append_eod:
                sequences[-1].append(self.tokenizer.eod)
            ids += [numpy.asarray(sequence, dtype=self.dtype) for sequence in sequences]
            sequence_lengths += [len(sequence) for sequence in sequences]
            sequences_per_document.append(len(sequences))
        weights = None
        if self.weights_key is not None:
            each = [line.weight(self.weights_key) for line in lines]
            weights = numpy.repeat(numpy.array(each, dtype=numpy.float64), sequences_per_document)
        tokens = numpy.concatenate(ids) if ids else numpy.empty(0, dtype=self.dtype)
        return EncodedChunk(
            tokens,
            numpy.array(sequence_lengths, dtype=numpy.int32),
            numpy.array(sequences_per_document, dtype=numpy.int64),
            weights,
        )


# One a worker process: a pool has no other place for what its initializer makes.
_worker_encoder: Encoder | None = None


def _start_worker(encoder: Encoder) -> None:
    global _worker_encoder
    _worker_encoder = encoder
    # One process a core is the parallelism; the library's threads would fight over them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    # A pool's workers outlive a parent that was killed: they wait on a queue whose other end they
    # hold open themselves.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode_in_worker(lines: list[JsonLine]) -> dict[str, EncodedChunk]:
    assert _worker_encoder is not None
    return _worker_encoder.encode(lines)


def chunked(lines: JsonLines) -> Iterator[list[JsonLine]]:
    """Group lines into chunks worth a trip to a worker.

    Args:
        lines: documents.
    """
    chunk: list[JsonLine] = []
    size = 0
    for line in lines:
        chunk.append(line)
        size += len(line.raw)
        if size >= _CHUNK_BYTES or len(chunk) >= _CHUNK_LINES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def encode_all(
    encoder: Encoder, lines: JsonLines, workers: int
) -> Generator[tuple[list[JsonLine], dict[str, EncodedChunk]], None, None]:
    """Tokenize in `workers` processes; results come in the order of the input.

    Args:
        encoder: what to do with a chunk.
        lines: documents.
        workers: processes.

    Raises:
        DataError: if a line is malformed or a worker dies.
    """
    if workers == 1:
        for chunk in chunked(lines):
            yield chunk, encoder.encode(chunk)
        return
    # fork passes the tokenizer on for free and is safe here: no thread runs yet.
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context(method), initializer=_start_worker, initargs=(encoder,)
    )
    waiting: deque[tuple[list[JsonLine], Future]] = deque()
    try:
        for chunk in chunked(lines):
            waiting.append((chunk, pool.submit(_encode_in_worker, chunk)))
            if len(waiting) >= workers * _CHUNKS_IN_FLIGHT:
                oldest, future = waiting.popleft()
                yield oldest, future.result()
        while waiting:
            oldest, future = waiting.popleft()
            yield oldest, future.result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker was killed, most likely for lack of memory; use fewer --workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    group = parser.add_argument_group("input data")
    group.add_argument(
        "--input", required=True, help="JSON lines file or glob pattern (.gz as well)."
    )
    group.add_argument(
        "--json-keys", nargs="+", default=["text"], help="Keys to tokenize. Default: text"
    )
    group.add_argument(
        "--weights-key",
        help="Key of a number, the document's weight in the objective: <output>.weights.npy, which "
        "--use-document-weights reads.",
    )
    group = parser.add_argument_group("tokenizer")
    group.add_argument(
        "--tokenizer-type", required=True, choices=sorted(TOKENIZER_BUILDERS), help="Its kind."
    )
    group.add_argument(
        "--tokenizer-model",
        help="tokenizer.json or a folder that holds one, or a SentencePiece or tiktoken model.",
    )
    group.add_argument("--vocab-file", help="GPT-2's vocab.json.")
    group.add_argument("--merge-file", help="GPT-2's merges.txt.")
    group.add_argument("--vocab-extra-ids", type=int, default=0, help="SentencePieceTokenizer's.")
    group.add_argument("--tiktoken-pattern", choices=["v1", "v2"], help="TikTokenizer's.")
    group.add_argument("--tiktoken-num-special-tokens", type=int, default=1000, help="Its number.")
    group.add_argument("--tiktoken-special-tokens", nargs="+", help="Their names.")
    group.add_argument(
        "--tokenizer-special-tokens", nargs="+", help="The same.", dest="special_tokens"
    )
    group.add_argument(
        "--tokenizer-hf-no-include-special-tokens",
        action="store_true",
        help="Leave out what HuggingFaceTokenizer's own files add to texts, such as BOS.",
    )
    group.add_argument("--null-tokenizer-eod-id", type=int, help="EOD of NullTokenizer.")
    group.add_argument("--vocab-size", type=int, help="Ids of NullTokenizer, EOD not counted.")
    group.add_argument("--eod-token", help="EOD, if the tokenizer's own files don't name it.")
    group.add_argument(
        "--append-eod", action="store_true", help="End each document with EOD (packing needs it)."
    )
    group = parser.add_argument_group("output data")
    group.add_argument("--output-prefix", required=True, help="Path of the output without suffix.")
    group.add_argument("--dataset-impl", choices=["mmap"], default="mmap", help="Only mmap.")
    group = parser.add_argument_group("runtime")
    group.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="Processes. Default: all cores."
    )
    group.add_argument(
        "--partitions",
        type=int,
        default=1,
        help="Accepted for upstream's scripts: one ordered stream feeds all workers.",
    )
    group.add_argument(
        "--log-interval", type=int, default=1000, help="Documents between reports without a tty."
    )
    options = parser.parse_args(arguments)
    for flag in ("workers", "partitions", "log_interval"):
        if getattr(options, flag) < 1:
            parser.error(f"--{flag.replace('_', '-')} {getattr(options, flag)} must be at least 1")
    return options


def preprocess(options: argparse.Namespace) -> None:
    """Tokenize `options.input` and publish the output.

    Args:
        options: the command line.

    Raises:
        ConfigurationError: if a flag can't be honoured.
        DataError: if input, tokenizer or output folder can't be used.
    """
    lines = JsonLines([options.input])
    tokenizer = build_tokenizer(options)
    # megatron-core's own limit, DType.optimal_dtype; ids of either kind train alike.
    dtype = numpy.uint16 if tokenizer.vocab_size < 65500 else numpy.int32
    encoder = Encoder(tokenizer, options.json_keys, options.append_eod, dtype, options.weights_key)
    prefixes = {key: f"{options.output_prefix}_{key}_document" for key in options.json_keys}
    for prefix in prefixes.values():
        require_writable_folder(Path(prefix).parent, f"--output-prefix {options.output_prefix}")
    began = time.monotonic()
    writers: dict[str, CorpusWriter] = {}
    documents = 0
    results = encode_all(encoder, lines, options.workers)
    try:
        with _Progress(lines.total_bytes, options.log_interval) as progress:
            for chunk, encoded in results:
                for key, part in encoded.items():
                    if key not in writers:
                        writers[key] = CorpusWriter(prefixes[key], dtype)
                    writers[key].add(
                        part.tokens,
                        part.sequence_lengths,
                        part.sequences_per_document,
                        part.weights,
                    )
                documents += len(chunk)
                progress.update(documents, sum(len(line.raw) for line in chunk))
        for key in options.json_keys:
            if key not in writers or writers[key].tokens == 0:
                raise DataError(f"--input {options.input} holds no text under {key!r}; check it")
        publish([pair for writer in writers.values() for pair in writer.finalize()])
    finally:
        results.close()
        for writer in writers.values():
            writer.discard()
    seconds = time.monotonic() - began
    for writer in writers.values():
        print(
            f"{writer.prefix}: {documents} documents, {writer.tokens} tokens in {seconds:.1f} s "
            f"({lines.total_bytes / 1e6 / seconds:.1f} MB/s)"
        )


class _Progress:
    """A bar on a terminal, a line every `log_interval` documents elsewhere."""

    def __init__(self, total_bytes: int, log_interval: int) -> None:
        self.log_interval = log_interval
        self.next_report = log_interval
        self.began = time.monotonic()
        self.bytes = 0
        self.bar = tqdm(total=total_bytes, unit="B", unit_scale=True, disable=None)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def update(self, documents: int, size: int) -> None:
        self.bytes += size
        self.bar.update(size)
        if not self.bar.disable or documents < self.next_report:
            return
        self.next_report = documents + self.log_interval
        seconds = max(time.monotonic() - self.began, 1e-9)
        print(
            f"Processed {documents} documents ({documents / seconds:.0f} docs/s, "
            f"{self.bytes / 1e6 / seconds:.1f} MB/s)",
            file=sys.stderr,
        )


def main(arguments: list[str] | None = None) -> None:
    """Run.

    Args:
        arguments: command line without the program's name; None reads sys.argv.
    """
    options = parse_arguments(arguments)
    # Turn SIGTERM into an exception, so that temporary files go whichever way the run ends.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        preprocess(options)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    try:
        main()
    except (ConfigurationError, DataError) as error:
        sys.exit(f"error: {error}")
