"""Packers: every token once, targets as if documents ran alone, resume, fill and balance."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.packed.errors import DataError
from megatron.packed.packing import PackPlan, build_document_packer, reference
from megatron.packed.packing.native import core
from megatron.packed.packing.packer_workload import MAX_WAIT_STEPS
from megatron.packed.packing.packers import STRATEGIES

PACKERS = [name for name in STRATEGIES if name != "rows"]


def tokens_of(document, offset, length):
    """A corpus in which every token is different."""
    return 1000 * document + np.arange(offset, offset + length)


def epoch_of(packer):
    packs = packer.epoch_packs()
    assert len({pack.epoch for pack in packs}) == 1
    return packs


def as_lists(pack):
    return [
        pack.documents.tolist(),
        pack.offsets.tolist(),
        pack.lengths.tolist(),
        pack.lookahead.tolist(),
        pack.epoch,
    ]


LENGTHS = st.lists(st.integers(0, 70), min_size=1, max_size=40).filter(lambda x: sum(x) > 0)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.sampled_from(PACKERS), st.sampled_from([1, 4]), st.integers(0, 3))
def test_every_token_once_per_epoch(lengths, strategy, alignment, seed):
    packer = build_document_packer(
        strategy, lengths, 32, seed=seed, alignment=alignment, window=7, micro_batches=3
    )
    for epoch in range(2):
        seen = Counter()
        for pack in epoch_of(packer):
            assert pack.epoch == epoch
            plan = pack.plan(0, alignment=alignment, capacity=32)
            assert plan.total_tokens == 32
            flat = pack.read(tokens_of)
            seen.update(plan.gather_tokens(flat, fill=-1)[plan.valid_mask].tolist())
        expected = Counter(
            token for d, n in enumerate(lengths) for token in tokens_of(d, 0, n).tolist()
        )
        assert seen == expected


def pairs(plan, flat, depths=3):
    """Multiset of (context, depth, target), the context being the document so far."""
    tokens = plan.gather_tokens(flat, fill=-1)
    found = Counter()
    for depth in range(depths):
        labels, mask = plan.gather_labels(flat, depth, fill=-1), plan.loss_mask(depth)
        for at in np.flatnonzero(mask):
            begin = at - plan.position_ids[at]
            found[tuple(tokens[begin : at + 1].tolist()), depth, int(labels[at])] += 1
    return found


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=15).filter(lambda x: sum(x) > 0),
    st.sampled_from(PACKERS),
    st.sampled_from([1, 4, 8]),
)
def test_pairs_equal_documents_one_at_a_time(lengths, strategy, alignment):
    packer = build_document_packer(
        strategy, lengths, 24, alignment=alignment, window=5, micro_batches=2
    )
    packed = Counter()
    for pack in epoch_of(packer):
        packed += pairs(pack.plan(0, alignment=alignment), pack.read(tokens_of))
    alone = Counter()
    for document, length in enumerate(lengths):
        alone += pairs(PackPlan.from_documents([length], 0), tokens_of(document, 0, length))
    assert packed == alone


@pytest.mark.parametrize("strategy", PACKERS)
def test_split_documents_keep_every_target(strategy):
    lengths = [70, 10, 33, 64, 32, 5]
    packer = build_document_packer(strategy, lengths, 32, lookahead=3, window=3)
    targets = Counter()
    for pack in epoch_of(packer):
        plan, flat = pack.plan(0), pack.read(tokens_of)
        for depth in range(3):
            targets.update(
                (depth, token)
                for token in plan.gather_labels(flat, depth)[plan.loss_mask(depth)].tolist()
            )
    expected = Counter(
        (depth, token)
        for document, length in enumerate(lengths)
        for depth in range(3)
        for token in tokens_of(document, 0, length)[1 + depth :].tolist()
    )
    assert targets == expected
    assert packer.counters.split_documents == 3


def test_overlong_policies():
    lengths = [10, 50, 32, 40]
    packer = build_document_packer("next_fit", lengths, 32, seed=None, overlong="truncate")
    packs = epoch_of(packer)
    assert [pack.lengths.tolist() for pack in packs] == [[10], [32], [32], [32]]
    # The token after the cut is in the data: it stays a target.
    assert [pack.lookahead.tolist() for pack in packs] == [[0], [1], [0], [1]]
    assert packer.counters.truncated_documents == 2
    assert packer.counters.truncated_tokens == 18 + 8
    packer = build_document_packer("next_fit", lengths, 32, seed=None, overlong="drop")
    assert [pack.lengths.tolist() for pack in epoch_of(packer)] == [[10], [32]]
    assert packer.counters.dropped_documents == 2 and packer.counters.dropped_tokens == 90
    assert "2 documents dropped (90 tokens)" in packer.counters.summary()
    with pytest.raises(DataError, match="document 1 has 50 tokens"):
        build_document_packer("next_fit", lengths, 32, overlong="error")
    with pytest.raises(DataError, match="none of 2 documents"):
        build_document_packer("next_fit", [50, 60], 32, overlong="drop")
    with pytest.raises(ValueError, match="overlong: 'shorten' must be one of"):
        build_document_packer("next_fit", lengths, 32, overlong="shorten")
    with pytest.raises(ValueError, match="strategy: 'magic' must be one of"):
        build_document_packer("magic", lengths, 32)


@pytest.mark.parametrize("strategy", PACKERS)
@pytest.mark.parametrize("stop", [0, 1, 5, 17, 60])
def test_resume_is_identical(strategy, stop):
    rng = np.random.default_rng(3)
    lengths = rng.integers(0, 90, 120)

    def make():
        return build_document_packer(
            strategy, lengths, 64, seed=11, window=16, micro_batches=4, alignment=2
        )

    packer = make()
    for _ in range(stop):
        packer.next_pack()
    saved = json.loads(json.dumps(packer.state_dict()))
    resumed = make()
    resumed.next_pack()
    resumed.load_state_dict(saved)
    assert resumed.counters == packer.counters
    for _ in range(150):
        assert as_lists(resumed.next_pack()) == as_lists(packer.next_pack())
    assert resumed.counters == packer.counters


def test_a_state_of_another_corpus_is_refused():
    packer = build_document_packer("next_fit", [5, 6], 16)
    state = packer.state_dict()
    with pytest.raises(DataError, match="saved with documents = 2"):
        build_document_packer("next_fit", [5, 6, 7], 16).load_state_dict(state)
    with pytest.raises(DataError, match="saved with strategy = next_fit"):
        build_document_packer("best_fit_decreasing", [5, 6], 16).load_state_dict(state)
    windowed = build_document_packer("windowed_best_fit", [5, 6], 16, window=3)
    with pytest.raises(DataError, match="--packing-window 3"):
        build_document_packer("windowed_best_fit", [5, 6], 16, window=4).load_state_dict(
            windowed.state_dict()
        )


@pytest.mark.parametrize("strategy", PACKERS)
def test_order_depends_on_seed_and_epoch_only(strategy):
    lengths = np.random.default_rng(0).integers(1, 60, 80)

    def packs(seed):
        packer = build_document_packer(strategy, lengths, 64, seed=seed, window=16)
        return [as_lists(pack) for pack in epoch_of(packer) + epoch_of(packer)]

    assert packs(1) == packs(1)
    assert packs(1) != packs(2)
    first = [pack[:4] for pack in packs(1) if pack[4] == 0]
    second = [pack[:4] for pack in packs(1) if pack[4] == 1]
    assert first != second


def test_fill():
    rng = np.random.default_rng(1)
    lengths = np.maximum(rng.lognormal(5.95, 1.26, 60000).astype(np.int64), 1)
    for capacity in (8192, 131072):
        packer = build_document_packer("best_fit_decreasing", lengths, capacity)
        bins = len(epoch_of(packer))
        assert bins <= 1.001 * np.ceil(lengths.sum() / capacity) or bins == np.ceil(
            lengths.sum() / capacity
        )
        packer = build_document_packer("windowed_best_fit", lengths, capacity, window=4096)
        packs = epoch_of(packer)
        full = [pack.lengths.sum() / capacity for pack in packs]
        # The last pack of an epoch holds what is left.
        assert sum(full[:-1]) / len(full[:-1]) > 0.98 or np.mean(sorted(full)[1:]) > 0.98


def test_workload_balance_and_no_starvation():
    rng = np.random.default_rng(2)
    lengths = np.clip(rng.lognormal(7.0, 1.5, 6000).astype(np.int64), 1, 32768)
    packer = build_document_packer(
        "greedy_workload", lengths, 32768, micro_batches=8, workload_block=8192
    )
    balance = []
    came: dict[int, int] = {}
    for step in range(20):
        work = []
        for _ in range(8):
            pack = packer.next_pack()
            work.append((pack.lengths**2 // 8192 + pack.lengths).sum())
        balance.append(max(work) / np.mean(work))
        waiting = np.concatenate([packer._pool, *packer._queues])
        assert np.all(step + 1 - waiting[:, 4] <= MAX_WAIT_STEPS + 8)
        came[step] = len(waiting)
    # In stream order the same documents are far less even.
    plain = build_document_packer("next_fit", lengths, 32768)
    reference_balance = []
    for _ in range(20):
        work = [
            (pack.lengths**2 // 8192 + pack.lengths).sum()
            for pack in (plain.next_pack() for _ in range(8))
        ]
        reference_balance.append(max(work) / np.mean(work))
    assert np.mean(balance) < 1.15 < np.mean(reference_balance)


COSTS = st.lists(st.integers(0, 50), max_size=60).map(lambda x: np.array(x, dtype=np.int64))


@settings(max_examples=200, deadline=None)
@given(COSTS, st.integers(50, 70), st.integers(0, 50), COSTS)
def test_core_equals_reference(costs, capacity, used, rooms):
    same = np.testing.assert_array_equal
    same(core.next_fit(costs, capacity, used), reference.next_fit(costs, capacity, used))
    same(core.best_fit(costs, capacity, rooms), reference.best_fit(costs, capacity, rooms))
    same(
        core.best_fit_decreasing(costs, capacity),
        reference.best_fit_decreasing(costs, capacity),
    )
    for mine, theirs in zip(core.group(costs, 51), reference.group(costs, 51), strict=True):
        same(mine, theirs)
    loads = (rooms * 7) % 13
    same(
        core.greedy_workload(costs, costs * costs, capacity, rooms, loads),
        reference.greedy_workload(costs, costs * costs, capacity, rooms, loads),
    )
