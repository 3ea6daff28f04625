"""Samples to batches, ahead of the step: worker processes on torch's DataLoader."""

from __future__ import annotations

import atexit
import signal
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from megatron.packed.errors import DataError
from megatron.packed.processes import end_workers

Batch = TypeVar("Batch")
Collate = Callable[[list[dict[str, Any]]], Batch]


@dataclass(frozen=True)
class _Failure:
    """A DataError on its way out of a worker; raising it there would bury it in a traceback."""

    message: str


class _IndexedSamples(Dataset):
    """Adds `index`, the sample's place in the dataset, and carries DataErrors as values.

    A sample that has an `index` keeps it.

    Place -1 of a dataset of rows is a row of padding.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any] | _Failure:
        try:
            if isinstance(index, int) and index < 0:
                return {"index": index, **_without_tokens(self.dataset[0])}
            return {"index": index, **self.dataset[index]}
        except DataError as error:
            return _Failure(str(error))


def _without_tokens(sample: dict[str, Any]) -> dict[str, Any]:
    """A row of no real token, shaped as another one."""
    first = {
        name: value[:1] if name.startswith("document_") and isinstance(value, np.ndarray) else value
        for name, value in sample.items()
    }
    return {**first, "length": 0, "document_lengths": np.zeros(1, dtype=np.int64)}


class _GuardedCollate(Generic[Batch]):
    def __init__(self, collate: Collate[Batch]) -> None:
        self.collate = collate

    def __call__(self, samples: list[Any]) -> Batch | _Failure:
        for sample in samples:
            if isinstance(sample, _Failure):
                return sample
        try:
            return self.collate(samples)
        except DataError as error:
            return _Failure(str(error))


class BatchIterator(Iterator[Batch]):
    """Batches in the sampler's order; raises a worker's DataError as the message it is.

    Args:
        loader: the DataLoader to iterate, once.
    """

    def __init__(self, loader: DataLoader) -> None:
        # Registered after multiprocessing's own handler, so run before it. Once is enough.
        atexit.unregister(end_workers)
        atexit.register(end_workers)
        self._batches = iter(loader)
        if loader.num_workers > 0:
            # Workers are told to end through queues. Left to itself the garbage collector may close
            # those first, and then waits for each worker until its patience ends.
            weakref.finalize(self, self._batches._shutdown_workers).atexit = False

    def __next__(self) -> Batch:
        batch = next(self._batches)
        if isinstance(batch, _Failure):
            raise DataError(batch.message)
        return batch


def build_loader(
    dataset: Any,
    sampler: Sampler[list[int]],
    collate: Collate[Batch],
    num_workers: int = 0,
    pin_memory: bool = False,
) -> BatchIterator[Batch]:
    """Iterate over collated micro-batches.

    Args:
        dataset: map-style dataset of samples (dicts).
        sampler: lists of sample indices, one list a micro-batch.
        collate: turns the samples of a micro-batch, each with its dataset place under "index",
            into a batch. Runs in the workers; must be picklable where workers are spawned.
        num_workers: worker processes; 0 loads in this process.
        pin_memory: page-lock batches for copies to a GPU; a batch that is no plain container of
            tensors needs a `pin_memory()` method.

    Returns:
        An iterator that ends with the sampler.
    """
    with warnings.catch_warnings():
        # torch warns when workers outnumber cores. They are asked for by --num-workers.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        loader: DataLoader = DataLoader(
            _IndexedSamples(dataset),
            batch_sampler=sampler,
            collate_fn=_GuardedCollate(collate),
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=num_workers > 0,
            # Whatever this process was started by: a forked worker is there in milliseconds and
            # shares the index with its parent, a spawned one imports torch again.
            multiprocessing_context="fork" if num_workers > 0 else None,
            worker_init_fn=_quiet_worker,
            # A generator of its own: torch draws the workers' seed, and on a CPU dropout draws from
            # the global one too, which must stay in step on ranks that read no data.
            generator=torch.Generator(),
        )
        return BatchIterator(loader)


def _quiet_worker(worker_id: int) -> None:
    # Ctrl-C reaches the whole process group. The parent ends the workers; one traceback is enough.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A cluster's request to end reaches workers too; the parent reads on until it has saved.
    for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        if callable(signal.getsignal(each)):
            signal.signal(each, signal.SIG_IGN)
    warnings.simplefilter("ignore")
