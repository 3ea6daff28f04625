"""Samples to packs: boundaries by index, whole documents, capacity, and batches as bytes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split

from megatron.packed.arguments import config_from_flags
from megatron.packed.data.bshd import BshdBatch, BshdCollator
from megatron.packed.data.row_dataset import RowDataset
from megatron.packed.data.tokenizers import NullTokenizer
from megatron.packed.errors import ConfigurationError, DataError
from megatron.packed.packing import Alignment, DocumentPack, PackedBatch
from megatron.packed.training.collation import PackingCollator, build_collator, pack_capacity
from megatron.packed.training.packs import DocumentCollator

from .flags import MINIMAL, config

S, EOD = 24, 5000


def rows_of(tmp_path: Path, documents: list[list[int]]) -> RowDataset:
    builder = IndexedDatasetBuilder(str(tmp_path / "c.bin"), dtype=np.uint16)
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(tmp_path / "c.idx"))
    settings = GPTDatasetConfig(
        random_seed=1,
        sequence_length=S,
        blend=(["x"], None),
        split="1,0,0",
        tokenizer=NullTokenizer(EOD),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        path_to_cache=str(tmp_path / "cache"),
    )
    low_level = IndexedDataset(str(tmp_path / "c"))
    indices = np.arange(len(documents), dtype=np.int32)
    return RowDataset(low_level, str(tmp_path / "c"), indices, None, Split.train, settings)


def documents(last: list[int], seed: int = 0) -> list[list[int]]:
    """Documents of 1 to 40 tokens that no other holds, closed by `last`."""
    ends = np.cumsum(np.random.default_rng(seed).integers(1, 40, size=60)).tolist()
    return [[*range(a, b), *last] for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def collate(rows: RowDataset, batch: int, **options: Any) -> list[PackedBatch]:
    collator = PackingCollator(EOD, options.pop("alignment", Alignment()), None, **options)
    samples = [rows[index] for index in range(len(rows) - len(rows) % batch)]
    return [collator(samples[at : at + batch]) for at in range(0, len(samples), batch)]


def same(one: PackedBatch, other: PackedBatch) -> bool:
    names = ("tokens", "labels", "loss_mask", "position_ids", "valid_mask", "document_ids")
    return one.packed_seq_params.digest() == other.packed_seq_params.digest() and all(
        torch.equal(getattr(one, name), getattr(other, name)) for name in names
    )


@pytest.mark.parametrize("batch", [1, 3])
def test_boundaries_by_index_are_those_by_eod(tmp_path: Path, batch: int) -> None:
    rows = rows_of(tmp_path, documents([EOD]))
    by_eod, by_index = collate(rows, batch), collate(rows, batch, by_index=True)
    assert len(by_eod) > 10
    for one, other in zip(by_eod, by_index, strict=True):
        assert one.statistics == other.statistics
        assert same(one, other)


@pytest.mark.parametrize("last", [[], [EOD, 4999, EOD]], ids=["without-eod", "eod-inside"])
def test_boundaries_by_index_need_no_eod(tmp_path: Path, last: list[int]) -> None:
    """Every document is a segment, and its own last token is all that has no target."""
    whole = documents(last)
    document_of = {token: text for text in whole for token in text[: len(text) - len(last)]}
    seen = 0
    for batch in collate(rows_of(tmp_path, whole), 2, by_index=True, alignment=Alignment(4)):
        params = batch.packed_seq_params
        lengths = np.diff(params.cu_seqlens_host).tolist()
        for start, length in zip(params.cu_seqlens_padded_host.tolist(), lengths, strict=False):
            here = slice(start, start + length)
            inputs = batch.tokens[0, here].tolist()
            if inputs[0] not in document_of:
                continue  # a row starts with the end of a document
            text = document_of[inputs[0]]
            at = text.index(inputs[0])
            assert text[at : at + length] == inputs
            targets = text[at + 1 : at + length + 1]
            assert batch.labels[0, here].tolist() == targets + [0] * (length - len(targets))
            assert batch.loss_mask[0, here].sum() == len(targets)
            seen += 1
    assert seen > 60


def test_document_lengths_of_a_row_add_up(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, documents([EOD]))
    for index in range(len(rows)):
        row = rows[index]
        assert row["document_lengths"].sum() == row["length"] <= S + 1
        ends = np.cumsum(row["document_lengths"])[:-1]
        assert (row["text"][ends - 1] == EOD).all()


def sample(*pieces: tuple[int, int, int, int]) -> dict[str, Any]:
    pack = DocumentPack(np.array(pieces, dtype=np.int64), epoch=0)
    return {"pack": pack, "text": pack.read(lambda d, o, n: 100 * d + np.arange(o, o + n))}


def test_packs_of_a_micro_batch_lie_end_to_end() -> None:
    packs = [sample((1, 0, 3, 0), (2, 4, 2, 1)), sample((3, 0, 4, 0))]
    batch = DocumentCollator(Alignment(), 16)(packs)
    assert batch.tokens[0, :9].tolist() == [100, 101, 102, 204, 205, 300, 301, 302, 303]
    assert batch.labels[0, :9].tolist() == [101, 102, 0, 205, 206, 301, 302, 303, 0]
    assert batch.loss_mask[0].tolist() == [1, 1, 0, 1, 1, 1, 1, 1, 0, *[0] * 7]
    assert batch.position_ids[0, :9].tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    assert batch.packed_seq_params.cu_seqlens_host.tolist() == [0, 3, 5, 9]
    assert batch.tokens.shape == (1, 16)


def test_a_pack_beyond_its_capacity_is_a_data_error() -> None:
    collator = DocumentCollator(Alignment(segment=4), 8)
    with pytest.raises(DataError, match="the pack needs 12 tokens and the capacity is 8; raise"):
        collator([sample((1, 0, 3, 0), (2, 0, 1, 0), (3, 0, 1, 0))])


def test_capacity() -> None:
    packed = "--use-packed-sequence "
    assert pack_capacity(config(packed), Alignment()) == 256
    assert pack_capacity(config(packed), Alignment(pack=96)) == 288
    assert pack_capacity(config(packed), Alignment(segment=4)) is None
    asked = config(packed + "--packed-sequence-capacity 320")
    assert pack_capacity(asked, Alignment(pack=64)) == 320
    assert pack_capacity(asked, Alignment(segment=4)) == 320
    with pytest.raises(ConfigurationError, match="320: must be a multiple of 96.*384 would do"):
        pack_capacity(asked, Alignment(pack=96))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", BshdCollator(EOD)),
        ("--use-packed-sequence", PackingCollator(EOD, Alignment(), 256)),
        (
            "--use-packed-sequence --document-boundaries index",
            PackingCollator(EOD, Alignment(), 256, by_index=True),
        ),
        (
            "--use-packed-sequence --packing-strategy next_fit",
            DocumentCollator(Alignment(), 256),
        ),
        (
            "--use-packed-sequence --packed-sequence-capacity 512",
            PackingCollator(EOD, Alignment(), 512),
        ),
    ],
)
def test_the_flags_choose_the_collator(flags: str, expected: Any) -> None:
    assert build_collator(config(flags), EOD) == expected


def test_rows_travel_as_one_buffer() -> None:
    text = np.array([[5, 6, EOD, 7, 8, 9], [1, EOD, 2, 3, 4, 4]])
    collator = BshdCollator(EOD, reset_position_ids=True, reset_attention_mask=True)
    samples = [{"text": text[i], "length": (6, 4)[i], "index": 40 + i} for i in range(2)]
    batch = collator(samples)
    assert batch.supervised_tokens == 5 + 3 and batch.real_tokens == 5 + 4
    assert batch.sum_squared_lengths == 9 + 4 + 4 + 9 and batch.num_blocks == 4
    for other in (
        pickle.loads(pickle.dumps(batch)),
        BshdBatch.from_buffer(batch.buffer.clone()),
        batch.to("cpu"),
    ):
        assert vars(other).keys() == vars(batch).keys()
        for name, value in vars(batch).items():
            got = getattr(other, name)
            if isinstance(value, torch.Tensor):
                assert torch.equal(got, value) and got.dtype == value.dtype, name
            else:
                assert got == value, name


def test_an_external_engine_gets_packs_whole():
    flags = MINIMAL + "--use-packed-sequence --attention-backend magi --context-parallel-size 2"
    settings = config_from_flags(flags, {"WORLD_SIZE": "2"})
    cut = build_collator(settings, EOD)
    whole = build_collator(settings, EOD, whole_packs=True)
    assert cut.helper is not None and whole.helper is None
    assert whole.alignment == cut.alignment and whole.capacity == cut.capacity
    weighted = config_from_flags(flags + " --loss-reduction document", {"WORLD_SIZE": "2"})
    hooked = build_collator(weighted, EOD, whole_packs=True).helper
    assert hooked.cp_size == 1 and len(hooked._hooks) == 1
