"""Plans run where messages have no tags: one stream of group calls a rank, as NCCL has it."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from megatron.packed.attention import simulate_attention
from megatron.packed.attention.communicator import Form, Landing
from megatron.packed.attention.in_process import InProcessNetwork
from tests.unit.attention.plan_cases import ALGORITHMS, make_case


class Group(Landing):
    """A group call: all of its messages move at the same time."""

    def __init__(self, network, sends, receives, form, label):
        super().__init__(receives, form)
        self.network = network
        self.sends = deque(sends)
        peers = [peer for peer, _ in receives]
        self.receives = list(zip(peers, self.parts(), strict=True))
        self.label = label

    def __str__(self):
        return f"stuck in {self.label}"

    def is_done(self):
        self.network.progress()
        return not self.sends and not self.receives

    def wait(self):
        assert self.is_done()


class StreamCommunicator:
    in_order = True

    def __init__(self, network, rank):
        self.network, self.rank, self.size = network, rank, network.size

    def outgoing(self, rows, form, label):
        return form.empty(rows)

    def exchange(self, sends, receives, form, label):
        group = Group(self.network, [(p, x.clone()) for p, x in sends], receives, form, label)
        self.network.streams[self.rank].append(group)
        return group


class StreamNetwork(InProcessNetwork):
    """Group calls of a rank start one after the other; a message needs both of its ends started."""

    def __init__(self, size):
        super().__init__(size)
        self.streams = [deque() for _ in range(size)]

    def communicators(self):
        return [StreamCommunicator(self, rank) for rank in range(self.size)]

    def progress(self):
        moved = True
        while moved:
            moved = False
            for rank, stream in enumerate(self.streams):
                while stream and not stream[0].sends and not stream[0].receives:
                    stream.popleft()
                if stream:
                    moved |= self._deliver(rank, stream[0])

    def _deliver(self, rank, group):
        left = deque()
        for peer, tensor in group.sends:
            other = self.streams[peer][0] if self.streams[peer] else None
            slots = [r for r in other.receives if r[0] == rank] if other else []
            if not slots:
                left.append((peer, tensor))
                continue
            assert slots[0][1].shape == tensor.shape, f"{group.label} met {other.label}"
            assert group.label == other.label
            slots[0][1].copy_(tensor)
            other.receives = [r for r in other.receives if r is not slots[0]]
        moved = len(left) < len(group.sends)
        group.sends = left
        return moved


# Ranks that skip different exchanges: posting every fetch ahead would hang here.
UNEQUAL = [
    ("p2p-zigzag_pack", 7, [8, 20, 2, 1]),
    ("p2p-zigzag_pack", 10, [3, 8, 40]),
    ("p2p-zigzag_pack", 5, [20, 12, 8, 12, 3, 1, 2, 8, 12, 8, 1, 1, 8, 1, 1, 8, 40]),
]
NAMES = [name for name, a in ALGORITHMS.items() if 4 in a.sizes or 3 in a.sizes]


@given(
    st.sampled_from(NAMES),
    st.integers(2, 8),
    st.lists(st.integers(0, 30), min_size=1, max_size=12),
    st.sampled_from([None, 5]),
)
@example(*UNEQUAL[0], None)
@example(*UNEQUAL[1], None)
@example(*UNEQUAL[2], None)
def test_one_global_order_of_exchanges(name, cp_size, lengths, window):
    if name.startswith("a2a+p2p"):
        cp_size = 4
    case = make_case(name, cp_size, lengths, window=window)
    rows = case.plans[0].local_tokens
    results = []
    for network in (InProcessNetwork(cp_size), StreamNetwork(cp_size)):
        generator = torch.Generator().manual_seed(1)
        heads = cp_size, 1, 1
        leaves = [
            [torch.randn(rows, h, 4, generator=generator).requires_grad_() for _ in case.plans]
            for h in heads
        ]
        outs = simulate_attention(*leaves, case.plans, network=network)
        flat = [x for per_rank in leaves for x in per_rank]
        results.append([*outs, *torch.autograd.grad([o.sum() for o in outs], flat)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


FORM = Form(1, torch.float32, torch.device("cpu"))


def test_streams_do_hang_where_orders_differ():
    network = StreamNetwork(2)
    ends = network.communicators()

    def task(rank, labels):
        waits = [
            ends[rank].exchange([(1 - rank, torch.zeros(1, 1))], [(1 - rank, 1)], FORM, label)
            for label in labels
        ]
        yield from waits

    with pytest.raises(AssertionError):
        network.drive([task(0, "ab"), task(1, "ba")])
