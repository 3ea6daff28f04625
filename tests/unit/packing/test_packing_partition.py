"""Partitions: known answers, exactness, balance, and one rank's share of a plan."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.packed.context_parallel import (
    inverse_permutation,
    make_partition,
    partition_indices,
    real_cu_seqlens_per_rank,
)
from megatron.packed.packing import Alignment, PackPlan
from megatron.packed.packing.alignment import PARTITIONS

SHARED = Path(__file__).parents[4] / "shared" / "cases" / "partition.json"


def shares(kind, cu_seqlens, cp, **options):
    return [partition_indices(kind, cu_seqlens, cp, r, **options).tolist() for r in range(cp)]


@pytest.mark.parametrize(
    ("cu_seqlens", "expected"),
    [
        ([0, 8], [[0, 1, 6, 7], [2, 3, 4, 5]]),
        ([0, 4, 8], [[0, 3, 4, 7], [1, 2, 5, 6]]),
        ([0, 12], [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]),
        ([0, 0, 8], [[0, 1, 6, 7], [2, 3, 4, 5]]),
        ([0, 4, 8, 16], [[0, 3, 4, 7, 8, 9, 14, 15], [1, 2, 5, 6, 10, 11, 12, 13]]),
    ],
)
def test_zigzag_known_answers(cu_seqlens, expected):
    assert shares("zigzag", cu_seqlens, len(expected)) == expected


def test_what_cannot_be_split_is_refused():
    with pytest.raises(ValueError, match="no multiple of 2 \\* cp_size = 4"):
        partition_indices("zigzag", [0, 6], 2, 0)
    with pytest.raises(ValueError, match="the rest would be lost"):
        partition_indices("zigzag", [0, 8], 2, 0, total_tokens=16)
    with pytest.raises(ValueError, match="no multiple of cp_size"):
        partition_indices("contiguous", [0, 7], 2, 0)
    with pytest.raises(ValueError, match="no multiple of 2 \\* cp_size"):
        partition_indices("zigzag_pack", [0, 6], 2, 0)
    with pytest.raises(ValueError, match="chunk_size: 3 does not divide"):
        partition_indices("dispatch", [0, 16], 2, 0, chunk_size=3)
    with pytest.raises(ValueError, match="kind: 'zagzig' must be one of"):
        partition_indices("zagzig", [0, 8], 2, 0)
    with pytest.raises(ValueError, match="must not fall"):
        partition_indices("contiguous", [0, 8, 4], 2, 0)
    with pytest.raises(ValueError, match="cp_rank: must be below"):
        partition_indices("contiguous", [0, 8], 2, 2)
    with pytest.raises(ValueError, match="none of them longer"):
        make_partition("dispatch", [0, 8], 2, cu_seqlens=[0, 9])


@pytest.mark.parametrize(
    ("cu_seqlens", "chunk", "chunks"),
    [
        ([0, 16], 2, [[0, 3, 4, 7], [1, 2, 5, 6]]),
        ([0, 16], 2, [[0, 7], [1, 6], [2, 5], [3, 4]]),
        ([0, 4, 16], 2, [[2, 3, 4, 7], [0, 1, 5, 6]]),
        ([0, 8, 16, 24, 40], 5, [[0, 7], [3, 6], [4, 5], [1, 2]]),
    ],
)
def test_dispatch_known_answers(cu_seqlens, chunk, chunks):
    expected = [[c * chunk + i for c in mine for i in range(chunk)] for mine in chunks]
    assert shares("dispatch", cu_seqlens, len(chunks), chunk_size=chunk) == expected


def test_real_tokens_per_rank():
    assert real_cu_seqlens_per_rank([0, 7, 10], [0, 8, 12], 2).tolist() == [[0, 3, 4], [0, 4, 6]]
    half = real_cu_seqlens_per_rank([0, 7, 10], [0, 8, 12], 2, half="second")
    assert half.tolist() == [[0, 1, 1], [0, 2, 3]]
    # A rank without a single real token is legal.
    part = make_partition("contiguous", [0, 8], 4, cu_seqlens=[0, 3])
    assert part.real_tokens().tolist() == [2, 1, 0, 0]


@pytest.mark.skipif(not SHARED.exists(), reason="the shared cases are not beside this checkout")
def test_shared_cases():
    cases = json.loads(SHARED.read_text())
    for kind in ("zigzag", "contiguous"):
        for case in cases[kind]:
            assert shares(kind, case["cu_seqlens_padded"], case["cp"]) == case["ranks"]
    for case in cases["zigzag_must_reject"]:
        with pytest.raises(ValueError):
            partition_indices(
                "zigzag",
                case["cu_seqlens_padded"],
                case["cp"],
                0,
                total_tokens=case.get("total_tokens"),
            )
    for case in cases["dispatch"]:
        part = make_partition("dispatch", case["cu_seqlens"], case["cp"], chunk_size=case["chunk"])
        mine = [np.flatnonzero(part.chunk_ranks == r).tolist() for r in range(case["cp"])]
        assert mine == case["chunks"]
    for case in cases["real_tokens_per_rank"]:
        for name, half in (("both", "both"), ("first_half", "first"), ("second_half", "second")):
            found = real_cu_seqlens_per_rank(
                case["cu_seqlens"], case["cu_seqlens_padded"], case["cp"], half=half
            )
            assert found.tolist() == case[name]


LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(1, 5), st.sampled_from(PARTITIONS), st.integers(0, 60))
def test_shares_partition_the_pack_and_gather_like_the_whole(lengths, cp, kind, lookahead_seed):
    rng = np.random.default_rng(lookahead_seed)
    lookahead = rng.integers(0, 3, len(lengths))
    tokens = rng.integers(5, 99, sum(lengths) + int(lookahead.sum()))
    alignment = Alignment.for_layout(partition=kind, cp_size=cp)
    plan = PackPlan.from_documents(lengths, 0, lookahead=lookahead, alignment=alignment)
    part = make_partition(kind, plan.cu_seqlens_padded, cp, cu_seqlens=plan.cu_seqlens)

    permutation = part.permutation()
    assert sorted(permutation.tolist()) == list(range(plan.total_tokens))
    assert np.array_equal(permutation[part.inverse()], np.arange(plan.total_tokens))
    assert part.real_tokens().sum() == sum(lengths)
    for rank in range(cp):
        index = part.indices(rank)
        assert len(index) == plan.total_tokens // cp
        assert np.all(np.diff(index) > 0)
        view = plan.local(part, rank)
        assert view.num_valid == part.real_tokens()[rank]
        assert np.array_equal(view.gather_tokens(tokens), plan.gather_tokens(tokens)[index])
        assert np.array_equal(view.position_ids, plan.position_ids[index])
        assert np.array_equal(view.document_ids, plan.document_ids[index])
        assert np.array_equal(view.valid_mask, plan.valid_mask[index])
        for depth in range(5):
            labels = plan.gather_labels(tokens, depth)[index]
            assert np.array_equal(view.gather_labels(tokens, depth), labels)
            assert np.array_equal(view.loss_mask(depth), plan.loss_mask(depth)[index])


def test_inverse_restores_pack_order():
    cu_seqlens = [0, 8, 24]
    values = np.arange(24) * 10
    gathered = np.concatenate([values[i] for i in shares("zigzag", cu_seqlens, 4)])
    assert np.array_equal(gathered[inverse_permutation("zigzag", cu_seqlens, 4)], values)


def attention_work(plan, part):
    """Causal pairs per rank, one token at a time."""
    work = np.where(plan.valid_mask, plan.position_ids + 1, 0)
    return np.array([work[part.indices(rank)].sum() for rank in range(part.cp_size)])


@pytest.mark.parametrize(
    ("kind", "chunk_size", "bound"),
    [("zigzag", None, 1.01), ("dispatch", 1024, 1.02), ("dispatch", None, 1.02)],
)
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_balance(kind, chunk_size, bound, cp):
    rng = np.random.default_rng(5)
    lengths = np.minimum(rng.lognormal(7.5, 1.3, 60).astype(int) + 2, 20000)
    alignment = Alignment.for_layout(partition=kind, cp_size=cp, chunk_size=chunk_size or 1)
    plan = PackPlan.from_documents(lengths, 0, alignment=alignment)
    part = make_partition(
        kind, plan.cu_seqlens_padded, cp, cu_seqlens=plan.cu_seqlens, chunk_size=chunk_size
    )
    work = attention_work(plan, part)
    assert work.sum() == (lengths * (lengths + 1) // 2).sum()
    assert work.max() / work.mean() <= bound


@settings(max_examples=100)
@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=12),
    st.integers(1, 5),
    st.sampled_from([None, 1, 4]),
)
def test_affinity_shares_the_pack_exactly(lengths, cp, chunk_size):
    alignment = Alignment.for_layout(
        partition="dispatch", cp_size=cp, chunk_size=chunk_size or 1, sequence_parallel=True
    )
    plan = PackPlan.from_documents(lengths, 0, alignment=alignment)
    part = make_partition(
        "dispatch",
        plan.cu_seqlens_padded,
        cp,
        cu_seqlens=plan.cu_seqlens,
        chunk_size=chunk_size,
        affinity=True,
    )
    assert sorted(part.permutation()) == list(range(plan.total_tokens))
    assert {len(part.indices(rank)) for rank in range(cp)} == {plan.total_tokens // cp}


def rows_needed(ranks, chunk):
    """Rows of one document that ranks need, given the rank of each of its equal chunks."""
    return sum(chunk * (max(np.flatnonzero(np.array(ranks) == r)) + 1) for r in set(ranks))


@pytest.mark.parametrize(("cp", "count"), [(2, 8), (2, 12), (3, 6)])
def test_affinity_finds_the_best_layout_of_one_document(cp, count):
    # Of all ways to share the chunks evenly, with work balanced to one per cent.
    part = make_partition("dispatch", [0, 8 * count], cp, chunk_size=8, affinity=True)
    work = np.arange(8 * count).reshape(count, 8).sum(1) + 8
    limit = work.sum() // cp * 1.01
    best = min(
        rows_needed(ranks, 8)
        for ranks in itertools.product(range(cp), repeat=count)
        if np.bincount(ranks, minlength=cp).max() == count // cp
        and np.bincount(ranks, work, cp).max() <= limit
    )
    assert rows_needed(part.chunk_ranks.tolist(), 8) == best
    assert np.bincount(part.chunk_ranks, work, cp).max() <= limit
    if cp == 2:
        # Three quarters of a ring: see docs/context_parallel.md.
        assert best - 8 * count == 0.75 * 8 * count


def test_affinity_keeps_whole_documents_on_a_rank():
    lengths = np.array([64, 96, 64, 96, 64, 96, 64, 96])
    document = np.repeat(np.arange(8), lengths // 32)

    def whole(affinity):
        part = make_partition(
            "dispatch", np.cumsum([0, *lengths]), 2, chunk_size=32, affinity=affinity
        )
        return sum(len(set(part.chunk_ranks[document == d])) == 1 for d in range(8))

    assert whole(affinity=True) == 8
    assert whole(affinity=False) == 6


def test_affinity_cuts_finer_where_one_chunk_outweighs_a_share():
    # One document of 4,096 tokens among single tokens, on eight ranks.
    cu_seqlens = np.cumsum([0, 4096, *[1] * (64 * 1024 - 4096)])
    part = make_partition("dispatch", cu_seqlens, 8, affinity=True)
    plan = PackPlan.from_documents(np.diff(cu_seqlens), 0)
    work = attention_work(plan, part)
    assert work.max() / work.mean() <= 1.02
    assert len(part.chunk_ranks) > 8 * 16
    for kind in ("zigzag", "striped"):
        with pytest.raises(ValueError, match="only dispatch has it"):
            make_partition(kind, [0, 16], 2, affinity=True)


def test_dispatch_areas_count_real_pairs_only():
    plan = PackPlan.from_documents([5, 9], 0, alignment=Alignment(segment=8), capacity=64)
    part = make_partition(
        "dispatch", plan.cu_seqlens_padded, 2, cu_seqlens=plan.cu_seqlens, chunk_size=4
    )
    assert attention_work(plan, part).sum() == 15 + 45
    assert part.indices(0).size == part.indices(1).size == 32
