"""What a run trained on: its batches, read off on the way into the step or without any model."""

from __future__ import annotations

import contextlib
import io
import json
import os
from dataclasses import dataclass
from typing import Any

from megatron.packed.packing import PackedBatch

Segment = tuple[tuple[int, ...], tuple[int, ...]]


def segments_of(batch: PackedBatch) -> list[Segment]:
    """Every segment of a batch as (input tokens, targets), -1 where a position has no target."""
    params = batch.packed_seq_params
    tokens, labels = batch.tokens[0].tolist(), batch.labels[0].tolist()
    wanted = batch.loss_mask[0].tolist()
    starts, real = params.cu_seqlens_padded_host.tolist(), params.cu_seqlens_host.tolist()
    result = []
    for start, begin, end in zip(starts, real, real[1:], strict=False):
        here = range(start, start + end - begin)
        targets = tuple(labels[i] if wanted[i] else -1 for i in here)
        result.append((tuple(tokens[i] for i in here), targets))
    return result


@dataclass
class RecordingSource:
    """A batch source that keeps what it hands to the step.

    Attributes:
        source: the real one.
        batches: segments of each micro-batch.
    """

    source: Any
    batches: list[list[Segment]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def read(self) -> PackedBatch:
        """The real source's next batch."""
        batch = self.source.read()
        self.batches.append(segments_of(batch))
        return batch


def record(trainer: Any) -> None:
    """Keep the training batches; a `prepare` hook of the harness."""
    trainer.splits.train.source = RecordingSource(trainer.splits.train.source, [])


def recorded(trainer: Any) -> list[list[Segment]]:
    """What was kept; an `inspect` hook of the harness."""
    return trainer.splits.train.source.batches


def in_order(ranks: list[list[list[Segment]]], data_parallel: int) -> list[list[Segment]]:
    """Micro-batches of all data-parallel ranks in the order of the samples they hold."""
    return [batch for group in zip(*ranks[:data_parallel], strict=True) for batch in group]


@dataclass
class Stream:
    """Micro-batches of one rank, and the states between them.

    Attributes:
        batches: segments of each micro-batch.
        states: what to restart from after so many micro-batches, as JSON.
    """

    batches: list[list[Segment]]
    states: dict[int, str]


def stream(
    flags: str, count: int, *, split: str = "train", state: str | None = None, every: int = 1
) -> Stream:
    """Read micro-batches as a run does, without a model.

    Args:
        flags: the command line.
        count: micro-batches to read on this rank.
        split: of which split.
        state: where an earlier stream stopped, as JSON.
        every: micro-batches between states.
    """
    from megatron.packed.arguments import config_from_flags
    from megatron.packed.data.tokenizers import build_tokenizer
    from megatron.packed.training import data, environment, loop

    config = config_from_flags(flags, os.environ)
    this_process = environment.start(config)
    progress = loop.Progress()
    if state is not None:
        saved = json.loads(state)
        progress = loop.Progress(0, saved["train"]["consumed_samples"], saved)
    with contextlib.redirect_stdout(io.StringIO()):
        splits = data.build_splits(config, this_process, build_tokenizer(config.data), progress)
    iterator = splits.iterators()[split]
    iterator.source = RecordingSource(iterator.source, [])
    states = {}
    for number in range(count):
        if number % every == 0:
            # Rank 0's is the one that a checkpoint keeps.
            states[number] = json.dumps(_state_of(splits, split, iterator))
        next(iterator)
    return Stream(iterator.source.batches, states)


def _state_of(splits: Any, split: str, iterator: Any) -> dict[str, Any]:
    wrapped = iterator.source
    iterator.source = wrapped.source
    state = splits.state_dict()
    iterator.source = wrapped
    return state
