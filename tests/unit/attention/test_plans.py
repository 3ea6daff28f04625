"""Plans: every visible pair once, every row where it is needed and nowhere else, in balance."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.packed.attention.plans import (
    PLAN_KINDS,
    build_attention_plan,
    effective_chunk_size,
    report,
)
from megatron.packed.context_parallel import make_partition
from megatron.packed.errors import ConfigurationError
from tests.unit.attention.plan_cases import (
    ALGORITHMS,
    CASES,
    Case,
    corpus_lengths,
    log_normal_lengths,
    make_case,
    packs_of,
)


def visible_pairs(case: Case) -> set[tuple[int, int]]:
    """Pairs of pack positions that the mask shows, straight from its definition."""
    mask = case.plans[0].mask
    pairs = set()
    starts = case.pack.cu_seqlens_padded[:-1].tolist()
    for start, length in zip(starts, case.pack.lengths.tolist(), strict=True):
        for i in range(length):
            first = 0 if mask.window is None else max(0, i - mask.window)
            last = i + 1 if mask.kind == "causal" else length
            pairs.update((start + i, start + j) for j in range(first, last))
    return pairs


def computed_pairs(case: Case) -> list[Counter[tuple[int, int]]]:
    """Pairs that each rank computes, with keys taken from the messages that its peers send.

    Checks on the way that each message has a sender and a receiver who agree about it.
    """
    positions = case.positions
    mail: dict[tuple[int, int, int], np.ndarray] = {}
    for rank, plan in enumerate(case.plans):
        for step in plan.steps:
            for send in step.sends:
                rows = np.concatenate(
                    [np.arange(a, a + n) for a, n in zip(send.starts, send.counts, strict=True)]
                )
                to, start = send.runs.index
                assert np.array_equal(to, np.arange(len(rows))) and np.array_equal(start, rows)
                assert (rank, send.peer, step.index) not in mail
                mail[rank, send.peer, step.index] = positions[rank][rows]
    result = []
    for rank, plan in enumerate(case.plans):
        assert [step.index for step in plan.steps] == sorted({s.index for s in plan.steps})
        pairs: Counter[tuple[int, int]] = Counter()
        for step in plan.steps:
            keys = positions[rank]
            if step.index:
                arrived = []
                for receive in step.receives:
                    message = mail.pop((receive.peer, rank, step.index))
                    assert len(message) == receive.rows > 0
                    arrived.append(message)
                keys = np.concatenate([np.zeros(0, np.int64), *arrived])
            used = np.zeros(len(keys), dtype=bool)
            for q, m, k, n, low, high in step.tiles.bands.tolist():
                distance = np.arange(m)[:, None] - np.arange(n)
                rows, columns = np.nonzero((distance >= low) & (distance <= high))
                assert len(np.unique(rows)) == m  # every row of a tile sees a key
                pairs.update(
                    zip(
                        positions[rank][q + rows].tolist(),
                        keys[k + columns].tolist(),
                        strict=True,
                    )
                )
                used[k + columns] = True
            if step.index:
                assert used.all()  # nothing travels that is not needed
        assert sum(pairs.values()) == plan.area
        result.append(pairs)
    assert not mail
    return result


def check_exact_cover(case: Case) -> None:
    by_rank = computed_pairs(case)
    exchange = case.plans[0].head_exchange
    copies = 1 if exchange is None else exchange.size
    for rank, pairs in enumerate(by_rank):
        # Ranks of one head-exchange group compute the same pairs, for heads of their own.
        assert pairs == by_rank[rank - rank % copies]
    total: Counter[tuple[int, int]] = Counter()
    for pairs in by_rank[::copies]:
        total.update(pairs)
    assert set(total) == visible_pairs(case)
    assert max(total.values(), default=1) == 1


segment_sets = st.lists(
    st.one_of(st.sampled_from([0, 1, 2, 3]), st.integers(0, 40)), min_size=1, max_size=8
)


@given(
    st.sampled_from([name for name in ALGORITHMS if name != "local"]),
    st.integers(1, 16),
    segment_sets,
    st.sampled_from([("causal", None), ("causal", 0), ("causal", 7), ("full", None)]),
    st.sampled_from([1, 4]),
)
def test_every_visible_pair_is_in_one_tile_of_one_rank(name, cp_size, lengths, mask, alignment):
    if name.startswith("a2a+p2p"):
        cp_size = 4
    check_exact_cover(
        make_case(name, cp_size, lengths, mask=mask[0], window=mask[1], extra_alignment=alignment)
    )


@pytest.mark.parametrize(("name", "cp_size"), CASES)
def test_padding_in_the_middle_and_a_rank_without_real_tokens(name, cp_size):
    check_exact_cover(make_case(name, cp_size, [1, 0, 9, 8, 8, 12, 8, 12], extra_alignment=8))
    check_exact_cover(make_case(name, cp_size, [1], extra_alignment=16))
    check_exact_cover(make_case(name, cp_size, [0], extra_alignment=16))


def test_rows_that_hold_several_segments():
    # Two rows of 16 tokens, zigzag over each row, documents inside: the layout of BSHD.
    rows = make_partition("zigzag", [0, 16, 32], 2)
    cu_seqlens = [0, 5, 16, 16, 17, 29, 32]
    plans = [
        build_attention_plan("p2p", cu_seqlens, cp_size=2, cp_rank=r, partition=rows)
        for r in range(2)
    ]
    assert sum(plan.area for plan in plans) == sum(
        n * (n + 1) // 2 for n in np.diff(cu_seqlens).tolist()
    )
    assert plans[0].partition == "zigzag"


@pytest.mark.parametrize(
    ("cu_seqlens", "chunk", "loads"),
    [
        ([0, 16], 2, [68, 68]),
        ([0, 16], 2, [34, 34, 34, 34]),
        ([0, 4, 16], 2, [44, 44]),
        ([0, 8, 16, 24, 40], 5, [85, 63, 47, 49]),
        ([0, 64], 4, [520, 520, 520, 520]),
    ],
)
def test_areas_are_the_known_loads_of_dispatch(cu_seqlens, chunk, loads):
    plans = [
        build_attention_plan(
            "dispatch", cu_seqlens, cp_size=len(loads), cp_rank=rank, chunk_size=chunk
        )
        for rank in range(len(loads))
    ]
    assert report(plans).areas == tuple(loads)


def test_zigzag_ring_is_one_task_a_step_and_never_sends_the_last_chunk():
    first, second = make_case("p2p", 2, [16]).plans
    assert [len(step.tiles) for step in first.steps] == [1, 1]
    assert [len(step.tiles) for step in second.steps] == [1, 1]
    assert first.steps[1].tiles.bands[0, :4].tolist() == [4, 4, 0, 8]  # chunk 3 sees 1 and 2
    assert second.steps[1].tiles.bands[0, :4].tolist() == [0, 8, 0, 4]  # 1 and 2 see 0
    (send,) = first.steps[1].sends
    assert (send.peer, send.starts.tolist(), send.counts.tolist()) == (1, [0], [4])


def test_a_segment_never_reaches_a_rank_without_its_later_rows():
    # Contiguous: rank 0 holds segment 0 alone, rank 1 the end of segment 1.
    plans = make_case("p2p-contiguous", 4, [8, 16, 8]).plans
    sends = {
        (rank, s.peer): s.rows for rank, p in enumerate(plans) for t in p.steps for s in t.sends
    }
    assert sends == {(1, 2): 8}


def test_windows_send_the_rows_in_reach_alone():
    plans = make_case("p2p-contiguous", 4, [32], window=3).plans
    assert [plan.rows_sent for plan in plans] == [3, 3, 3, 0]
    assert all(step.index == 1 for plan in plans for step in plan.steps[1:])


def test_bytes_are_counted():
    plan = make_case("p2p", 2, [16]).plans[1]
    assert plan.rows_sent == 8
    assert plan.kv_bytes_sent(2, 24, 16, 2) == 8 * 2 * (24 + 16) * 2


@pytest.mark.parametrize("lengths", [corpus_lengths(), log_normal_lengths()], ids=["corpus", "log"])
@pytest.mark.parametrize(
    ("name", "cp_size", "tokens", "balance", "traffic"),
    [
        ("p2p", 2, 128, 1.01, 0.76),
        ("p2p", 4, 128, 1.01, 0.76),
        ("p2p", 8, 128, 1.01, 0.76),
        ("dispatch", 2, 256, 1.02, 0.60),
        ("dispatch", 4, 128, 1.02, 0.60),
        ("dispatch", 8, 128, 1.02, 0.60),
        ("dispatch", 16, 128, 1.02, 0.60),
        ("dispatch-affinity", 2, 32, 1.02, 0.60),
        ("dispatch-affinity", 8, 32, 1.02, 0.60),
        ("dispatch-affinity", 2, 128, 1.02, 0.40),
        ("dispatch-affinity", 4, 128, 1.02, 0.40),
        ("dispatch-affinity", 8, 128, 1.02, 0.40),
        ("dispatch-affinity", 16, 128, 1.02, 0.40),
        ("dispatch-affinity", 8, 512, 1.02, 0.20),
    ],
)
def test_balance_and_traffic(name, cp_size, tokens, balance, traffic, lengths):
    # The share that travels depends on how long documents are beside chunks: one document that
    # fills the pack needs 3/4 of all keys on two ranks, whatever the layout.
    align = 2 * cp_size if name == "p2p" else 1
    packs = [
        [max(n // align, 1) * align for n in pack] for pack in packs_of(lengths, tokens * 1024, 8)
    ]
    reports = [report(make_case(name, cp_size, pack).plans) for pack in packs]
    assert max(r.balance for r in reports) <= balance
    assert np.mean([r.kv_share for r in reports]) <= traffic


@pytest.mark.parametrize("cp_size", [2, 3, 4, 8])
def test_shares_of_a_full_ring_are_exact(cp_size):
    length = [4 * 2 * cp_size]
    assert report(make_case("p2p", cp_size, length).plans).kv_share == 0.75
    assert report(make_case("p2p", cp_size, length, mask="full").plans).kv_share == 1.0
    assert report(make_case("p2p-contiguous", cp_size, length).plans).kv_share == 0.5
    assert report(make_case("p2p", cp_size, length).plans).balance == 1.0


def test_head_exchange_alone_moves_no_keys_and_hierarchy_less_than_a_ring():
    assert report(make_case("a2a", 4, [64, 32]).plans).kv_share == 0
    flat = sum(plan.rows_sent for plan in make_case("p2p", 4, [64, 32]).plans)
    nested = sum(plan.rows_sent for plan in make_case("a2a+p2p", 4, [64, 32]).plans)
    assert nested / 2 < flat  # half of the heads a row


def test_stages_bound_the_exchanges():
    plans = make_case("dispatch-2-stages", 4, [200]).plans
    assert {step.index for plan in plans for step in plan.steps} == {0, 1, 2}


@pytest.mark.parametrize(
    ("flag", "valid", "cp_size", "expected"),
    [(512, 8192, 2, 512), (512, 1000, 4, 128), (512, 7, 8, 1), (1, 4096, 2, 1), (512, 0, 2, 1)],
)
def test_effective_chunk_size(flag, valid, cp_size, expected):
    assert effective_chunk_size(flag, valid, cp_size) == expected


def test_a_million_tokens_on_ten_thousand_ranks():
    total, cp_size = 104 * 10_000, 10_000
    for cu_seqlens in ([0, total], np.linspace(0, total, 1201).astype(np.int64)):
        partition = make_partition("zigzag_pack", cu_seqlens, cp_size)
        for kind in ("p2p", "all_gather"):
            plan = build_attention_plan(
                kind, cu_seqlens, cp_size=cp_size, cp_rank=1234, partition=partition
            )
            assert plan.real_rows == 104
        # A rank knows what it sends without the plans of the others.
        assert plan.rows_sent > 0


def test_plans_travel_from_workers():
    plan = make_case("dispatch", 4, [100, 30]).plans[2]
    copy = pickle.loads(pickle.dumps(plan))
    assert copy.mask == plan.mask
    for a, b in zip(copy.steps, plan.steps, strict=True):
        assert a.calls == b.calls
        assert np.array_equal(a.tiles.bands, b.tiles.bands)


def test_planning_needs_no_torch():
    code = (
        "import sys; from megatron.packed.attention import build_attention_plan;"
        "build_attention_plan('p2p', [0, 8], cp_size=2).steps[0].calls;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_cannot_be_planned_is_refused_by_name():
    def build(kind="p2p", cu=(0, 8), **options):
        return build_attention_plan(kind, list(cu), **{"cp_size": 2, **options})

    with pytest.raises(
        ValueError, match=f"must be one of {', '.join(PLAN_KINDS)}".replace("+", ".")
    ):
        build("rnig")
    with pytest.raises(ValueError, match="'local' is for one rank, not 2"):
        build("local")
    with pytest.raises(ValueError, match="no multiple of 2 \\* cp_size = 4"):
        build(cu=[0, 6])
    with pytest.raises(ValueError, match="cp_rank: must be below"):
        build(cp_rank=2)
    with pytest.raises(ValueError, match="mask: 'prefix' must be one of causal, full"):
        build(mask="prefix")
    with pytest.raises(ValueError, match="window: must be at least 0"):
        build(window=-1)
    with pytest.raises(ValueError, match="needs the causal mask"):
        build(mask="full", window=4)
    with pytest.raises(ValueError, match="none of them longer"):
        build(cu_seqlens_padded=[0, 4])
    with pytest.raises(ValueError, match="made for 16 tokens on 2 ranks, the pack has 8 on 2"):
        build(partition=make_partition("zigzag", [0, 16], 2))
    with pytest.raises(ValueError, match="only dispatch has them"):
        build(stages=2)
    with pytest.raises(ConfigurationError, match="2 3 multiply to 6, not to .* 8"):
        build("a2a+p2p", cu=[0, 64], cp_size=8, hierarchical_sizes=(2, 3))
    with pytest.raises(ConfigurationError, match="needs two --hierarchical"):
        build("a2a+p2p", cp_size=4)
    with pytest.raises(ConfigurationError, match="2 2 needs --cp-comm-type a2a\\+p2p, not p2p"):
        build(cu=[0, 64], cp_size=4, hierarchical_sizes=(2, 2))
    with pytest.raises(ValueError, match="pooled ranks of a striped partition"):
        build("a2a+p2p", cp_size=4, hierarchical_sizes=(2, 2), partition="striped")


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(("name", "cp_size"), CASES)
def test_kernels_find_every_row_that_they_have_to_start(name, cp_size, window):
    """Gradients lie in memory that nobody clears: first tiles cover the real rows of a rank, and
    the tiles of an exchange all keys that arrive."""
    case = make_case(name, cp_size, [40, 1, 3, 25, 7], window=window)
    for plan in case.plans:
        local = plan.steps[0].tiles
        first = np.zeros(plan.rows, dtype=int)
        for q_start, q_count, k_start, k_count, *_ in local.bands[: local.fresh]:
            assert (q_start, q_count) == (k_start, k_count)
            first[q_start : q_start + q_count] += 1
        assert first.max(initial=0) <= 1 and first.sum() == plan.real_rows
        assert plan.padding.tolist() == np.flatnonzero(first == 0).tolist()
        for step in plan.steps[1:]:
            keys = np.zeros(step.rows_received, dtype=bool)
            for _, _, k_start, k_count, *_ in step.tiles.bands:
                keys[k_start : k_start + k_count] = True
            assert keys.all()


@pytest.mark.parametrize(("name", "cp_size"), CASES)
def test_ranks_agree_on_how_gradients_travel(name, cp_size):
    """Where no rank hears from two others at once; all ranks have to know it of all."""
    case = make_case(name, cp_size, [40, 60, 3, 25, 70])
    assert len({plan.is_pairwise for plan in case.plans}) == 1
    steps = [step for plan in case.plans for step in plan.steps]
    most = max(max(len(step.sends), len(step.receives)) for step in steps)
    assert case.plans[0].is_pairwise == (most <= 1)
