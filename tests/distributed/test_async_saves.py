"""Training goes on beside a save, and the checkpoint is still of the step it is named after."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.packed.checkpoint.snapshot import Snapshot
from megatron.packed.checkpoint.storage import INDEX
from megatron.packed.checkpoint.trust import read_index
from megatron.packed.training.state import sharded_state
from tests.distributed.harness import assert_bitwise_equal, run
from tests.distributed.pool import WorkerPools

COMMON = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 64 "
    "--position-embedding-type rope --swiglu --disable-bias-linear --attention-dropout 0 "
    "--hidden-dropout 0 --micro-batch-size 1 --global-batch-size 2 --train-iters 6 --lr 1e-3 "
    "--lr-decay-style constant --eval-iters 0 --log-interval 1 --threads 1 --use-packed-sequence "
)
# Buffers that forward passes count in, and that change before the update does.
EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 16 --moe-router-enable-expert-bias "
    "--moe-router-score-function sigmoid --moe-router-bias-update-rate 0.1"
)
SHARED_OUT = "--use-distributed-optimizer"
_take = Snapshot.take


def take_late(snapshot: Snapshot) -> None:
    """`Snapshot.take` on a slow machine: later than the next update would be."""
    time.sleep(0.4)
    _take(snapshot)


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [(1, EXPERTS), (2, f"{SHARED_OUT} --bf16")],
    ids=["expert-bias", "distributed-optimizer"],
)
def test_updates_wait_for_copies(
    world_size: int, flags: str, worker_pool: WorkerPools, data_flags: str, tmp_path: Path
) -> None:
    common = f"{COMMON} {data_flags} {flags}"
    saving = f"{common} --save {tmp_path} --save-interval 2 --async-save"
    late = {"megatron.packed.checkpoint.snapshot.Snapshot.take": take_late}
    whole = run(worker_pool, world_size, saving, replace=late)
    second = run(worker_pool, world_size, f"{common} --load {tmp_path} --ckpt-step 2")
    assert second.losses == whole.losses[2:]
    assert second.grad_norms == whole.grad_norms[2:]
    assert_bitwise_equal(second.final_weights, whole.final_weights)


def more_in_later_saves(config: Any, step: Any) -> Any:
    """`state.sharded_state` of a run that has more to save from its second save on."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    result = sharded_state(config, step)
    if hasattr(step, "saved_before"):
        result["more"] = ShardedTensor.from_rank_offsets("more", torch.arange(3.0))
    step.saved_before = True
    return result


def test_another_structure_is_planned_anew(
    worker_pool: WorkerPools, data_flags: str, tmp_path: Path
) -> None:
    common = f"{COMMON} {data_flags}"
    saving = f"{common} --save {tmp_path} --save-interval 2 --async-save"
    more = {"megatron.packed.training.state.sharded_state": more_in_later_saves}
    whole = run(worker_pool, 1, saving, replace=more)
    held = [
        "more" in read_index(tmp_path / f"iter_000000{iteration}" / INDEX).state_dict_metadata
        for iteration in (2, 4, 6)
    ]
    assert held == [False, True, True]
    second = run(worker_pool, 1, f"{common} --load {tmp_path} --ckpt-step 4")
    assert second.losses == whole.losses[4:]
    assert_bitwise_equal(second.final_weights, whole.final_weights)


Compared = list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], bool]]


def compare_with_gathered(trainer: Any) -> Compared:
    """This rank's shards of the optimizer beside what megatron-core gathers of all ranks.

    Returns:
        Key, shape of the whole, offsets, sizes and whether the values agree, a shard.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import apply_factories

    from megatron.packed.training import state

    step = trainer.step
    gathered = step.optimizer.sharded_state_dict(
        state.model_state(step), metadata=state._metadata()
    )["param_state"]
    apply_factories(gathered)
    whole = {}
    for shard in nested_values(gathered):
        values = whole.setdefault(shard.key, torch.full(shard.global_shape, torch.nan))
        values[shard.global_slice()] = shard.data
    compared = []
    for shard in nested_values(
        state.sharded_state(trainer.config, step)["optimizer"]["param_state"]
    ):
        slices = tuple(
            slice(o, o + n) for o, n in zip(shard.global_offset, shard.local_shape, strict=True)
        )
        same = torch.equal(whole[shard.key][slices], shard.data)
        shape, sizes = tuple(shard.global_shape), tuple(shard.local_shape)
        compared.append((shard.key, shape, tuple(shard.global_offset), sizes, same))
    absent = whole.keys() - {key for key, *_ in compared}
    compared += [(key, tuple(whole[key].shape), (), (), True) for key in absent]
    return compared


def test_the_distributed_optimizer_is_saved_where_it_lies(
    worker_pool: WorkerPools, data_flags: str
) -> None:
    """Every element once, on the rank that holds it, under megatron-core's names."""
    # No row ends where a rank's part of the state does.
    flags = f"{COMMON} {data_flags} {SHARED_OUT} --train-iters 2 --bf16 --hidden-size 40"
    result = run(worker_pool, 2, flags, inspect=compare_with_gathered)
    counts: dict[str, torch.Tensor] = {}
    for rank in result.extra:
        for key, shape, offsets, sizes, same in rank:
            assert same, key
            count = counts.setdefault(key, torch.zeros(shape, dtype=torch.int))
            if offsets:
                slices = (slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
                count[tuple(slices)] += 1
    assert len(counts) > 3 and all(bool((count == 1).all()) for count in counts.values())
    assert all(len({key for key, *_ in rank}) < len(rank) for rank in result.extra)
    assert all(any(offsets for _, _, offsets, _, _ in rank) for rank in result.extra)
