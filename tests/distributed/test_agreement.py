"""Ranks that planned differently find out, on every rank; ranks that agree go on."""

from __future__ import annotations

import numpy as np
import torch.distributed as dist

from megatron.packed.context_parallel.agreement import assert_same_metadata
from megatron.packed.errors import TrainingError
from megatron.packed.packing import PackedBatch, build_pack_plan


def _compare(odd_rank: int | None) -> str:
    rows = np.array([[5, 6, 1, 7, 8, 9, 1, 5]])
    if dist.get_rank() == odd_rank:
        rows[0, 4] = 1
    batch = PackedBatch.from_plan(build_pack_plan(rows, 1, 0), rows)
    try:
        assert_same_metadata(batch.packed_seq_params, dist.group.WORLD, "iteration 3")
    except TrainingError as error:
        return str(error)
    return "agreed"


def test_metadata_agreement(worker_pool):
    pool = worker_pool(2)
    assert pool.run(_compare, None) == ["agreed", "agreed"]
    for message in pool.run(_compare, 1):
        assert "iteration 3: rank(s) 1 planned this pack with other boundaries" in message
