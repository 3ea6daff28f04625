"""Tensors of a batch: views of one buffer, equal to the plan, unchanged by every journey."""

from __future__ import annotations

import dataclasses
import importlib.util
import pickle
import sys

import numpy as np
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch.utils.data import DataLoader

from megatron.packed.context_parallel import make_partition
from megatron.packed.packing import (
    Alignment,
    PackedBatch,
    build_pack_plan,
)
from megatron.packed.packing import batch as batch_module


def text_rows(seed=0, rows=3, width=40):
    rng = np.random.default_rng(seed)
    text = rng.integers(5, 99, (rows, width + 1))
    text[rng.random(text.shape) < 0.15] = 1
    text[rng.random(text.shape) < 0.05] = 0
    return text


def make_plan(text, **options):
    return build_pack_plan(text[:, :-1], 1, 0, extra_token=text[:, -1], **options)


def assert_equals_plan(batch, plan, text, view):
    assert batch.tokens.shape == (1, view.num_tokens)
    assert batch.tokens[0].tolist() == view.gather_tokens(text).tolist()
    assert batch.labels[0].tolist() == view.gather_labels(text).tolist()
    assert batch.loss_mask.dtype == torch.float32
    assert batch.loss_mask[0].bool().tolist() == view.loss_mask().tolist()
    assert batch.position_ids[0].tolist() == view.position_ids.tolist()
    assert batch.document_ids[0].tolist() == view.document_ids.tolist()
    assert batch.valid_mask[0].tolist() == view.valid_mask.tolist()
    for depth, (labels, mask) in enumerate(
        zip(batch.mtp_labels, batch.mtp_loss_masks, strict=True), start=1
    ):
        assert labels[0].tolist() == view.gather_labels(text, depth).tolist()
        assert mask[0].bool().tolist() == view.loss_mask(depth).tolist()
    params = batch.packed_seq_params
    assert params.cu_seqlens_q.tolist() == plan.cu_seqlens.tolist()
    assert params.cu_seqlens_q_padded.tolist() == plan.cu_seqlens_padded.tolist()
    assert params.cu_seqlens_q.dtype == torch.int32 and params.cu_seqlens_q.dim() == 1
    assert params.cu_seqlens_host.tolist() == plan.cu_seqlens.tolist()
    assert params.max_seqlen_q == plan.max_seqlen_padded and type(params.max_seqlen_q) is int
    assert params.max_seqlen == plan.max_seqlen
    assert params.valid_total_num_tokens == plan.lengths.sum()
    assert batch.statistics == plan.statistics


@pytest.mark.parametrize("depths", [0, 1, 4])
@pytest.mark.parametrize("kind", [None, "zigzag", "striped", "dispatch", "contiguous"])
def test_batch_equals_plan(depths, kind):
    text = text_rows()
    alignment = Alignment.for_layout(partition=kind or "contiguous", cp_size=2)
    plan = make_plan(text, alignment=alignment)
    if kind is None:
        batch = PackedBatch.from_plan(plan, torch.from_numpy(text), mtp_depths=depths)
        assert_equals_plan(batch, plan, text, plan.full)
        return
    part = make_partition(kind, plan.cu_seqlens_padded, 2, cu_seqlens=plan.cu_seqlens)
    digests = set()
    for rank in range(2):
        # Rows without their extra token: the plan supplies it.
        batch = PackedBatch.from_plan(
            plan, text[:, :-1], mtp_depths=depths, partition=part, rank=rank
        )
        assert_equals_plan(batch, plan, text, plan.local(part, rank))
        digests.add(batch.packed_seq_params.digest())
    assert len(digests) == 1


def test_same_object_when_nothing_is_padded():
    text = text_rows()
    params = PackedBatch.from_plan(make_plan(text), text).packed_seq_params
    assert params.cu_seqlens_q is params.cu_seqlens_q_padded and not params.pad_between_seqs
    plan = make_plan(text, alignment=8)
    params = PackedBatch.from_plan(plan, text).packed_seq_params
    assert params.cu_seqlens_q is not params.cu_seqlens_q_padded and params.pad_between_seqs
    assert isinstance(params, PackedSeqParams)


def test_unknown_fields_of_a_newer_base_class(monkeypatch):
    @dataclasses.dataclass
    class Newer(PackedSeqParams):
        total_tokens: int | None = None
        seq_idx: torch.Tensor | None = None
        pad_between_seqs: bool | None = None

    monkeypatch.setattr("megatron.core.packed_seq_params.PackedSeqParams", Newer)
    spec = importlib.util.spec_from_file_location("batch_on_a_newer_base", batch_module.__file__)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)

    text = text_rows()
    for multiple in (1, 8):
        plan = make_plan(text, alignment=multiple)
        params = module.PackedBatch.from_plan(plan, text).to("cpu").packed_seq_params
        assert isinstance(params, Newer)
        assert params.pad_between_seqs is (multiple != 1)
        assert params.chunk(2)[1].cu_seqlens_q[0] == 0
        assert params.total_tokens is None and params.chunk_total_tokens == plan.total_tokens


