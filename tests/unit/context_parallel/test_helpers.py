"""One contract for all helpers: what they cut is what they put together, whatever the layout."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.packed.arguments import config_from_flags
from megatron.packed.attention.plans import PLAN_KINDS, default_partition
from megatron.packed.attention.simulation import simulate_attention
from megatron.packed.context_parallel import (
    ContextParallelHelper,
    MagiAttnContextParallelHelper,
    RingAttnContextParallelHelper,
    UlyssesContextParallelHelper,
    build_context_parallel_helper,
)
from megatron.packed.context_parallel.capabilities import (
    CAPABILITIES,
    COMMUNICATIONS,
    capability_table,
    select,
)
from megatron.packed.context_parallel.context_parallel_helper import helper_settings
from megatron.packed.context_parallel.helper_base import HelperSettings
from megatron.packed.errors import ConfigurationError
from megatron.packed.packing import Alignment, PackPlan
from megatron.packed.packing.partition import make_partition

from .helper_cases import CASES, PACKED, config_of, cut

SHARED = Path(__file__).parents[4] / "shared" / "cases" / "partition.json"
DOCS = Path(__file__).parents[3] / "docs" / "context_parallel.md"

MIXED = [17, 1, 0, 5, 30, 3, 21]
# One token, shorter than 2 * CP, and one giant: some rank has hardly anything.
LENGTHS = {"mixed": MIXED, "one token": [1], "giant": [90], "short": [2, 1, 3], "none": [0]}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize(("name", "cp_size"), CASES)
def test_shares_are_slices_and_slices_join(name, cp_size, lengths):
    micro_batch = cut(name, cp_size, lengths)
    helpers, partition = micro_batch.helpers, micro_batch.partition
    for key, whole in micro_batch.whole.items():
        slices = [helper.slice(whole, partition) for helper in helpers]
        for share, local in zip(slices, micro_batch.local, strict=True):
            assert torch.equal(share, local[key]), key
        assert torch.equal(helpers[0].unslice(slices, partition), whole)
        assert all(x.shape[1] == whole.shape[1] // cp_size for x in slices)
    # Logits have more dimensions and another dtype.
    logits = torch.randn(*micro_batch.whole["tokens"].shape, 3, 2, dtype=torch.float64)
    slices = [helper.slice({"logits": logits}, partition)["logits"] for helper in helpers]
    assert torch.equal(helpers[-1].unslice(slices, partition), logits)


@pytest.mark.parametrize(("name", "cp_size"), CASES)
def test_indices_are_a_permutation(name, cp_size):
    micro_batch = cut(name, cp_size, MIXED)
    indices = [h.get_slice_index(micro_batch.partition) for h in micro_batch.helpers]
    if cp_size == 1:
        assert indices == [None]
        assert micro_batch.partition is None
        assert micro_batch.plans == [None]
        tokens = micro_batch.whole["tokens"]
        assert micro_batch.helpers[0].slice(tokens, None) is tokens
        assert micro_batch.helpers[0].unslice(tokens, None) is tokens
        return
    total = micro_batch.whole["tokens"].numel()
    assert np.array_equal(np.sort(np.concatenate(indices)), np.arange(total))
    assert {len(index) for index in indices} == {total // cp_size}


@pytest.mark.parametrize("lengths", [MIXED, [1]], ids=["mixed", "one token"])
@pytest.mark.parametrize(("name", "cp_size"), [c for c in CASES if not c[0].startswith("rows")])
def test_packs_count_real_tokens_and_cut_every_depth(name, cp_size, lengths):
    micro_batch = cut(name, cp_size, lengths, mtp_depths=2)
    counts = [int(share.valid_mask.sum()) for share in micro_batch.shares]
    assert sum(counts) == sum(lengths)
    if cp_size > 1:
        assert counts == micro_batch.partition.real_tokens().tolist()
        assert len(lengths) > 1 or 0 in counts  # a rank without a single real token is legal
    for helper, share, local in zip(
        micro_batch.helpers, micro_batch.shares, micro_batch.local, strict=True
    ):
        params = share.packed_seq_params
        assert torch.equal(params.valid_local_token_mask, share.valid_mask)
        assert int(params.cu_seqlens_host[-1]) == sum(lengths)  # boundaries are global
        assert int(params.cu_seqlens_padded_host[-1]) == share.tokens.shape[1] * cp_size
        assert share.statistics.real_tokens == sum(lengths)
        for key in ("mtp_1_labels", "mtp_2_labels", "mtp_1_loss_mask", "mtp_2_loss_mask"):
            assert torch.equal(
                helper.slice(micro_batch.whole[key], micro_batch.partition), local[key]
            )


@pytest.mark.parametrize(("name", "cp_size"), [c for c in CASES if c[1] > 1])
def test_plans_attend_inside_segments(name, cp_size):
    """The plans that batches carry, run over all ranks, against dense attention in fp64."""
    micro_batch = cut(name, cp_size, MIXED)
    total = micro_batch.whole["tokens"].numel()
    generator = torch.Generator().manual_seed(3)
    whole = [torch.randn(total, 4, 8, generator=generator).double() for _ in range(3)]
    index = [
        torch.from_numpy(h.get_slice_index(micro_batch.partition)) for h in micro_batch.helpers
    ]
    expected = torch.zeros(total, 4, 8, dtype=torch.float64)
    for start, length in micro_batch.segments:
        q, k, v = (x[start : start + length].transpose(0, 1) for x in whole)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        expected[start : start + length] = attended.transpose(0, 1)
    q, k, v = ([x[i] for i in index] for x in whole)
    for layer in (1, 2):
        plans = [plan.of_layer(layer) for plan in micro_batch.plans]
        for out, i in zip(simulate_attention(q, k, v, plans), index, strict=True):
            torch.testing.assert_close(out, expected[i], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["rows", "ring", "magi-chunks", "one-a-layer"])
def test_batches_travel_to_and_from_workers(name):
    for share in cut(name, 2, MIXED).shares:
        copy = pickle.loads(pickle.dumps(share))
        assert torch.equal(copy.tokens, share.tokens)
        plans = [
            b.packed_seq_params.attention if hasattr(b, "packed_seq_params") else b.attention
            for b in (copy, share, share.to("cpu"))
        ]
        for number in (1, 2):
            first = plans[1].of_layer(number)
            for plan in plans:
                assert plan.of_layer(number).kind == first.kind
                assert plan.of_layer(number).area == first.area
                assert plan.of_layer(number).cp_rank == first.cp_rank


@pytest.mark.parametrize("name", ["rows", "ring"])
def test_hooks_see_every_batch_that_was_cut(name):
    micro_batch = cut(name, 2, MIXED)
    helper, seen = micro_batch.helpers[1], []
    helper.register_batch_sliced_hook(lambda batch: seen.append(batch))
    helper.register_batch_sliced_hook(lambda batch: (batch, "changed"))
    if isinstance(helper, ContextParallelHelper):
        whole = cut(name, 1, MIXED).shares[0]
        result, mark = helper.pack(whole)
    else:
        plan = PackPlan.from_documents(MIXED, 0, alignment=helper.alignment)
        result, mark = helper.pack(plan, np.arange(sum(MIXED)))
    assert seen == [result]
    assert mark == "changed"


@pytest.mark.parametrize(
    ("flags", "helper", "kinds", "partition"),
    [
        ("", ContextParallelHelper, ("p2p",), "zigzag"),
        ("--attention-backend magi", ContextParallelHelper, ("p2p",), "zigzag"),
        ("--cp-comm-type a2a", ContextParallelHelper, ("a2a",), "zigzag"),
        (PACKED, RingAttnContextParallelHelper, ("p2p",), "zigzag"),
        *[
            (
                f"{PACKED} --attention-backend {name}",
                RingAttnContextParallelHelper,
                ("p2p",),
                "zigzag",
            )
            for name in ("flash", "flash2", "fused", "auto", "unfused", "local")
        ],
        (
            f"{PACKED} --attention-backend flex",
            UlyssesContextParallelHelper,
            ("a2a",),
            "contiguous",
        ),
        (
            f"{PACKED} --attention-backend magi",
            MagiAttnContextParallelHelper,
            ("dispatch",),
            "dispatch",
        ),
        # The exchange overrides the backend.
        (
            f"{PACKED} --attention-backend flex --cp-comm-type p2p",
            RingAttnContextParallelHelper,
            ("p2p",),
            "zigzag",
        ),
        (
            f"{PACKED} --attention-backend flash --cp-comm-type dispatch",
            MagiAttnContextParallelHelper,
            ("dispatch",),
            "dispatch",
        ),
        (
            f"{PACKED} --cp-comm-type striped",
            RingAttnContextParallelHelper,
            ("striped",),
            "striped",
        ),
        # Layers may differ where the tokens lie alike.
        (
            f"{PACKED} --cp-comm-type all_gather p2p",
            RingAttnContextParallelHelper,
            ("all_gather", "p2p"),
            "zigzag",
        ),
        (
            f"{PACKED} --cp-comm-type a2a dispatch",
            MagiAttnContextParallelHelper,
            ("a2a", "dispatch"),
            "dispatch",
        ),
        (f"{PACKED} --cp-comm-type a2a a2a", UlyssesContextParallelHelper, ("a2a",), "contiguous"),
    ],
)
def test_flags_choose_a_helper(flags, helper, kinds, partition):
    built = build_context_parallel_helper(config_of(flags, 2, rank=1))
    assert type(built) is helper
    assert (built.cp_rank, built.cp_size) == (1, 2)
    assert built.settings.selection.kinds == kinds
    assert built.settings.selection.partition == partition


def test_alignment_is_what_the_partition_needs():
    sequence_parallel = "--tensor-model-parallel-size 2 --sequence-parallel"
    for flags, expected in (
        (PACKED, Alignment(segment=4, pack=2)),
        (f"{PACKED} {sequence_parallel}", Alignment(segment=8, pack=4)),
        (f"{PACKED} --attention-backend flex", Alignment(pack=2)),
        (f"{PACKED} --attention-backend magi --magi-attn-chunk-size 8", Alignment(pack=16)),
    ):
        assert build_context_parallel_helper(config_of(flags, 2)).alignment == expected


def test_what_a_helper_lacks_is_refused_by_name():
    settings = helper_settings(config_of(PACKED, 2))
    with pytest.raises(ConfigurationError, match="Ulysses.*: the flags choose RingAttn"):
        UlyssesContextParallelHelper(settings)
    mixed = HelperSettings(select(True, "auto", ("p2p", "dispatch")), cp_size=2)
    with pytest.raises(ConfigurationError, match="--cp-comm-type dispatch: RingAttn.*no such"):
        RingAttnContextParallelHelper(mixed)
    rows = cut("rows", 2, MIXED)
    with pytest.raises(ValueError, match="1 of 2 ranks; pass all, or a group"):
        rows.helpers[0].unslice([torch.zeros(2, 24)], rows.partition)
    with pytest.raises(ValueError, match="has 80 tokens, the partition 96"):
        rows.helpers[0].slice(torch.zeros(2, 40), rows.partition)


@pytest.mark.skipif(not SHARED.exists(), reason="the shared cases are not beside this checkout")
def test_known_answers():
    cases = json.loads(SHARED.read_text())
    flags = {"zigzag": "auto", "contiguous": "flex", "dispatch": "magi"}
    for kind, backend in flags.items():
        for case in cases[kind]:
            size = case["cp"]
            selection = select(True, backend, None)
            for rank in range(size):
                settings = HelperSettings(selection, size, rank, chunk_size=case.get("chunk"))
                helper = _build(settings)
                padded = case.get("cu_seqlens_padded") or case["cu_seqlens"]
                partition = helper.partition(padded)
                if "ranks" in case:
                    expected = case["ranks"][rank]
                else:
                    chunk = case["chunk"]
                    expected = [c * chunk + i for c in case["chunks"][rank] for i in range(chunk)]
                assert helper.get_slice_index(partition).tolist() == expected
                stream = torch.arange(padded[-1])[None]
                assert helper.slice(stream, partition).tolist() == [expected]
    for case in cases["zigzag_must_reject"]:
        settings = HelperSettings(select(True, "auto", None), case["cp"], 0)
        with pytest.raises(ValueError):
            partition = _build(settings).partition(case["cu_seqlens_padded"])
            _build(settings).slice(torch.zeros(1, case["total_tokens"]), partition)
    for case in cases["real_tokens_per_rank"]:
        settings = HelperSettings(select(True, "auto", None), case["cp"], 0)
        partition = _build(settings).partition(case["cu_seqlens_padded"], case["cu_seqlens"])
        assert partition.real_tokens().tolist() == [ends[-1] for ends in case["both"]]


def test_a_chunk_size_asks_for_the_layout_of_magi_attention():
    cu_seqlens = np.arange(9) * 64
    for chunk_size, affinity in ((32, False), (None, True)):
        settings = HelperSettings(select(True, "magi", None), 2, 0, chunk_size=chunk_size)
        ours = _build(settings).partition(cu_seqlens)
        expected = make_partition(
            "dispatch", cu_seqlens, 2, chunk_size=chunk_size, affinity=affinity
        )
        assert np.array_equal(ours.permutation(), expected.permutation())


def _build(settings):
    classes = (
        RingAttnContextParallelHelper,
        UlyssesContextParallelHelper,
        MagiAttnContextParallelHelper,
    )
    return next(c for c in classes if c.name == settings.selection.capability.helper)(settings)


def test_the_table_is_true_and_in_the_documentation():
    assert set(COMMUNICATIONS) == set(PLAN_KINDS) - {"local"}
    for name, each in COMMUNICATIONS.items():
        assert each.partition == default_partition(name)
    for able in CAPABILITIES:
        assert set(able.communications) <= set(COMMUNICATIONS)
    text = DOCS.read_text()
    assert capability_table() in text, "docs/context_parallel.md is out of date"


@pytest.mark.parametrize(
    ("flags", "multiple"),
    [("", 1), ("--fp8-format hybrid", 16), ("--fp8-format e4m3 --fp8-recipe mxfp8", 32)],
)
def test_quantised_products_get_tokens_in_multiples(flags: str, multiple: int) -> None:
    common = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 2 --bf16 "
        "--train-iters 4 --lr 1e-3 --seq-length 128 --tokenizer-type NullTokenizer "
        "--vocab-size 100 --mock-data --attention-dropout 0 --use-packed-sequence "
        "--context-parallel-size 2 --cp-comm-type striped --tensor-model-parallel-size 2 "
        "--sequence-parallel"
    )
    config = config_from_flags(f"{common} {flags}", {"WORLD_SIZE": "4"}, accelerator="cuda")
    assert helper_settings(config).alignment.pack_multiple == 4 * multiple
