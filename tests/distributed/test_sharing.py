"""Tensor-parallel peers get one buffer, and learn what the reading rank met instead of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from megatron.packed.data.bshd import BshdCollator
from megatron.packed.errors import DataError, TrainingError
from megatron.packed.packing import Alignment
from megatron.packed.training.collation import PackingCollator
from megatron.packed.training.sharing import next_shared
from tests.distributed.harness import run, sample
from tests.distributed.pool import WorkerPools
from tests.distributed.test_strategies import CURVE

SEQ, EOD = 8, 1


def _samples() -> list[dict[str, Any]]:
    return [{**sample([5, 6, EOD, 7, 8, 9, EOD, 5, 5], SEQ), "index": i} for i in range(2)]


def _batches(kind: str) -> Iterator[Any]:
    collator = BshdCollator(EOD) if kind == "rows" else PackingCollator(EOD, Alignment(4), 24)
    for _ in range(2):
        yield collator(_samples())
    if kind == "broken":
        raise DataError("row 7 of corpus é is broken")


def _share(kind: str) -> list[Any]:
    loader = _batches(kind) if dist.get_rank() == 0 else None
    seen: list[Any] = []
    while True:
        try:
            batch = next_shared(loader, dist.group.WORLD, pin_memory=False)
        except StopIteration:
            return [*seen, "end"]
        except DataError as error:
            return [*seen, str(error)]
        seen.append((type(batch).__name__, batch.tokens.tolist(), batch.labels.tolist()))


@pytest.mark.parametrize(
    ("kind", "name", "last"),
    [
        ("packs", "PackedBatch", "end"),
        ("rows", "BshdBatch", "end"),
        ("broken", "PackedBatch", "row 7 of corpus é is broken"),
    ],
)
def test_every_rank_sees_the_same(
    kind: str, name: str, last: str, worker_pool: WorkerPools
) -> None:
    first, second = worker_pool(2).run(_share, kind)
    assert first == second
    assert len(first) == 3 and first[0][0] == name and first[2] == last


def _tamper(trainer: Any) -> None:
    """Let rank 1 read other boundaries for the second micro-batch of the second step."""
    if dist.get_rank() != 1:
        return
    source, count = trainer.splits.train.source, 0

    class Tampered:
        def __getattr__(self, name: str) -> Any:
            return getattr(source, name)

        def read(self) -> Any:
            nonlocal count
            batch = source.read()
            count += 1
            if count == 4:
                batch.packed_seq_params.cu_seqlens_host = np.array([0, 3], dtype=np.int32)
            return batch

    trainer.splits.train.source = Tampered()


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_ranks_that_read_something_else_are_told(
    layout: str, worker_pool: WorkerPools, data_flags: str
) -> None:
    flags = (
        f"{CURVE} {data_flags} --micro-batch-size 2 --check-packing-metadata "
        f"--{layout}-model-parallel-size 2"
    )
    message = r"iteration 2, micro-batch 1 \(samples from 6 on\): rank\(s\) 1 planned this pack"
    with pytest.raises(TrainingError, match=message):
        run(worker_pool, 2, flags, prepare=_tamper)
