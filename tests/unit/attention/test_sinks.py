"""Sinks: one more key of value 0, against softmax written out, and through every plan."""

from __future__ import annotations

import pytest
import torch

from megatron.packed.attention import packed_attention
from megatron.packed.attention.executor import backward_task, forward_task
from megatron.packed.attention.in_process import InProcessNetwork
from megatron.packed.attention.plans import PLAN_KINDS, build_attention_plan
from megatron.packed.packing.partition import make_partition

CU_SEQLENS = [0, 5, 16, 17, 29]
PADDED = [0, 8, 24, 32, 48]
HEADS, KV_HEADS, WIDTH, VALUE = 4, 2, 6, 3


def dense(q, k, v, sink, window=None):
    """Softmax over the visible keys of a segment and a sink, pair by pair: `[48, heads, dv]`."""
    rows = []
    for start, length in (
        (a, d - c) for a, c, d in zip(PADDED, CU_SEQLENS, CU_SEQLENS[1:], strict=False)
    ):
        for i in range(start, start + length):
            first = start if window is None else max(start, i - window)
            heads = []
            for head in range(HEADS):
                group = head * KV_HEADS // HEADS
                scores = (k[first : i + 1, group] @ q[i, head]) * WIDTH**-0.5
                weights = torch.cat((scores, sink[head : head + 1])).softmax(0)[:-1]
                heads.append(weights @ v[first : i + 1, group])
            rows.append((i, torch.stack(heads)))
    out = q.new_zeros(PADDED[-1], HEADS, VALUE)
    index = torch.tensor([i for i, _ in rows])
    return out.index_copy(0, index, torch.stack([row for _, row in rows]))


def inputs():
    shapes = (
        (PADDED[-1], HEADS, WIDTH),
        (PADDED[-1], KV_HEADS, WIDTH),
        (PADDED[-1], KV_HEADS, VALUE),
    )
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    sink = torch.randn(HEADS, dtype=torch.float64)
    return [x.requires_grad_() for x in (*tensors, sink)]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", [kind for kind in PLAN_KINDS if kind != "local"])
def test_every_plan_adds_the_sink_once(kind: str, window: int | None) -> None:
    q, k, v, sink = inputs()
    expected = dense(q, k, v, sink, window)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (q, k, v, sink), grad)
    size = 4 if kind == "a2a+p2p" else 2
    sizes = (2, 2) if kind == "a2a+p2p" else None
    plans = [
        build_attention_plan(
            kind,
            CU_SEQLENS,
            PADDED,
            cp_size=size,
            cp_rank=rank,
            window=window,
            hierarchical_sizes=sizes,
        )
        for rank in range(size)
    ]
    partition = make_partition(plans[0].partition, PADDED, size, cu_seqlens=CU_SEQLENS)
    index = [torch.from_numpy(partition.indices(rank)) for rank in range(size)]
    network = InProcessNetwork(size)
    ends = network.communicators()
    results = network.drive(
        [
            forward_task(plan, end, *(x[i].detach() for x in (q, k, v)), WIDTH**-0.5, sink.detach())
            for plan, end, i in zip(plans, ends, index, strict=True)
        ]
    )
    for (out, _), i in zip(results, index, strict=True):
        assert torch.allclose(out, expected[i], rtol=1e-12, atol=1e-12)
    # What padding gets as a gradient must not matter.
    padding = (expected == 0).all(dim=-1).all(dim=-1)
    dirty = grad.masked_fill(padding[:, None, None], float("nan"))
    grads = network.drive(
        [
            backward_task(plan, end, dirty[i], saved, WIDTH**-0.5, KV_HEADS, sink.detach())
            for plan, end, i, (_, saved) in zip(plans, ends, index, results, strict=True)
        ]
    )
    for part, whole in zip(range(3), wanted, strict=False):
        for got, i in zip(grads, index, strict=True):
            assert torch.allclose(got[part], whole[i], rtol=1e-11, atol=1e-12)
    total = sum(got[3] for got in grads)
    assert torch.allclose(total, wanted[3], rtol=1e-11, atol=1e-12)


def test_on_one_rank_through_autograd() -> None:
    q, k, v, sink = inputs()
    plan = build_attention_plan("p2p", CU_SEQLENS, PADDED)
    out = packed_attention(q, k, v, plan, sink=sink)
    expected = dense(q, k, v, sink)
    grad = torch.randn_like(out)
    for got, wanted in zip(
        (out, *torch.autograd.grad(out, (q, k, v, sink), grad)),
        (expected, *torch.autograd.grad(expected, (q, k, v, sink), grad)),
        strict=True,
    ):
        assert torch.allclose(got, wanted, rtol=1e-11, atol=1e-12)


def test_a_sink_of_minus_infinity_is_none() -> None:
    q, k, v, _ = inputs()
    plan = build_attention_plan("p2p", CU_SEQLENS, PADDED)
    without = packed_attention(q, k, v, plan)
    sink = torch.full((HEADS,), -torch.inf, dtype=torch.float64)
    assert torch.equal(packed_attention(q, k, v, plan, sink=sink), without)
