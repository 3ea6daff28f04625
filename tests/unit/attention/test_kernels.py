"""Kernels against the dense fp64 reference: output and all three gradients."""

from __future__ import annotations

import pytest
import torch

from megatron.packed.accelerator import cpu_ops
from megatron.packed.attention.executor import packed_attention
from megatron.packed.attention.kernels import cpu, reference
from megatron.packed.attention.plans.local import plan_of_layout
from megatron.packed.attention.segments import SegmentLayout, packed_layout, row_layout

LIMITS = {torch.float64: 1e-12, torch.float32: 2e-6}
HEADS = {
    "mha": (4, 4, 16, 16),
    "gqa": (6, 2, 16, 16),
    "mqa": (4, 1, 8, 8),
    "mla": (2, 2, 24, 16),
    "wide_value": (2, 1, 8, 20),
}


class Planned:
    """The way of other devices, and of windows: a plan of one rank, run by the executor."""

    @staticmethod
    def segment_attention(query, key, value, layout, softmax_scale):
        streams = (x.flatten(0, 1) for x in (query, key, value))
        out = packed_attention(*streams, plan_of_layout(layout), softmax_scale=softmax_scale)
        return out.unflatten(0, query.shape[:2])


def cumulative(lengths: list[int]) -> tuple[int, ...]:
    return tuple([0, *torch.tensor(lengths).cumsum(0).tolist()])


