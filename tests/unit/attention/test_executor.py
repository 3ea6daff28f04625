"""Conformance of every plan: values and gradients against dense fp64 attention of the pack."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megatron.packed.attention import executor
from megatron.packed.attention.executor import packed_attention
from megatron.packed.attention.in_process import InProcessCommunicator, InProcessNetwork
from megatron.packed.attention.kernels import tiles_cpu, tiles_portable, tiles_reference
from megatron.packed.attention.plans import build_attention_plan
from megatron.packed.attention.simulation import simulate_attention
from megatron.packed.errors import ConfigurationError
from tests.unit.attention.plan_cases import ALGORITHMS, CASES, Case, make_case

LIMITS = {torch.float64: 1e-12, torch.float32: 2e-6}
SCALE = 0.3


@dataclass(frozen=True)
class Heads:
    """Head counts and widths; `heads` and `kv_heads` are multiples of what CP needs."""

    heads: int
    kv_heads: int
    width: int
    value_width: int


def heads_of(name: str, cp_size: int) -> Heads:
    """Small counts that a head exchange over `cp_size` ranks can share out."""
    n = cp_size
    return {
        "mha": Heads(n, n, 8, 8),
        "gqa": Heads(4 * n, 2 * n, 8, 8),
        "mqa": Heads(2 * n, 1, 8, 8),
        "mla": Heads(n, n, 12, 8),
        "wide_value": Heads(2 * n, n, 8, 12),
    }[name]


HEADS = ("mha", "gqa", "mqa", "mla", "wide_value")
# (real lengths, multiple that every segment is padded to)
SEGMENTS = {
    "awkward": ([0, 1, 5, 0, 37, 3, 2, 90], 1),
    # Real boundaries 0 9 17 25 37 45 57 in padded 0 12 20 28 40 48 60: all-padding second chunks.
    "padded_second_chunks": ([9, 8, 8, 12, 8, 12], 4),
    "shorter_than_2_cp": ([1, 2, 3, 1, 1, 2], 8),
    "giant": ([301], 1),
    "long": ([260, 7, 141], 1),
    "a_rank_without_tokens": ([2], 64),
    "no_token": ([0], 16),
    "random": (
        [int(n) for n in torch.randint(0, 50, (9,), generator=torch.Generator().manual_seed(3))],
        1,
    ),
}
WINDOWS = (None, 128)


@dataclass(frozen=True)
class Inputs:
    """Whole-pack tensors `[T, heads, d]` fp64 and where they are real."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor
    valid: Tensor


def make_inputs(case: Case, heads: Heads, dtype: torch.dtype) -> Inputs:
    """Random numbers that `dtype` can represent."""
    generator = torch.Generator().manual_seed(7)
    shapes = [
        (heads.heads, heads.width),
        (heads.kv_heads, heads.width),
        (heads.kv_heads, heads.value_width),
        (heads.heads, heads.value_width),
    ]
    total = case.pack.total_tokens
    tensors = [
        torch.randn(total, *shape, generator=generator, dtype=torch.float64).to(dtype).double()
        for shape in shapes
    ]
    return Inputs(*tensors, valid=torch.from_numpy(case.pack.valid_mask))


def run_dense(case: Case, inputs: Inputs) -> list[Tensor]:
    """Output and the gradients of query, key and value, fp64."""
    leaves = [x.clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    out = tiles_reference.packed_attention(
        *leaves, case.pack.cu_seqlens, case.pack.cu_seqlens_padded, case.plans[0].mask, SCALE
    )
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs.grad)]


