"""The in-process network finds what a real one would hang on."""

from __future__ import annotations

import pytest
import torch

from megatron.packed.attention.communicator import Form, Label
from megatron.packed.attention.head_exchange import head_slices, heads_to_tokens
from megatron.packed.attention.in_process import InProcessNetwork
from megatron.packed.attention.plans.plan import HeadExchange

LABEL = Label("keys", 3, "forward")


FORM = Form(1, torch.float32, torch.device("cpu"))


def row(value=0.0, rows=1):
    return torch.full((rows, 1), value)


def exchange(end, sends, receives, label=LABEL):
    pending = end.exchange(sends, receives, FORM, label)
    yield pending
    return [float(x) for part in pending.parts() for x in part.flatten()]


def test_messages_arrive():
    network = InProcessNetwork(2)
    ends = network.communicators()
    tasks = [exchange(ends[r], [(1 - r, row(float(r)))], [(1 - r, 1)]) for r in range(2)]
    assert network.drive(tasks) == [[1.0], [0.0]]
    assert network.bytes_sent == [4, 4]


def test_what_was_released_is_not_there_any_more():
    (end, _) = InProcessNetwork(2).communicators()
    pending = end.exchange([(0, row(5.0))], [(0, 1)], FORM, LABEL)
    pending.wait()
    (part,) = pending.parts()
    assert part.tolist() == [[5.0]]
    pending.release()
    assert part.isnan().all()


def test_a_circle_of_waits_is_an_error():
    network = InProcessNetwork(2)
    ends = network.communicators()
    tasks = [exchange(ends[r], [], [(1 - r, 1)]) for r in range(2)]
    with pytest.raises(RuntimeError, match="rank 0 waits for rank 1 in step 3 of the attention's"):
        network.drive(tasks)


def test_a_message_that_nobody_receives_is_an_error():
    network = InProcessNetwork(2)
    ends = network.communicators()
    tasks = [exchange(ends[0], [(1, row())], []), exchange(ends[1], [], [])]
    with pytest.raises(RuntimeError, match="rank 1 never received what rank 0 sent in step 3"):
        network.drive(tasks)


def test_a_message_of_another_size_is_an_error():
    network = InProcessNetwork(2)
    ends = network.communicators()
    tasks = [exchange(ends[0], [(1, row(rows=2))], []), exchange(ends[1], [], [(0, 3)])]
    with pytest.raises(RuntimeError, match=r"rank 1 expects \(3, 1\) .* from rank 0 in step 3"):
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


@pytest.mark.parametrize(("heads", "expected"), [(1, [15.0]), (2, [3.0, 12.0]), (4, [1, 2, 4, 8])])
def test_what_several_members_hold_of_one_head_is_summed(heads, expected):
    ends = (network := InProcessNetwork(4)).communicators()
    tasks = []
    for place in range(4):
        exchange = HeadExchange((0, 1, 2, 3), place, member_rows=2, order=None)
        held = torch.full((8, 1, 1), float(2**place))
        tasks.append(heads_to_tokens(exchange, ends[place], [held], [heads], LABEL))
    for (joined,) in network.drive(tasks):
        assert joined.flatten().tolist() == expected * 2