def layout_of(lengths: list[int], alignment: int, tail: int = 0) -> SegmentLayout:
    padded = [-(-n // alignment) * alignment for n in lengths]
    total = sum(padded) + tail
    return packed_layout(cumulative(lengths), cumulative(padded), total)


def random_lengths(seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 12, (1,), generator=generator))
    return torch.randint(0, 40, (count,), generator=generator).tolist()


SEGMENT_SETS = {
    "one_token": layout_of([1], 1),
    "empty_and_short": layout_of([0, 1, 0, 2, 0], 4),
    "giant": layout_of([1300, 3], 8),
    "equal_runs": layout_of([5, 5, 5, 5, 2, 7, 7], 8),
    "long_tail": layout_of([3, 9], 1, tail=20),
    "no_segment": layout_of([0], 1, tail=6),
    "rows": row_layout(3, 17, None),
    "cut_rows": row_layout(3, 8, (0, 2, 8, 8, 11, 14, 16, 24)),
    "evenly_cut_rows": row_layout(3, 8, (0, 4, 8, 12, 16, 20, 24)),
    **{f"random{seed}": layout_of(random_lengths(seed), 1 + seed % 8) for seed in range(8)},
}


def inputs(layout, heads, dtype, seed=0, garbage=False):
    """Leaves in the layout megatron-core uses, slot before row; padding slots may hold NaN."""
    query_heads, kv_heads, width, value_width = heads
    generator = torch.Generator().manual_seed(seed)
    valid = torch.zeros(layout.rows * layout.row_length, dtype=torch.bool)
    for start, length in zip(layout.starts, layout.lengths, strict=True):
        valid[start : start + length] = True
    valid = valid.view(layout.rows, layout.row_length)
    shapes = [(query_heads, width), (kv_heads, width), (kv_heads, value_width)]
    shapes.append((query_heads, value_width))
    tensors = []
    for shape in shapes:
        x = torch.randn(
            layout.row_length, layout.rows, *shape, generator=generator, dtype=torch.float64
        ).transpose(0, 1)
        x[~valid] = float("nan") if garbage else 7.0
        tensors.append(x.to(dtype))
    return [x.requires_grad_() for x in tensors[:3]], tensors[3], valid


def run(kernel, leaves, grad, layout, scale=0.3):
    out = kernel.segment_attention(*leaves, layout, scale)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative L2; absolute where the truth is (nearly) zero, as dq of one-token segments is."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1.0))


@pytest.mark.parametrize("kernel", [cpu, Planned], ids=["cpu", "planned"])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("layout", SEGMENT_SETS.values(), ids=SEGMENT_SETS)
def test_matches_the_dense_reference(layout, heads, dtype, kernel, implementation):
    leaves, grad, valid = inputs(layout, heads, dtype)
    dense = [x.detach().double().requires_grad_() for x in leaves]
    wanted = run(reference, dense, grad, layout)
    for got, want in zip(run(kernel, leaves, grad, layout), wanted, strict=True):
        assert relative(got, want) <= LIMITS[dtype]
        assert got.dtype == dtype
        assert torch.count_nonzero(got[~valid]) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_half_precision_is_as_good_as_rounding_the_result(dtype, heads, implementation):
    layout = SEGMENT_SETS["random5"]
    leaves, grad, _ = inputs(layout, heads, dtype)
    dense = [x.detach().double().requires_grad_() for x in leaves]
    wanted = run(reference, dense, grad, layout)
    limit = 2 * torch.finfo(dtype).eps
    for got, want in zip(run(cpu, leaves, grad, layout), wanted, strict=True):
        assert got.dtype == dtype
        assert relative(got, want) <= limit


@pytest.mark.parametrize("kernel", [cpu, Planned], ids=["cpu", "planned"])
@pytest.mark.parametrize("name", ["long_tail", "empty_and_short", "random3", "no_segment"])
def test_garbage_in_padding_changes_nothing(name, kernel, implementation):
    layout = SEGMENT_SETS[name]
    clean, grad, valid = inputs(layout, HEADS["gqa"], torch.float32)
    dirty, dirty_grad, _ = inputs(layout, HEADS["gqa"], torch.float32, garbage=True)
    wanted = run(kernel, clean, grad, layout)
    for got, want in zip(run(kernel, dirty, dirty_grad, layout), wanted, strict=True):
        assert torch.equal(got, want)
        assert torch.count_nonzero(got[~valid]) == 0


def test_one_batched_call_equals_single_calls_bitwise(implementation):
    lengths = [33] * 6
    batched = layout_of(lengths, 40)
    leaves, grad, _ = inputs(batched, HEADS["mha"], torch.float32)
    together = run(cpu, leaves, grad, batched)
    for index in range(len(lengths)):
        part = slice(40 * index, 40 * index + 40)
        alone = [x.detach()[:, part].requires_grad_() for x in leaves]
        single = run(cpu, alone, grad[:, part], layout_of([33], 40))
        for got, want in zip(single, together, strict=True):
            assert torch.equal(got, want[:, part])


def test_views_into_one_projection_need_no_copy_and_agree(implementation):
    layout = SEGMENT_SETS["random2"]
    mixed = torch.randn(1, layout.row_length, 4, 48)
    views = [x.requires_grad_() for x in mixed.split(16, dim=3)]
    plain = [x.detach().contiguous().requires_grad_() for x in views]
    grad = torch.randn(1, layout.row_length, 4, 16)
    pairs = zip(run(cpu, views, grad, layout), run(cpu, plain, grad, layout), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_strided_channels_are_handled(implementation):
    layout = SEGMENT_SETS["random2"]
    leaves, grad, _ = inputs(layout, HEADS["mha"], torch.float32)
    odd = [x.detach().transpose(2, 3).contiguous().transpose(2, 3) for x in leaves]
    odd = [x.requires_grad_() for x in odd]
    expanded = torch.ones(()).expand_as(grad)
    wanted = run(cpu, leaves, torch.ones_like(grad), layout)
    for got, want in zip(run(cpu, odd, expanded, layout), wanted, strict=True):
        assert torch.equal(got, want)


def test_saved_memory_is_linear_in_tokens(implementation):
    layout = layout_of([2048], 1)
    leaves, _, _ = inputs(layout, (2, 2, 16, 16), torch.float32)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x):
        cpu.segment_attention(*leaves, layout, 0.25)
    per_token = sum(x.numel() for x in saved) / 2048
    assert per_token == 4 * 2 * 16 + 2  # q, k, v, out; one log-sum-exp per head


@pytest.mark.parametrize("lengths", [[300, 40, 1], [100], [1300]], ids=str)
@pytest.mark.parametrize("heads", [(6, 2, 16, 16), (1, 1, 64, 64)], ids=str)
def test_threads_do_not_change_a_bit(lengths, heads):
    """Ours; torch's backward rounds differently on one thread and on two."""
    if cpu_ops.load() is None:
        pytest.skip("the extension megatron.packed._cpu_ops is not built")
    layout = layout_of(lengths, 8)
    leaves, grad, _ = inputs(layout, heads, torch.float32)
    results = []
    for count in (1, 2):
        torch.set_num_threads(count)
        results.append(run(cpu, leaves, grad, layout))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_large_scores_do_not_overflow(implementation):
    layout = layout_of([200], 1)
    leaves, grad, _ = inputs(layout, HEADS["mha"], torch.float32)
    with torch.no_grad():
        leaves[0].mul_(100)
    dense = [x.detach().double().requires_grad_() for x in leaves]
    wanted = run(reference, dense, grad, layout)
    for got, want in zip(run(cpu, leaves, grad, layout), wanted, strict=True):
        assert torch.isfinite(got).all()
        assert relative(got, want) <= 1e-4  # scores of 1e3 carry 1e-4 of rounding themselves


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((6, 8), (4, 8), (4, 8)), "no multiple of 4"),
        (((4, 8), (4, 4), (4, 8)), "differs from key width"),
        (((4, 8), (2, 8), (4, 8)), "must agree"),
    ],
)
def test_shapes_that_do_not_fit_are_named(shapes, message):
    layout = layout_of([5], 1)
    with pytest.raises(ValueError, match=message):
        cpu.segment_attention(*(torch.zeros(1, 5, *s) for s in shapes), layout, 1.0)


def test_mixed_dtypes_and_foreign_layouts_are_named():
    q = torch.zeros(1, 5, 2, 4)
    with pytest.raises(ValueError, match="share one floating dtype"):
        cpu.segment_attention(q, q.double(), q, layout_of([5], 1), 1.0)
    with pytest.raises(ValueError, match="1 x 5 slots, the segment layout 1 x 6"):
        cpu.segment_attention(q, q, q, layout_of([6], 1), 1.0)