def test_journeys_change_nothing():
    text = text_rows(1)
    plan = make_plan(text, alignment=4)
    batch = PackedBatch.from_plan(plan, text, mtp_depths=2)
    for moved in (
        batch.to("cpu"),
        pickle.loads(pickle.dumps(batch)),
        PackedBatch.from_buffer(torch.cat([batch.buffer, torch.zeros(999, dtype=torch.uint8)])),
    ):
        assert_equals_plan(moved, plan, text, plan.full)
        assert moved.packed_seq_params.digest() == batch.packed_seq_params.digest()
    meta = batch.to("meta")
    assert meta.tokens.device.type == "meta"
    assert meta.packed_seq_params.cu_seqlens_host.tolist() == plan.cu_seqlens.tolist()
    with pytest.raises(ValueError, match="no packed batch"):
        PackedBatch.from_buffer(torch.zeros(4096, dtype=torch.uint8))
    with pytest.raises(ValueError, match="the batch needs"):
        PackedBatch.from_buffer(batch.buffer[:-64])


class Plans(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        text = text_rows(index)
        return PackedBatch.from_plan(make_plan(text), text)


def test_through_data_loader_workers():
    loader = DataLoader(Plans(), batch_size=None, num_workers=1)
    for index, batch in enumerate(loader):
        text = text_rows(index)
        plan = make_plan(text)
        assert_equals_plan(batch, plan, text, plan.full)


def test_chunks_of_parameters_and_of_plans():
    text = text_rows(2)
    plan = make_plan(text, alignment=4)
    whole = PackedBatch.from_plan(plan, text)
    params = whole.packed_seq_params
    chunks = params.chunk(3)
    begin = segments = 0
    for index, (chunk, part) in enumerate(zip(chunks, plan.chunk(3), strict=True)):
        end = begin + chunk.chunk_total_tokens
        # This chunk's fields.
        assert chunk.cu_seqlens_q.tolist() == part.cu_seqlens.tolist()
        assert chunk.cu_seqlens_q_padded.tolist() == part.cu_seqlens_padded.tolist()
        assert chunk.cu_seqlens_q_padded[-1] == chunk.chunk_total_tokens == part.total_tokens
        assert chunk.chunk_num_valid_tokens == part.lengths.sum()
        assert chunk.max_seqlen == part.max_seqlen
        assert chunk.position_ids.tolist() == whole.position_ids[:, begin:end].tolist()
        assert part.gather_tokens(text).tolist() == whole.tokens[0, begin:end].tolist()
        assert part.gather_labels(text).tolist() == whole.labels[0, begin:end].tolist()
        assert (chunk.chunk_index, chunk.num_chunks) == (index, 3)
        # Whole-pack fields.
        assert chunk.valid_total_num_tokens == plan.lengths.sum()
        assert chunk.valid_tokens_per_row.tolist() == plan.valid_tokens_per_row.tolist()
        begin, segments = end, segments + part.num_segments
        made = PackedBatch.from_plan(part, text, chunk_index=index, num_chunks=3)
        assert made.packed_seq_params.digest() == chunk.digest()
    assert begin == plan.total_tokens and segments == plan.num_segments
    with pytest.raises(ValueError, match="a chunk already"):
        chunks[0].chunk(1)
    with pytest.raises(ValueError, match="chunks of whole segments"):
        params.chunk(plan.num_segments + 1)
    part = make_partition("contiguous", plan.cu_seqlens_padded, 2)
    cut = PackedBatch.from_plan(plan, text, partition=part).packed_seq_params
    with pytest.raises(ValueError, match="PackPlan.chunk"):
        cut.chunk(2)


def test_chunk_loss_is_normalised_by_the_whole_pack():
    # Sums over chunks divided by the whole-pack count equal the unchunked mean.
    text = text_rows(3)
    plan = make_plan(text)
    batch = PackedBatch.from_plan(plan, text)
    value = batch.tokens.double()
    mean = value[batch.valid_mask].sum() / batch.packed_seq_params.valid_total_num_tokens
    begin, total = 0, 0.0
    for chunk in batch.packed_seq_params.chunk(4):
        tokens = value[:, begin : begin + chunk.chunk_total_tokens]
        total += tokens[chunk.valid_local_token_mask].sum() / chunk.valid_total_num_tokens
        begin += chunk.chunk_total_tokens
    assert float(total) == pytest.approx(float(mean), rel=1e-12)
