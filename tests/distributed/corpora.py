"""Small indexed corpora of real text for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

BYTE_EOD = 256


def write_byte_corpus(prefix: Path, texts: Iterable[str]) -> Path:
    """Write texts as the ByteTokenizer would, a document each, closed by EOD.

    Args:
        prefix: path of the .bin and .idx files without their suffix.
        texts: documents.

    Returns:
        The prefix.
    """
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for text in texts:
        ids = [*text.encode(), BYTE_EOD]
        builder.add_document(torch.tensor(ids), [len(ids)])
    builder.finalize(f"{prefix}.idx")
    return prefix


def short_documents(modules: Iterable[str]) -> list[str]:
    """Cut modules into lines, every third one into paragraphs: 1 to a few thousand bytes.

    Whole modules are far longer than the rows that tests can afford, so that hardly a row would
    hold the end of one.
    """
    return [
        part
        for number, text in enumerate(modules)
        for part in text.split("\n" if number % 3 else "\n\n")
        if part.strip()
    ]
