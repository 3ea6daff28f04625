"""Numbered packs: the state of any place restarts the stream there, whatever was looked ahead."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megatron.packed.errors import DataError
from megatron.packed.packing import DocumentPacker, build_document_packer
from megatron.packed.packing.packers import STRATEGIES
from megatron.packed.packing.sequence import PackSequence

PACKERS = [name for name in STRATEGIES if name != "rows"]
LENGTHS = np.random.default_rng(3).integers(0, 60, size=90)


def packer(strategy: str, seed: int = 5) -> DocumentPacker:
    return build_document_packer(strategy, LENGTHS, 64, seed=seed, window=16, micro_batches=4)


def taken(sequence: PackSequence, count: int) -> list:
    packs = [next(sequence) for _ in range(count)]
    return [(each.number, each.pack.epoch, each.pack.pieces.tolist()) for each in packs]


@pytest.mark.parametrize("strategy", PACKERS)
def test_every_place_restarts_the_stream(strategy: str) -> None:
    """Over three epochs, with packs prepared ahead, through JSON, and without a state at all."""
    whole = taken(PackSequence(packer(strategy)), 140)
    assert whole[-1][1] >= 2, "the test shall cross ends of epochs"
    assert [number for number, _, _ in whole] == list(range(140))
    running = PackSequence(packer(strategy), snapshot_interval=8)
    taken(running, 20)  # prepared ahead
    for place in range(0, 120, 3):
        running.forget_before(place)
        state = json.loads(json.dumps(running.state_at(place)))
        again = PackSequence(packer(strategy), start=place, state=state, snapshot_interval=8)
        assert again.number == place
        assert taken(again, 20) == whole[place : place + 20]
        # Its own states are as good.
        second = json.loads(json.dumps(again.state_at(place + 10)))
        assert (
            taken(PackSequence(packer(strategy), start=place + 10, state=second), 5)
            == (whole[place + 10 : place + 15])
        )
        taken(running, 3)
    assert taken(PackSequence(packer(strategy), start=77), 5) == whole[77:82]


def test_snapshots_are_few() -> None:
    sequence = PackSequence(packer("windowed_best_fit"), snapshot_interval=8)
    for place in range(200):
        next(sequence)
        sequence.forget_before(place)
        assert len(sequence._snapshots) <= 2


def test_counters_go_on() -> None:
    first = PackSequence(packer("next_fit"))
    taken(first, 40)
    again = PackSequence(packer("next_fit"), start=30, state=first.state_at(30))
    taken(again, 10)
    assert again.packer.counters == first.packer.counters


@pytest.mark.parametrize("place", [-1, 7, 41])
def test_places_without_a_state(place: int) -> None:
    sequence = PackSequence(packer("next_fit"), snapshot_interval=8)
    taken(sequence, 40)
    sequence.forget_before(10)
    with pytest.raises(ValueError, match=rf"packs: {place} is outside \[8, 40\]"):
        sequence.state_at(place)


def test_a_state_of_something_else() -> None:
    state = PackSequence(packer("next_fit")).state_at(0)
    with pytest.raises(DataError, match="saved after 0 packs, but the run goes on after 3"):
        PackSequence(packer("next_fit"), start=3, state=state)
    with pytest.raises(DataError, match="saved with seed = 5, this run has 6"):
        PackSequence(packer("next_fit", seed=6), state=state)
    with pytest.raises(DataError, match="saved with strategy = next_fit"):
        PackSequence(packer("windowed_best_fit"), state=state)
    moved = build_document_packer("next_fit", LENGTHS[::-1].copy(), 64, seed=5)
    with pytest.raises(DataError, match="checksum of lengths and order"):
        PackSequence(moved, state=state)


@pytest.mark.parametrize("strategy", PACKERS)
def test_an_order_from_outside(strategy: str) -> None:
    """Documents twice, or not at all; epochs of different length."""

    def order(epoch: int) -> np.ndarray:
        return np.arange(3 + 4 * epoch, dtype=np.int64) % 5

    given = build_document_packer(strategy, [9, 0, 30, 64, 7, 50], 64, order=order, micro_batches=2)
    for epoch in range(4):
        documents = np.concatenate([pack.documents for pack in given.epoch_packs()])
        expected = order(epoch)
        assert sorted(documents.tolist()) == sorted(expected[expected != 1].tolist())