def run_plans(
    case: Case, inputs: Inputs, dtype: torch.dtype, *, garbage: float = float("nan")
) -> list[Tensor]:
    """The same from all ranks of the plans, in pack order, with garbage in the padding."""
    size = len(case.plans)
    index = [torch.from_numpy(case.partition.indices(rank)) for rank in range(size)]
    padding = ~inputs.valid
    tensors = [
        x.masked_fill(padding[:, None, None], garbage).to(dtype)
        for x in (inputs.query, inputs.key, inputs.value, inputs.grad)
    ]
    leaves = [[x[i].requires_grad_() for i in index] for x in tensors[:3]]
    outs = simulate_attention(*leaves, case.plans, softmax_scale=SCALE)
    flat = [x for per_rank in leaves for x in per_rank]
    grads = torch.autograd.grad(outs, flat, [tensors[3][i] for i in index])
    order = torch.cat(index)
    result = []
    for local in (outs, grads[:size], grads[size : 2 * size], grads[2 * size :]):
        whole = torch.cat([x.detach() for x in local])
        result.append(torch.empty_like(whole).index_copy_(0, order, whole))
    return result


def relative(a: Tensor, b: Tensor) -> float:
    """Relative L2; absolute where the truth is (nearly) zero, as dq of one-token segments is."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1.0))


def check(case: Case, heads: Heads) -> None:
    inputs = make_inputs(case, heads, torch.float32)
    wanted = run_dense(case, inputs)
    for dtype, limit in LIMITS.items():
        got = run_plans(case, inputs, dtype)
        for name, a, b in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True):
            assert a.dtype == dtype
            assert torch.count_nonzero(a[~inputs.valid]) == 0, name
            assert relative(a, b) <= limit, (name, dtype)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("name", "cp_size"), CASES)
def test_heads_and_windows(name, cp_size, heads, window):
    lengths, alignment = SEGMENTS["long"]
    case = make_case(name, cp_size, lengths, window=window, extra_alignment=alignment)
    check(case, heads_of(heads, cp_size))


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize(("name", "cp_size"), CASES)
def test_segments(name, cp_size, segments):
    lengths, alignment = SEGMENTS[segments]
    for window in (None, 6):
        case = make_case(name, cp_size, lengths, window=window, extra_alignment=alignment)
        check(case, heads_of("gqa", cp_size))


@pytest.mark.parametrize(("name", "cp_size"), CASES)
def test_full_mask(name, cp_size):
    case = make_case(name, cp_size, SEGMENTS["awkward"][0], mask="full")
    check(case, heads_of("gqa", cp_size))


@pytest.mark.parametrize(("name", "cp_size"), CASES)
def test_half_precision_is_within_twice_an_honest_run(name, cp_size):
    case = make_case(name, cp_size, SEGMENTS["long"][0])
    heads = heads_of("gqa", cp_size)
    inputs = make_inputs(case, heads, torch.bfloat16)
    wanted = run_dense(case, inputs)
    # Honest: one process, fp32 inside, results rounded once.
    single = Case(
        case.pack,
        case.partition,
        [build_attention_plan("local", case.pack.cu_seqlens, case.pack.cu_seqlens_padded)],
    )
    leaves = [x.bfloat16().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    out = packed_attention(*leaves, single.plans[0], softmax_scale=SCALE)
    honest = [out.detach(), *torch.autograd.grad(out, leaves, inputs.grad.bfloat16())]
    got = run_plans(case, inputs, torch.bfloat16)
    for a, h, b in zip(got, honest, wanted, strict=True):
        assert relative(a[inputs.valid], b[inputs.valid]) <= 2 * relative(
            h[inputs.valid], b[inputs.valid]
        )


@pytest.mark.parametrize("name", ["p2p", "striped", "dispatch", "all_gather"])
def test_sixteen_ranks(name):
    check(make_case(name, 16, [700, 3, 180, 33]), Heads(2, 1, 8, 8))


@pytest.mark.parametrize("name", [n for n, a in ALGORITHMS.items() if 4 in a.sizes])
def test_portable_kernel_agrees(name, monkeypatch):
    monkeypatch.setattr(executor, "_kernel_for", lambda *_: tiles_portable)
    monkeypatch.setattr(tiles_portable, "MAX_SCORES", 2000)  # several blocks a tile
    for window in (None, 20):
        case = make_case(name, 4, SEGMENTS["long"][0], window=window)
        check(case, heads_of("gqa", 4))


@pytest.mark.parametrize("name", [n for n, a in ALGORITHMS.items() if 4 in a.sizes])
def test_torch_kernel_agrees_where_the_extension_is_missing(name, monkeypatch):
    monkeypatch.setattr(tiles_cpu, "_native", lambda x: None)
    for window in (None, 20):
        case = make_case(name, 4, SEGMENTS["long"][0], window=window)
        check(case, heads_of("mla", 4))


@pytest.mark.parametrize("name", ["p2p", "striped", "dispatch"])
def test_the_same_bits_for_any_number_of_threads(name):
    case = make_case(name, 2, [500, 70, 3, 260], window=90 if name == "dispatch" else None)
    inputs = make_inputs(case, heads_of("gqa", 2), torch.float32)
    one = run_plans(case, inputs, torch.float32)
    torch.set_num_threads(3)
    for _ in range(3):
        three = run_plans(case, inputs, torch.float32)
        assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))


@pytest.mark.parametrize(("name", "cp_size"), CASES)
def test_the_same_bits_every_time_whatever_the_padding_holds(name, cp_size):
    case = make_case(name, cp_size, SEGMENTS["awkward"][0], extra_alignment=4)
    inputs = make_inputs(case, heads_of("mqa", cp_size), torch.float32)
    first = run_plans(case, inputs, torch.float32)
    for garbage in (0.0, float("inf")):
        for a, b in zip(
            first, run_plans(case, inputs, torch.float32, garbage=garbage), strict=True
        ):
            assert torch.equal(a, b)


@pytest.mark.parametrize(("name", "cp_size"), CASES)
def test_bytes_on_the_wire_are_those_of_the_plan(name, cp_size):
    case = make_case(name, cp_size, [60, 25, 14])
    heads = heads_of("mla", cp_size)
    widths = heads.heads, heads.kv_heads, heads.width, heads.value_width
    inputs = make_inputs(case, heads, torch.float32)
    index = [torch.from_numpy(case.partition.indices(rank)) for rank in range(cp_size)]
    network = InProcessNetwork(cp_size)
    whole = (inputs.query, inputs.key, inputs.value)
    simulate_attention(*([x[i].float() for i in index] for x in whole), case.plans, network=network)
    assert network.bytes_sent == [plan.bytes_sent(*widths, 4) for plan in case.plans]


def test_backward_fetches_again_and_returns_gradients():
    case = make_case("p2p", 3, [60, 25, 14], extra_alignment=6)
    inputs = make_inputs(case, Heads(4, 2, 12, 8), torch.float32)
    index = [torch.from_numpy(case.partition.indices(rank)) for rank in range(3)]
    leaves = [
        [x[i].float().requires_grad_() for i in index]
        for x in (inputs.query, inputs.key, inputs.value)
    ]
    network = InProcessNetwork(3)
    outs = simulate_attention(*leaves, case.plans, network=network)
    planned = [plan.kv_bytes_sent(2, 12, 8, 4) for plan in case.plans]
    assert network.bytes_sent == planned
    sum(out.sum() for out in outs).backward()
    # Backward fetches again, and sends the gradients of what was received back.
    returned = [plan.rows_received * 2 * (12 + 8) * 4 for plan in case.plans]
    assert network.bytes_sent == [2 * a + b for a, b in zip(planned, returned, strict=True)]


def test_views_of_one_projection_and_strided_channels_are_read_in_place():
    case = make_case("p2p", 1, SEGMENTS["awkward"][0])
    (plan,) = case.plans
    mixed = torch.randn(plan.rows, 4, 24)
    views = [x.requires_grad_() for x in mixed.split(8, dim=2)]
    plain = [x.detach().contiguous().requires_grad_() for x in views]
    odd = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in views]
    odd = [x.requires_grad_() for x in odd]
    results = []
    for leaves in (views, plain, odd):
        out = packed_attention(*leaves, plan)
        results.append([out, *torch.autograd.grad(out.sum(), leaves)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_saved_memory_is_linear_in_local_tokens():
    case = make_case("p2p", 4, [2048])
    q, k, v = (torch.randn(512, n, 8) for n in (4, 2, 2))
    network = InProcessNetwork(4)
    results = network.drive(
        [
            executor.forward_task(p, c, q, k, v, 1.0)
            for p, c in zip(case.plans, network.communicators(), strict=True)
        ]
    )
    out, saved = results[0]
    assert sum(x.numel() for x in saved) == 512 * (2 * 4 * 8 + 2 * 2 * 8 + 4)
    assert out.shape == (512, 4, 8)


class CountingCommunicator(InProcessCommunicator):
    """Remembers how many buffers of received keys exist at the same time."""

    def __init__(self, network, rank):
        super().__init__(network, rank)
        self.buffers, self.most = [], 0

    def exchange(self, sends, receives, form, label):
        pending = super().exchange(sends, receives, form, label)
        if label.channel == "keys" and receives:
            self.buffers.append(weakref.ref(pending.parts()[0].untyped_storage()))
            self.most = max(self.most, sum(x() is not None for x in self.buffers))
        return pending


def test_two_buffers_of_keys_at_most():
    case = make_case("p2p", 8, [512, 64])
    network = InProcessNetwork(8)
    ends = [CountingCommunicator(network, rank) for rank in range(8)]
    assert all(step.rows_received <= plan.rows for plan in case.plans for step in plan.steps)
    q, k, v = (torch.randn(case.plans[0].rows, n, 8) for n in (4, 2, 2))
    tasks = [
        executor.forward_task(plan, end, q, k, v, 1.0)
        for plan, end in zip(case.plans, ends, strict=True)
    ]
    results = network.drive(tasks)
    tasks = [
        executor.backward_task(plan, end, out, saved, 1.0, 2)
        for plan, end, (out, saved) in zip(case.plans, ends, results, strict=True)
    ]
    network.drive(tasks)
    assert [len(end.buffers) for end in ends] == [14] * 8
    assert [end.most for end in ends] == [2] * 8


def tensors(plan, heads=4, kv_heads=2, width=8, value_width=8):
    shapes = [(heads, width), (kv_heads, width), (kv_heads, value_width)]
    return [torch.zeros(plan.local_tokens, *shape) for shape in shapes]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "message"),
    [
        (6, 2, "6 query heads out over 4 ranks"),
        (12, 6, "neither share 6 key-value heads out over 4 ranks"),
    ],
)
def test_head_counts_that_cannot_be_shared_are_refused(heads, kv_heads, message):
    (plan, *_) = make_case("a2a", 4, [32]).plans
    with pytest.raises(ConfigurationError, match=message):
        packed_attention(*tensors(plan, heads, kv_heads), plan)


def test_what_does_not_fit_is_named():
    plan = make_case("p2p", 2, [32]).plans[0]
    q, k, v = tensors(plan)
    with pytest.raises(ValueError, match="rank 0 of 2, the group has rank 0 of 1"):
        packed_attention(q, k, v, plan)
    with pytest.raises(ValueError, match="rank 0 of 2, the group has rank 1 of 2"):
        packed_attention(q, k, v, plan, InProcessNetwork(2).communicators()[1])
    with pytest.raises(ValueError, match="the 16 local tokens of the plan"):
        packed_attention(q[:8], k[:8], v[:8], plan)
    with pytest.raises(ValueError, match="query width 8 differs from key width 4"):
        packed_attention(q, k[..., :4], v, plan)
    with pytest.raises(ValueError, match="4 query heads are no multiple of 3"):
        packed_attention(*tensors(plan, 4, 3), plan)
    with pytest.raises(ValueError, match="share one floating dtype"):
        packed_attention(q, k.double(), v, plan)
