"""What a save copies at once, what beside training, and that nobody waits for ever."""

from __future__ import annotations

import threading

import pytest
import torch

from megatron.packed.checkpoint.snapshot import Snapshot, SnapshotBuffers, storage_of


def test_only_what_may_change_is_copied_at_once() -> None:
    weight, counter = torch.ones(4), torch.ones(4)
    snapshot = Snapshot(SnapshotBuffers(), frozenset({storage_of(weight)}))
    copies = [snapshot.add("weight", weight), snapshot.add("counter", counter)]
    weight += 1
    counter += 1
    snapshot.take()
    assert [copy.tolist() for copy in copies] == [[2.0] * 4, [1.0] * 4]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor(3.0, dtype=torch.float64),
        torch.arange(5, dtype=torch.bfloat16),
        torch.zeros(0, 3),
        torch.arange(12)[4:9],
        torch.nn.Parameter(torch.arange(4.0)),
    ],
    ids=["transposed", "scalar", "bfloat16", "empty", "view", "parameter"],
)
def test_late_copies_are_exact(tensor: torch.Tensor) -> None:
    snapshot = Snapshot(SnapshotBuffers(), frozenset({storage_of(tensor)}))
    copy = snapshot.add("it", tensor)
    copy.zero_()
    snapshot.take()
    assert copy.dtype == tensor.dtype and torch.equal(copy, tensor)
    assert copy.untyped_storage().size() == copy.numel() * copy.itemsize


def test_memory_of_copies_is_used_again() -> None:
    buffers = SnapshotBuffers()
    first = Snapshot(buffers).add("it", torch.ones(4))
    assert Snapshot(buffers).add("it", torch.zeros(4)).data_ptr() == first.data_ptr()
    assert Snapshot(buffers).add("it", torch.zeros(5)).shape == (5,)
    assert Snapshot(buffers).add("it", torch.zeros(5).half()).dtype == torch.half


def test_waiting_ends_when_copies_are_taken() -> None:
    weight = torch.ones(4)
    snapshot = Snapshot(SnapshotBuffers(), frozenset({storage_of(weight)}))
    copy = snapshot.add("weight", weight).zero_()
    timer = threading.Timer(0.2, snapshot.take)
    timer.start()
    snapshot.wait()
    assert copy.tolist() == [1.0] * 4
    timer.join()


def test_a_copy_that_fails_stops_no_training() -> None:
    weight = torch.ones(4)
    snapshot = Snapshot(SnapshotBuffers(), frozenset({storage_of(weight)}))
    snapshot.add("weight", weight)
    snapshot._later.append((torch.empty(2), weight))
    with pytest.raises(ValueError, match="broadcast"):
        snapshot.take()
    waiting = threading.Thread(target=snapshot.wait, daemon=True)
    waiting.start()
    waiting.join(10)
    assert not waiting.is_alive()
