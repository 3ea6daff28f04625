"""Rows over several epochs in an order that doesn't depend on how many are asked for.

megatron-core shuffles the documents of all epochs together, so asking for more rows (a larger
`--train-iters`) changes the first one. Here each epoch is shuffled by itself: row i is a pure
function of (seed, i). One epoch alone is in megatron-core's order, to the row.

```
documents       [epoch 0, shuffled][epoch 1, shuffled][epoch 2 ...
rows of S        |    |    |    |    |    |    |    |    |
shuffled in     [   block 0    ][     block 1      ][   block 2 ...
```

A row that straddles two epochs belongs to the later one's block.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy

from megatron.packed.data.files import publish, temporary_name

FILES = ("document_index.npy", "sample_index.npy", "shuffle_index.npy")
Indices = tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]


def epoch_generator(seed: int, epoch: int) -> numpy.random.RandomState:
    """What shuffles an epoch; of epoch 0 it is what shuffles megatron-core's only one.

    Args:
        seed: `--seed`.
        epoch: from 0.
    """
    if epoch == 0:
        return numpy.random.RandomState(seed)
    # RandomState's streams are frozen by numpy's promise; Generator's are not.
    return numpy.random.RandomState(numpy.random.MT19937(numpy.random.SeedSequence([seed, epoch])))


def build_indices(
    sequence_lengths: numpy.ndarray,
    documents: numpy.ndarray,
    *,
    epochs: int,
    seq_length: int,
    seed: int,
    drop_last: bool = True,
    extra_token: int = 1,
) -> Indices:
    """Indices as megatron-core's GPTDataset has them.

    Args:
        sequence_lengths: int32 `[sequences of the file]`.
        documents: int32 `[documents of the split]`.
        epochs: at least 1.
        seq_length: input tokens of a row.
        seed: of the order.
        drop_last: leave out a last row that isn't full.
        extra_token: 1 where rows hold a label beyond their last input.

    Returns:
        `document_index` int32 `[epochs * documents]`; `sample_index` `[rows + 1, 2]`, place in it
        and offset in that document at which each row begins; `shuffle_index` `[rows]`.
    """
    from megatron.core.datasets import helpers

    tokens = int(numpy.sum(sequence_lengths[documents]))
    generators = [epoch_generator(seed, epoch) for epoch in range(epochs)]
    orders = []
    for generator in generators:
        order = documents.astype(numpy.int32)
        generator.shuffle(order)
        orders.append(order)
    document_index = numpy.concatenate(orders)
    sample_index = helpers.build_sample_idx(
        numpy.ascontiguousarray(sequence_lengths),
        document_index,
        seq_length,
        epochs,
        tokens,
        drop_last,
        extra_token,
    )
    rows = sample_index.shape[0] - 1
    dtype = numpy.uint32 if rows < numpy.iinfo(numpy.uint32).max - 1 else numpy.int64
    edges = [(epoch * tokens - extra_token) // seq_length for epoch in range(1, epochs)]
    blocks = []
    for generator, first, last in zip(generators, [0, *edges], [*edges, rows], strict=True):
        block = numpy.arange(first, last, dtype=dtype)
        generator.shuffle(block)
        blocks.append(block)
    return document_index, sample_index, numpy.concatenate(blocks)


def cached_indices(folder: str | None, stem: str, description: str, build: Any) -> Indices:
    """Map indices that an earlier call left in a folder; else build them, and leave them there.

    Args:
        folder: cache folder; None keeps nothing.
        stem: what file names begin with.
        description: what the indices were made from, kept beside them.
        build: makes them.
    """
    if folder is None:
        return build()
    paths = [Path(folder) / f"{stem}-{name}" for name in FILES]
    if not all(path.is_file() for path in paths):
        Path(folder).mkdir(parents=True, exist_ok=True)
        about = Path(folder) / f"{stem}-description.txt"
        pairs = [(temporary_name(path), path) for path in (about, *paths)]
        try:
            pairs[0][0].write_text(description)
            for (temporary, _), index in zip(pairs[1:], build(), strict=True):
                with open(temporary, "wb") as stream:
                    numpy.save(stream, index)
            publish(pairs)
        finally:
            for temporary, _ in pairs:
                temporary.unlink(missing_ok=True)
    document_index, sample_index, shuffle_index = (numpy.load(p, mmap_mode="r") for p in paths)
    return document_index, sample_index, shuffle_index
