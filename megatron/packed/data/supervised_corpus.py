"""Conversations as an indexed corpus: tokens, and beside them which are supervised.

`<prefix>.bin/.idx` hold the tokens and `<prefix>_supervised.bin/.idx` a 0 or 1 for each, document
by document. A JSON lines file is encoded once, into the cache folder, under a name made of its
content, the tokenizer and the format.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy

from megatron.packed.data.blends import Blend, Corpora
from megatron.packed.data.conversations import ConversationEncoder, build_chat_format
from megatron.packed.data.files import publish, require_writable_folder
from megatron.packed.data.index_files import CorpusWriter, IndexedCorpus, inspect_corpus
from megatron.packed.data.json_lines import JsonLines
from megatron.packed.errors import DataError

if TYPE_CHECKING:
    from megatron.packed.arguments import Config
    from megatron.packed.data.tokenizer_base import PackedTokenizer

SUFFIX = "_supervised"
_VERSION = 1  # of what is written; a new one finds no old files
_LINES_AT_ONCE = 4096


def encode_corpora(config: Config, corpora: Corpora, tokenizer: PackedTokenizer) -> Corpora:
    """Corpora of encoded conversations in place of JSON lines files.

    What isn't in the cache is encoded: let one process do it before the others look.

    Args:
        config: the run; `data` and `sft` are read.
        corpora: what the data flags name: JSON lines files, or prefixes encoded before.
        tokenizer: the run's tokenizer.

    Raises:
        ConfigurationError: if the format is unknown.
        DataError: if a file can't be encoded.
    """
    chat_format = build_chat_format(
        config.sft.sft_tokenizer_prompt_format, config.data.tokenizer_model
    )
    encoder = ConversationEncoder(tokenizer, chat_format)
    done: dict[str, str] = {}

    def encode(blend: Blend | None) -> Blend | None:
        if blend is None:
            return None
        for name in blend.prefixes:
            if name not in done:
                done[name] = _encoded(blend.flag, name, encoder, config.data.data_cache_path)
        flag = f"{blend.flag} {blend.prefixes[0]}, encoded as"
        return replace(
            blend,
            flag=flag if len(blend.prefixes) == 1 else blend.flag,
            prefixes=tuple(done[name] for name in blend.prefixes),
        )

    per_split = corpora.per_split
    return replace(
        corpora,
        blend=encode(corpora.blend),
        per_split=tuple(map(encode, per_split)) if per_split is not None else None,
    )


def _encoded(flag: str, name: str, encoder: ConversationEncoder, cache: str | None) -> str:
    """The prefix of the encoded corpus of a JSON lines file, which is encoded if need be."""
    if os.path.isfile(f"{name}.idx"):
        if not os.path.isfile(f"{name}{SUFFIX}.idx"):
            raise DataError(
                f"{flag} {name}: {name}{SUFFIX}.idx isn't there, which says what of a corpus of "
                "conversations is supervised; give the JSON lines file itself"
            )
        return name
    lines = JsonLines([name], flag)
    folder = Path(cache) if cache is not None else lines.paths[0].parent / "cache"
    prefix = folder / f"sft-{_key(lines.paths, encoder)}"
    if not os.path.isfile(f"{prefix}.idx"):
        require_writable_folder(folder, f"tokens of {flag} {name}")
        write_supervised(str(prefix), lines, encoder)
    return str(prefix)


def _key(paths: list[Path], encoder: ConversationEncoder) -> str:
    identity = [
        _VERSION,
        encoder.tokenizer.unique_identifiers,
        encoder.chat_format.fingerprint,
    ]
    digest = hashlib.sha256(json.dumps(identity).encode())
    for path in paths:
        with open(path, "rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:32]


def write_supervised(prefix: str, lines: JsonLines, encoder: ConversationEncoder) -> None:
    """Encode conversations and publish tokens and supervision under a prefix.

    Args:
        prefix: path without .bin/.idx.
        lines: conversations.
        encoder: how they become ids.

    Raises:
        DataError: naming the line that can't be encoded.
    """
    dtype = numpy.uint16 if encoder.tokenizer.vocab_size < 65500 else numpy.int32
    writers = [CorpusWriter(f"{prefix}{SUFFIX}", numpy.uint8), CorpusWriter(prefix, dtype)]
    try:
        tokens: list[numpy.ndarray] = []
        supervised: list[numpy.ndarray] = []

        def flush() -> None:
            lengths = numpy.array([len(each) for each in tokens], dtype=numpy.int32)
            ones = numpy.ones(len(tokens), dtype=numpy.int64)
            for writer, held in zip(writers, (supervised, tokens), strict=True):
                if held:
                    writer.add(numpy.concatenate(held).astype(writer.dtype), lengths, ones)
                held.clear()

        for line in lines:
            for encoded in encoder.encode(line):
                tokens.append(encoded.tokens)
                supervised.append(encoded.supervised)
            if len(tokens) >= _LINES_AT_ONCE:
                flush()
        flush()
        if writers[1].tokens == 0:
            raise DataError(f"{lines.flag} {lines.paths[0]}: holds no conversation; check it")
        # The index of the tokens goes last: who finds it finds the rest.
        publish([pair for writer in writers for pair in writer.finalize()])
    finally:
        for writer in writers:
            writer.discard()


def check_supervision(flag: str, corpus: IndexedCorpus) -> None:
    """Check that a corpus has one 0 or 1 for each of its tokens.

    Args:
        flag: the flag that named the corpus.
        corpus: an inspected corpus of conversations.

    Raises:
        DataError: if the two files don't belong together.
    """
    beside = inspect_corpus(flag, f"{corpus.prefix}{SUFFIX}")
    where = f"{flag} {corpus.prefix}: {beside.prefix}.bin"
    if not numpy.array_equal(beside.sequence_lengths, corpus.sequence_lengths):
        raise DataError(f"{where} has documents of other lengths; encode the conversations again")
    if beside.tokens.dtype != numpy.uint8 or int(beside.tokens.max()) > 1:
        raise DataError(f"{where} must hold bytes of 0 and 1; encode the conversations again")
    if not beside.tokens.any():
        raise DataError(f"{where} supervises nothing; no turn of an assistant was found")
