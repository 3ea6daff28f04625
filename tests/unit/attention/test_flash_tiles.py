"""The CUDA path's index logic, on a CPU: lists, merging and gradients around emulated operators."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.packed.attention import executor, tile_lists
from megatron.packed.attention.kernels import cuda, select_tile_kernel, tiles_cpu, tiles_portable
from megatron.packed.attention.kernels.cuda import FlashTiles
from megatron.packed.attention.plans import Step, build_attention_plan
from megatron.packed.attention.task_graph import Tiles
from megatron.packed.errors import TrainingError
from tests.unit.attention.flash_emulation import FlashEmulation
from tests.unit.attention.plan_cases import ALGORITHMS, CASES, make_case
from tests.unit.attention.test_executor import (
    HEADS,
    SEGMENTS,
    heads_of,
    make_inputs,
    relative,
    run_dense,
    run_plans,
)
from tests.unit.attention.test_tiles import KEYS, ROWS, bands, visible


@pytest.fixture
def emulation(monkeypatch) -> FlashEmulation:
    """Let the executor run the flash kernel over emulated operators."""
    emulated = FlashEmulation()
    kernel = FlashTiles(emulated.forward, emulated.backward)
    monkeypatch.setattr(executor, "_kernel_for", lambda *_: kernel)
    return emulated


def flash_check(case, heads) -> None:
    """fp64 throughout: what is tested is which rows meet which keys, and the merging."""
    inputs = make_inputs(case, heads, torch.float32)
    wanted = run_dense(case, inputs)
    got = run_plans(case, inputs, torch.float64)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True):
        assert torch.count_nonzero(a[~inputs.valid]) == 0, name
        assert relative(a, b) <= 1e-12, name


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("name", "cp_size"), CASES)
def test_every_plan(emulation, name, cp_size, window):
    flash_check(make_case(name, cp_size, [67, 0, 1, 30], window=window), heads_of("gqa", cp_size))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", ["local", "p2p", "dispatch", "a2a"])
def test_heads(emulation, name, heads):
    size = 1 if name == "local" else 2
    flash_check(make_case(name, size, [40, 7]), heads_of(heads, size))


@pytest.mark.parametrize("segments", [name for name in SEGMENTS if name not in ("giant", "long")])
@pytest.mark.parametrize("name", ["p2p", "striped", "all_gather", "dispatch-2-stages"])
def test_segments(emulation, name, segments):
    lengths, alignment = SEGMENTS[segments]
    for window in (None, 6):
        case = make_case(name, 4, lengths, window=window, extra_alignment=alignment)
        flash_check(case, heads_of("mla", 4))


@pytest.mark.parametrize(("name", "cp_size"), [case for case in CASES if case[1] == 3])
def test_full_mask(emulation, name, cp_size):
    flash_check(make_case(name, cp_size, [25, 1, 8], mask="full"), heads_of("gqa", cp_size))


@pytest.mark.parametrize("name", [name for name, a in ALGORITHMS.items() if 4 in a.sizes])
def test_one_call_a_step_and_mask_type(emulation, name):
    lengths = [3, 41, 17, 64, 9, 30, 25, 128, 5, 11]
    for window, most in ((None, 2), (16, 5)):
        case = make_case(name, 4, lengths, window=window)
        for plan in case.plans:
            for step in plan.steps:
                types = [(each.left, each.right) for each in step.lists]
                assert len(types) == len(set(types)) <= most
                assert len(step.tiles) == 0 or len(types) >= 1
    run_plans(case, make_inputs(case, heads_of("mha", 4), torch.float32), torch.float64)
    assert len(emulation.calls) == sum(len(s.lists) for plan in case.plans for s in plan.steps)
    assert max(sequences for *_, sequences in emulation.calls) > 1


def test_packs_without_padding_are_read_in_place():
    plan = build_attention_plan("local", [0, 5, 9, 30])
    (only,) = plan.steps[0].lists
    assert (only.left, only.right, only.fresh) == (-1, 0, True)
    assert only.cu_q.tolist() == only.cu_k.tolist() == [0, 5, 9, 30]
    placed = cuda._place(only, torch.device("cpu"))
    assert placed.q_rows == placed.k_rows == slice(0, 30)
    assert cuda._place(only, torch.device("cpu")) is placed


@pytest.mark.parametrize("name", ["p2p", "striped", "dispatch"])
def test_half_precision_is_within_twice_an_honest_run(name, monkeypatch):
    case = make_case(name, 4, [60, 7, 141])
    heads = heads_of("gqa", 4)
    inputs = make_inputs(case, heads, torch.bfloat16)
    wanted = run_dense(case, inputs)
    emulated = FlashEmulation(strict_dtype=True)
    kernel = FlashTiles(emulated.forward, emulated.backward)
    monkeypatch.setattr(executor, "_kernel_for", lambda *_: kernel)
    got = run_plans(case, inputs, torch.bfloat16)
    monkeypatch.undo()
    honest = run_plans(case, inputs, torch.bfloat16)
    assert emulated.calls
    for a, h, b in zip(got, honest, wanted, strict=True):
        valid = inputs.valid
        assert relative(a[valid], b[valid]) <= 2 * relative(h[valid], b[valid])


@given(st.lists(bands(), min_size=1, max_size=6), st.integers(1, 4))
def test_lists_cover_their_tiles_once(tiles, limit):
    wanted = sum(visible(band).astype(int) for band in tiles)
    got = np.zeros((ROWS, KEYS), dtype=int)
    touched = np.zeros(ROWS, dtype=bool)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tile_lists, "GATHER_LIMIT", limit)
        lists = tile_lists.tile_lists(Tiles(np.array(tiles)), is_first=True)
    for each in lists:
        assert len(np.unique(each.q_rows)) == len(each.q_rows)
        assert each.fresh == (not touched[each.q_rows].any())
        touched[each.q_rows] = True
        for (q, q_end), (k, k_end) in zip(
            np.stack([each.cu_q[:-1], each.cu_q[1:]], axis=1),
            np.stack([each.cu_k[:-1], each.cu_k[1:]], axis=1),
            strict=True,
        ):
            m, n = q_end - q, k_end - k
            here, there = np.arange(m)[:, None] + n - m, np.arange(n)
            seen = np.ones((m, n), dtype=bool)
            if each.left >= 0:
                seen &= there >= here - each.left
            if each.right >= 0:
                seen &= there <= here + each.right
            assert seen.any(axis=1).all()
            np.add.at(got, (each.q_rows[q:q_end][:, None], each.k_rows[k:k_end][None]), seen)
    assert np.array_equal(got, wanted)


def test_gathered_keys_are_bounded():
    wide = [[64 * i, 64, 0, 64 * (32 - i), -(1 << 40), 1 << 40] for i in range(32)]
    lists = tile_lists.tile_lists(Tiles(np.array(wide)), is_first=False)
    assert all(len(each.k_rows) <= 4 * 2048 for each in lists)
    assert 4 <= len(lists) <= 6


def test_no_tiles_no_calls():
    assert Step(1, (), (), Tiles(np.zeros((0, 6), np.int64))).lists == ()


def test_what_flash_cannot_do_goes_to_the_portable_path():
    flash = select_tile_kernel("cuda", torch.bfloat16, 256)
    assert isinstance(flash, FlashTiles)
    assert select_tile_kernel("cpu", torch.bfloat16, 64) is tiles_cpu
    with pytest.warns(UserWarning, match="float32 has no flash kernel"):
        assert select_tile_kernel("cuda", torch.float32, 64) is tiles_portable
    with pytest.warns(UserWarning, match="width 264 are wider than the 256"):
        assert select_tile_kernel("cuda", torch.float16, 264) is tiles_portable
    with pytest.warns(UserWarning, match="no kernels for mps"):
        assert select_tile_kernel("mps", torch.float16, 64) is tiles_portable


def test_another_form_of_log_sum_exp_is_named():
    emulated = FlashEmulation()

    def padded(*arguments, **options):
        out, lse, *rest = emulated.forward(*arguments, **options)
        return out, lse.unsqueeze(0), *rest

    step = build_attention_plan("local", [0, 5]).steps[0]
    q = torch.randn(5, 2, 8)
    with pytest.raises(TrainingError, match="log-sum-exps come in shape"):
        FlashTiles(padded).forward(q, q, q, step, 1.0, q.clone(), q.new_zeros(5, 2))


# What the installed torch offers. A change here means that `kernels/cuda.py` and the emulation have
# to be read against the new operators.
FORWARD = (
    "aten::_flash_attention_forward(Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, "
    "Tensor? cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, bool "
    "return_debug_mask, *, float? scale=None, SymInt? window_size_left=None, SymInt? "
    "window_size_right=None, "
)
FORWARD_RESULTS = "-> (Tensor output, Tensor softmax_logsumexp, Tensor rng_state, Tensor unused, "
BACKWARD = (
    "aten::_flash_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
    "Tensor out, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, "
    "float dropout_p, bool is_causal, Tensor rng_state, Tensor unused, *, float? scale=None, "
    "SymInt? window_size_left=None, SymInt? window_size_right=None) -> (Tensor, Tensor, Tensor)"
)


def test_operators_have_the_known_schema():
    forward = str(torch.ops.aten._flash_attention_forward.default._schema)
    assert forward.startswith(FORWARD) and FORWARD_RESULTS in forward
    assert str(torch.ops.aten._flash_attention_backward.default._schema) == BACKWARD


def test_the_real_operators_accept_the_calls():
    """Shapes and dtypes alone, on the meta device: no kernel runs."""
    plan = build_attention_plan("p2p", [0, 16, 48], cp_size=2, cp_rank=1, window=9)
    kernel = FlashTiles()
    q, k, v = (torch.empty(24, n, 16, dtype=torch.bfloat16, device="meta") for n in (4, 2, 2))
    for step in plan.steps:
        out = torch.empty(24, 4, 16, device="meta")
        lse = torch.empty(24, 4, device="meta")
        assert step.lists
        kernel.forward(q, k, v, step, 0.5, out, lse)
        half = out.bfloat16()
        grads = [torch.zeros(24, n, 16, device="meta") for n in (4, 2, 2)]
        kernel.backward(half, q, k, v, half, lse, step, 0.5, torch.empty_like(lse), *grads)
