"""The in-process network finds what a real one would hang on."""

from __future__ import annotations

import pytest
import torch

from megatron.packed.attention.communicator import InProcessNetwork, Label
from megatron.packed.attention.head_exchange import head_slices, sum_replicas

LABEL = Label("keys", 3, "forward")


def exchange(end, sends, receives, label=LABEL):
    yield end.exchange(sends, receives, label)
    return [float(x[0]) for _, x in receives]


def test_messages_arrive():
    network = InProcessNetwork(2)
    ends = network.communicators()
    buffers = [torch.zeros(1), torch.zeros(1)]
    tasks = [
        exchange(ends[r], [(1 - r, torch.full((1,), float(r)))], [(1 - r, buffers[r])])
        for r in range(2)
    ]
    assert network.drive(tasks) == [[1.0], [0.0]]
    assert network.bytes_sent == [4, 4]


def test_a_circle_of_waits_is_an_error():
    network = InProcessNetwork(2)
    ends = network.communicators()
    tasks = [exchange(ends[r], [], [(1 - r, torch.zeros(1))]) for r in range(2)]
    with pytest.raises(RuntimeError, match="rank 0 waits for rank 1 in step 3 of the attention's"):
        network.drive(tasks)


def test_a_message_that_nobody_receives_is_an_error():
    network = InProcessNetwork(2)
    ends = network.communicators()
    tasks = [exchange(ends[0], [(1, torch.zeros(1))], []), exchange(ends[1], [], [])]
    with pytest.raises(RuntimeError, match="rank 1 never received what rank 0 sent in step 3"):
        network.drive(tasks)


def test_a_message_of_another_size_is_an_error():
    network = InProcessNetwork(2)
    ends = network.communicators()
    tasks = [
        exchange(ends[0], [(1, torch.zeros(2))], []),
        exchange(ends[1], [], [(0, torch.zeros(3))]),
    ]
    with pytest.raises(RuntimeError, match=r"rank 1 expects \(3,\) .* from rank 0 in step 3"):
        network.drive(tasks)


@pytest.mark.parametrize(
    ("heads", "size", "expected"),
    [
        (4, 2, [(0, 2), (2, 4)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (1, 3, [(0, 1), (0, 1), (0, 1)]),
    ],
)
def test_neighbours_hold_the_same_key_value_head(heads, size, expected):
    assert [(s.start, s.stop) for s in head_slices(heads, size)] == expected


def test_replicas_are_summed():
    parts = [torch.full((1, 1, 1), float(2**i)) for i in range(4)]
    assert sum_replicas(parts, 2).flatten().tolist() == [3.0, 12.0]
    assert sum_replicas(parts, 4).flatten().tolist() == [1.0, 2.0, 4.0, 8.0]
