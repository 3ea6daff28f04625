"""Plans on real gloo ranks: the same bits as in one process, and an end when a peer is lost."""

from __future__ import annotations

import os
import socket
import sys
import time
from contextlib import nullcontext, suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron.packed.attention import ProcessGroupCommunicator, packed_attention
from megatron.packed.attention.simulation import simulate_attention
from megatron.packed.errors import TrainingError
from tests.distributed.pool import RankDiedError
from tests.unit.attention.plan_cases import ALGORITHMS, make_case

LENGTHS = [90, 1, 0, 5, 37, 3, 210, 64]
CASES = [(name, n) for name, a in ALGORITHMS.items() for n in (2, 4) if n in a.sizes]


def _inputs(case, dtype):
    generator = torch.Generator().manual_seed(11)
    shapes = (8, 12), (4, 12), (4, 8), (8, 8)
    whole = [
        torch.randn(case.pack.total_tokens, *shape, generator=generator).to(dtype)
        for shape in shapes
    ]
    index = [torch.from_numpy(case.partition.indices(rank)) for rank in range(len(case.plans))]
    return [[x[i] for i in index] for x in whole]


def _attend(case, dtype, layers=1, group=None):
    """Forward and backward of this rank; with layers, one call after another."""
    rank = dist.get_rank()
    q, k, v, grad = (x[rank] for x in _inputs(case, dtype))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    group = group or dist.group.WORLD
    outs = [packed_attention(*leaves, case.plans[rank], group) for _ in range(layers)]
    grads = torch.autograd.grad(outs, leaves, [grad] * layers)
    return [x.detach() for x in (outs[-1], *grads)]


def _attend_both_ways(case, dtype):
    """Through shared memory, as ranks of one host do, and through the group."""
    through_group = _attend(case, dtype, group=ProcessGroupCommunicator(dist.group.WORLD))
    return _attend(case, dtype), through_group


@pytest.mark.parametrize(("name", "cp_size"), CASES)
def test_ranks_get_the_bits_of_one_process(worker_pool, name, cp_size):
    for dtype, window in ((torch.float32, None), (torch.bfloat16, 50)):
        case = make_case(name, cp_size, LENGTHS, window=window)
        q, k, v, grad = _inputs(case, dtype)
        leaves = [x.requires_grad_() for x in (*q, *k, *v)]
        outs = simulate_attention(q, k, v, case.plans)
        grads = torch.autograd.grad(outs, leaves, grad)
        results = worker_pool(cp_size).run(_attend_both_ways, case, dtype)
        for rank, ways in enumerate(results):
            wanted = [outs[rank], *grads[rank::cp_size]]
            for got in ways:
                assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("name", ["p2p", "dispatch"])
def test_layers_do_not_mix_their_messages(worker_pool, name):
    case = make_case(name, 4, LENGTHS)
    once = worker_pool(4).run(_attend, case, torch.float64)
    thrice = worker_pool(4).run(_attend, case, torch.float64, layers=3)
    for a, b in zip(once, thrice, strict=True):
        assert torch.equal(a[0], b[0])
        torch.testing.assert_close(3 * a[1], b[1], rtol=1e-13, atol=1e-13)


def _attend_in_order(case):
    """As NCCL would: messages matched by order alone, in batches."""
    rank = dist.get_rank()
    communicator = ProcessGroupCommunicator(dist.group.WORLD)
    communicator.in_order = True
    q, k, v, grad = (x[rank] for x in _inputs(case, torch.float32))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = packed_attention(*leaves, case.plans[rank], communicator)
    return [x.detach() for x in (out, *torch.autograd.grad(out, leaves, grad))]


@pytest.mark.parametrize(("name", "cp_size"), [(n, c) for n, c in CASES if c == 4])
def test_messages_can_be_matched_by_order_alone(worker_pool, name, cp_size):
    # Many short segments: ranks take part in different exchanges.
    case = make_case(name, cp_size, [3, 50, 2, 9, 31, 4, 4, 80, 1, 12, 40])
    tagged = worker_pool(cp_size).run(_attend, case, torch.float32)
    ordered = worker_pool(cp_size).run(_attend_in_order, case)
    for a, b in zip(tagged, ordered, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_ranks_may_skip_different_exchanges(worker_pool):
    # From test_streams.py: without tags, or one order for all, ranks would hear the wrong message.
    case = make_case("p2p-zigzag_pack", 5, [20, 12, 8, 12, 3, 1, 2, 8, 12, 8, 1, 1, 8, 1, 1, 8, 40])
    tagged = worker_pool(5).run(_attend, case, torch.float32)
    ordered = worker_pool(5).run(_attend_in_order, case)
    for a, b in zip(tagged, ordered, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _die(after):
    """End this process at once. A child holds on to the pool's pipe for `after` seconds, so that
    the pool leaves the other ranks alone for that long."""
    if os.fork() == 0:
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # no socket
                connection = socket.socket(fileno=int(name))
                if connection.family == socket.AF_UNIX:
                    connection.detach()
        time.sleep(after)
        os._exit(0)
    os._exit(3)


def _lose_a_peer(case, how, folder):
    """Rank 1 dies or falls silent before the attention; what rank 0 says of it, and how soon."""
    rank = dist.get_rank()
    q, k, v, _ = (x[rank] for x in _inputs(case, torch.float32))
    group = dist.new_group(timeout=timedelta(seconds=1.0))
    if rank == 1:
        if how == "dies":
            _die(after=2.0)
        time.sleep(2.0)
        return
    started = time.monotonic()
    with pytest.raises(TrainingError) as caught:
        packed_attention(q, k, v, case.plans[rank], group)
    (folder / "seconds").write_text(str(time.monotonic() - started))
    (folder / "message").write_text(str(caught.value))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("how", ["dies", "is silent"])
def test_a_lost_peer_is_named_within_the_timeout(worker_pool, tmp_path, how):
    case = make_case("p2p", 2, [64])
    expected = pytest.raises(RankDiedError, match="code 3") if how == "dies" else nullcontext()
    with expected:
        worker_pool(2).run(_lose_a_peer, case, how, tmp_path)
    message = (tmp_path / "message").read_text()
    assert "context-parallel rank 0" in message
    assert "rank 1 (global rank 1) in step 1 of the attention's forward pass (keys)" in message
    assert "\n" not in message
    assert float((tmp_path / "seconds").read_text()) < 2.0
