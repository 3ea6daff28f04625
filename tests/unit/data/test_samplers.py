from __future__ import annotations

import itertools

import pytest

from megatron.packed.data.samplers import build_sampler
from megatron.packed.errors import ConfigurationError, DataError


def sampler(kind: str = "single", total: int = 100, **changes: int | bool):
    settings = {
        "seed": 1,
        "consumed_samples": 0,
        "micro_batch_size": 2,
        "data_parallel_rank": 0,
        "data_parallel_size": 1,
        **changes,
    }
    return build_sampler(kind, total, **settings)


def global_order(kind: str, micro: int, ranks: int, count: int, consumed: int = 0) -> list[int]:
    """The first `count` samples over all ranks, in the order of the groups."""
    parts = [
        sampler(
            kind,
            consumed_samples=consumed,
            micro_batch_size=micro,
            data_parallel_rank=rank,
            data_parallel_size=ranks,
        )
        for rank in range(ranks)
    ]
    groups = itertools.islice(zip(*parts, strict=True), count // (micro * ranks))
    return [index for group in groups for batch in group for index in batch]


def test_single_order_is_upstreams():
    # What upstream's MegatronPretrainingSampler yields for 11 samples, 2 a batch, 2 ranks.
    parts = [
        list(sampler(total=11, data_parallel_rank=rank, data_parallel_size=2)) for rank in (0, 1)
    ]
    assert parts == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    kept = [
        list(sampler(total=11, data_parallel_rank=rank, data_parallel_size=2, drop_last=False))
        for rank in (0, 1)
    ]
    assert kept == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10]]]


def test_a_rank_without_a_part_of_the_last_group_yields_nothing_for_it():
    last = sampler(total=5, data_parallel_rank=1, data_parallel_size=2, drop_last=False)
    assert list(last) == [[2, 3]] and len(last) == 1


@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_order_depends_on_neither_ranks_nor_micro_batches(kind: str):
    reference = global_order(kind, 1, 1, 96)
    for micro, ranks in ((2, 1), (1, 4), (4, 2), (8, 3)):
        assert global_order(kind, micro, ranks, 96) == reference


@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_resuming_continues_where_the_run_stopped(kind: str):
    reference = global_order(kind, 2, 2, 96)
    for consumed in (4, 40, 92):
        assert global_order(kind, 2, 2, 96 - consumed, consumed) == reference[consumed:]
    # A changed layout continues the same order.
    assert global_order(kind, 4, 1, 96 - 40, 40) == reference[40:]


def test_cyclic_epochs_are_permutations_that_differ():
    order = global_order("cyclic", 1, 1, 300)
    epochs = [order[i : i + 100] for i in (0, 100, 200)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert global_order("cyclic", 3, 1, 300) == order  # a batch may cross an epoch's end


def test_cyclic_follows_the_seed():
    first, second = (list(itertools.islice(sampler("cyclic", seed=s), 10)) for s in (1, 2))
    assert first != second
    # Pinned: a new numpy must not reorder a run that resumes.
    pinned = [[1, 0], [9, 8], [6, 3], [7, 4], [2, 5]]
    assert list(itertools.islice(sampler("cyclic", total=10), 5)) == pinned


def test_length():
    assert len(sampler(total=11)) == 5
    assert len(sampler(total=11, consumed_samples=4)) == 3
    assert len(sampler(total=11, drop_last=False)) == 6
    with pytest.raises(TypeError):
        len(sampler("cyclic"))


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"kind": "random"}, ConfigurationError, "must be one of single, cyclic"),
        ({"total": 0}, DataError, "holds no sample"),
        ({"consumed_samples": 100}, DataError, "no sample left: 100 of 100"),
        ({"consumed_samples": -1}, ConfigurationError, "consumed samples"),
        ({"micro_batch_size": 0}, ConfigurationError, "--micro-batch-size 0"),
        ({"data_parallel_rank": 1}, ConfigurationError, "rank 1 is outside"),
    ],
)
def test_bad_input(changes: dict, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        sampler(**changes)


def test_whole_passes_are_filled_up_with_no_samples():
    parts = [
        list(
            sampler(
                "whole",
                total=5,
                micro_batch_size=2,
                data_parallel_rank=rank,
                data_parallel_size=2,
                whole_batch=8,
            )
        )
        for rank in (0, 1)
    ]
    assert parts == [[[0, 1], [4, -1]], [[2, 3], [-1, -1]]]
