from __future__ import annotations

import itertools

import numpy
import pytest
import torch
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

from megatron.packed.data.bshd import BshdCollator, build_bshd
from megatron.packed.errors import ConfigurationError

EOD = 7
ROWS = {
    "plain": [1, 2, EOD, 3, 4, 5, EOD, 6, 1],
    "no eod": [1, 2, 3, 4, 5, 6, 1, 2, 3],
    "eod first and last": [EOD, 2, 3, 4, 5, 6, 1, EOD, 3],
    "eods in a row": [1, EOD, EOD, EOD, 5, 6, 1, 2, EOD],
    "only eods": [EOD] * 9,
}
FLAGS = list(itertools.product([False, True], repeat=3))


def expanded_mask(cu_seqlens: numpy.ndarray, batch: int, seq_length: int) -> numpy.ndarray:
    """Which position may not see which, from block boundaries: bool `[B, S, S]`."""
    block = numpy.zeros(batch * seq_length, dtype=int)
    block[cu_seqlens[1:-1]] += 1
    block = numpy.cumsum(block).reshape(batch, seq_length)
    causal = numpy.tril(numpy.ones((seq_length, seq_length), dtype=bool))
    return ~((block[:, :, None] == block[:, None, :]) & causal)


@pytest.mark.parametrize("reset_position_ids, reset_attention_mask, eod_mask_loss", FLAGS)
def test_agrees_with_megatron_core(
    reset_position_ids: bool, reset_attention_mask: bool, eod_mask_loss: bool
):
    generator = numpy.random.RandomState(0)
    rows = numpy.array(
        [*ROWS.values(), *generator.randint(0, 9, size=(40, 9)).tolist()], dtype=numpy.int64
    )
    got = build_bshd(
        rows,
        EOD,
        reset_position_ids=reset_position_ids,
        reset_attention_mask=reset_attention_mask,
        eod_mask_loss=eod_mask_loss,
    )
    masks = expanded_mask(got.cu_seqlens, len(rows), rows.shape[1] - 1)
    assert got.cu_seqlens.dtype == numpy.int32
    assert got.max_seqlen == numpy.diff(got.cu_seqlens).max()
    for i, row in enumerate(rows):
        mask, loss_mask, position_ids = _get_ltor_masks_and_position_ids(
            torch.from_numpy(row[:-1]),
            EOD,
            reset_position_ids,
            reset_attention_mask,
            eod_mask_loss,
            True,
        )
        numpy.testing.assert_array_equal(masks[i], mask[0].numpy())
        numpy.testing.assert_array_equal(got.loss_mask[i], loss_mask.numpy())
        numpy.testing.assert_array_equal(got.position_ids[i], position_ids.numpy())
        numpy.testing.assert_array_equal(got.tokens[i], row[:-1])
        numpy.testing.assert_array_equal(got.labels[i], row[1:])


@pytest.mark.parametrize("length", range(10))
@pytest.mark.parametrize("pad", [0, EOD])
def test_tail_padding_goes_by_position(length: int, pad: int):
    row = numpy.array(ROWS["plain"])
    row[length:] = pad
    got = build_bshd(
        row[None], EOD, lengths=[length], reset_position_ids=True, reset_attention_mask=True
    )
    # The target of position j is token j + 1, which is real if j + 1 < length.
    numpy.testing.assert_array_equal(got.loss_mask[0], (numpy.arange(8) + 1 < length) * 1.0)
    ends = [i + 1 for i in (2, 6) if i < length]
    assert got.cu_seqlens.tolist() == [0, *ends, 8]


def test_pad_that_equals_eod_keeps_the_real_eods_loss():
    row = numpy.array([[1, 2, EOD, EOD, EOD]])
    got = build_bshd(row, EOD, lengths=[3])
    assert got.loss_mask.tolist() == [[1.0, 1.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    "rows, lengths",
    [
        (numpy.zeros(5, dtype=int), None),
        (numpy.zeros((2, 1), dtype=int), None),
        (numpy.zeros((2, 5), dtype=int), [5]),
        (numpy.zeros((2, 5), dtype=int), [5, 6]),
        (numpy.zeros((2, 5), dtype=int), [-1, 5]),
    ],
)
def test_bad_shapes(rows: numpy.ndarray, lengths: list[int] | None):
    with pytest.raises(ConfigurationError):
        build_bshd(rows, EOD, lengths=lengths)


def test_collator_makes_tensors():
    samples = [
        {"text": numpy.array(row), "length": length, "index": index}
        for row, length, index in ((ROWS["plain"], 9, 5), (ROWS["no eod"], 4, 6))
    ]
    batch = BshdCollator(EOD, reset_attention_mask=True)(samples)
    assert batch.tokens.dtype == batch.labels.dtype == batch.position_ids.dtype == torch.int64
    assert batch.loss_mask.dtype == torch.float32 and batch.cu_seqlens.dtype == torch.int32
    assert batch.cu_seqlens.tolist() == [0, 3, 7, 8, 16]
    assert (batch.max_seqlen, batch.real_tokens, batch.sample_indices) == (8, 12, (5, 6))
    moved = batch.to("cpu")
    assert torch.equal(moved.tokens, batch.tokens) and moved.max_seqlen == 8


def test_only_targets_count_where_some_are_named():
    rows = numpy.array([[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]])
    targets = numpy.array([[1, 0, 1, 1, 0], [0, 1, 1, 1, 1]])
    batch = build_bshd(rows, 99, lengths=[5, 3], targets=targets)
    # A label counts if the id it is, not the one before it, is a target and real.
    assert batch.loss_mask.tolist() == [[0, 1, 1, 0], [1, 1, 0, 0]]
    samples = [
        {"text": row, "length": length, "supervised": mask}
        for row, length, mask in zip(rows, [5, 3], targets, strict=True)
    ]
    collated = BshdCollator(99)(samples)
    assert collated.loss_mask.tolist() == batch.loss_mask.tolist()
    assert collated.supervised_tokens == 4
