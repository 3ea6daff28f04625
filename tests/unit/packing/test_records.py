"""Records of segments: they travel with the batch, whole, cut, chunked, and in pieces of rows."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from megatron.packed.packing import PackedBatch, PackPlan, build_pack_plan
from megatron.packed.packing.records import SegmentRecords
from megatron.packed.training.packs import segments_of_rows

LENGTHS = (3, 5, 2, 1)


def some_records() -> SegmentRecords:
    count = len(LENGTHS)
    return SegmentRecords(
        datasets=np.arange(count) % 2,
        documents=np.arange(count) + 10,
        offsets=np.arange(count) * 7,
        targets=np.arange(count) + 100,
        weights=np.arange(count) + 0.5,
    )


def fields(records: SegmentRecords) -> list[list[float]]:
    return [getattr(records, name).tolist() for name in SegmentRecords.__dataclass_fields__]


def batch(segments: SegmentRecords | None = None) -> PackedBatch:
    plan = PackPlan.from_documents(LENGTHS, 0, lookahead=[0, 1, 2, 0], alignment=4)
    return PackedBatch.from_plan(plan, np.arange(14), mtp_depths=1, segments=segments)


def test_records_and_targets_travel_in_the_buffer():
    made = batch(some_records())
    for same in (made, pickle.loads(pickle.dumps(made)), made.to("cpu")):
        params = same.packed_seq_params
        assert fields(params.segments) == fields(some_records())
        assert params.segment_targets.tolist() == [[2, 5, 2, 0], [1, 4, 2, 0]]
        assert params.token_weights.tolist() == some_records().weights.tolist()
        assert params.token_weights_host.tolist() == some_records().weights.tolist()
        assert torch.equal(params.document_ids, same.document_ids)


def test_without_records_every_segment_weighs_one():
    params = batch().packed_seq_params
    assert fields(params.segments) == fields(SegmentRecords.unknown(4))
    assert params.token_weights.tolist() == [1.0] * 4


def test_records_of_another_number_of_segments_are_refused():
    with pytest.raises(ValueError, match="3 records for 4 segments"):
        batch(some_records()[:3])


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weights_that_are_none_are_refused(weight):
    with pytest.raises(ValueError, match="weights"):
        SegmentRecords(*(np.zeros(1, np.int64) for _ in range(4)), weights=np.array([weight]))


def test_chunks_hold_the_records_of_their_segments():
    params = batch(some_records()).packed_seq_params
    chunks = params.chunk(2)
    assert [chunk.segments.documents.tolist() for chunk in chunks] == [[10, 11], [12, 13]]
    ids = [chunk.document_ids[0] for chunk in chunks]
    assert [x[x >= 0].unique().tolist() for x in ids] == [[0, 1], [0, 1]]
    assert chunks[1].token_weights.tolist() == [2.5, 3.5]
    assert chunks[1].segment_targets.tolist() == [[2, 0], [2, 0]]


def test_segments_of_rows_find_their_documents():
    # Row 0: the end of document 5 and the start of document 2. Row 1: more of document 2.
    rows = np.array([[1, 2, 9, 3, 4, 5], [5, 6, 9, 7, 8, 9]])
    samples = [
        dict(
            document_ids=[5, 2], document_lengths=[3, 3], document_offset=4, document_sizes=[7, 5]
        ),
        dict(
            document_ids=[2, 8], document_lengths=[3, 3], document_offset=2, document_sizes=[5, 3]
        ),
    ]
    samples = [
        {k: v if k == "document_offset" else np.array(v) for k, v in each.items()}
        for each in samples
    ]
    samples[1] |= {"dataset_id": 1, "document_weights": np.array([0.5, 2.0])}
    plan = build_pack_plan(rows[:, :-1], 9, -1, extra_token=rows[:, -1])
    records = segments_of_rows(plan, samples)
    assert records is not None
    assert records.documents.tolist() == [5, 2, 2, 8]
    assert records.offsets.tolist() == [4, 0, 2, 0]
    assert records.targets.tolist() == [6, 4, 4, 2]
    assert records.datasets.tolist() == [0, 0, 1, 1]
    assert records.weights.tolist() == [1.0, 1.0, 0.5, 2.0]


def test_samples_without_documents_have_no_records():
    plan = build_pack_plan(np.array([[1, 9, 2]]), 9, -1)
    assert segments_of_rows(plan, [{"text": np.array([1, 9, 2])}]) is None
