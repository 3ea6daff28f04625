"""What a save takes of an optimizer: ranges as boxes, and what only updates change."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from megatron.packed.training.optimizer_shards import boxes
from megatron.packed.training.state import changed_by_updates_alone


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (2, 1, 3, 2)])
def test_boxes_hold_a_range_in_order(shape: tuple[int, ...]) -> None:
    places = torch.arange(torch.Size(shape).numel()).view(shape)
    for start, stop in itertools.combinations(range(places.numel() + 1), 2):
        found = []
        cut = boxes(shape, start, stop)
        for offsets, sizes in cut:
            slices = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
            found.extend(places[slices].flatten().tolist())
        assert found == list(range(start, stop))
        assert len(cut) <= max(2 * len(shape) - 1, 1)


def test_an_empty_range_needs_no_box() -> None:
    assert boxes((3, 4), 5, 5) == [] and boxes((3, 4), 6, 5) == [] and boxes((0, 4), 0, 0) == []


@pytest.mark.parametrize("overlap", [False, True])
def test_weights_that_a_forward_pass_writes_are_not_left_for_later(overlap: bool) -> None:
    model = torch.nn.BatchNorm1d(3)
    model.ddp_config = SimpleNamespace(overlap_param_gather=overlap)
    adam = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    adam.step()
    step = SimpleNamespace(model=[model], optimizer=SimpleNamespace(optimizer=adam))
    moments = [state[name] for state in adam.state.values() for name in ("exp_avg", "exp_avg_sq")]
    unchanging = changed_by_updates_alone(step)
    for tensor in (*model.parameters(), *moments):
        assert (tensor.untyped_storage().data_ptr() in unchanging) is not overlap
    assert all(buffer.untyped_storage().data_ptr() not in unchanging for buffer in model.buffers())
