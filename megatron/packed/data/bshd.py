"""The unpacked batch: rows to tokens, labels, loss mask, positions and attention boundaries.

Exactly what megatron-core's `_get_ltor_masks_and_position_ids` says for `--reset-position-ids`,
`--reset-attention-mask` and `--eod-mask-loss`, with the S x S mask replaced by the boundaries of
its diagonal blocks. Real tokens are told from tail padding by position, never by value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy
import torch

from megatron.packed.errors import ConfigurationError


@dataclass(frozen=True)
class BshdArrays:
    """A batch on the host.

    Attributes:
        tokens: int64 `[B, S]`.
        labels: int64 `[B, S]`, the next token of the row.
        loss_mask: float32 `[B, S]`, 1 where a label counts.
        position_ids: int64 `[B, S]`.
        cu_seqlens: int32 `[blocks + 1]`, boundaries of causal attention blocks in the flattened
            b-major `[B * S]` tokens; each row starts a block.
        max_seqlen: tokens of the longest block.
        valid_mask: bool `[B, S]`, tokens that are no tail padding.
        mtp_labels: int64 `[K, B, S]`, label of depth 1, 2, ...: the token 1 + k places on in the
            row, 0 past its end.
        mtp_loss_masks: float32 `[K, B, S]`, 1 where these count.
    """

    tokens: numpy.ndarray
    labels: numpy.ndarray
    loss_mask: numpy.ndarray
    position_ids: numpy.ndarray
    cu_seqlens: numpy.ndarray
    max_seqlen: int
    valid_mask: numpy.ndarray
    mtp_labels: numpy.ndarray
    mtp_loss_masks: numpy.ndarray


def build_bshd(
    rows: numpy.ndarray,
    eod_id: int,
    *,
    lengths: Sequence[int] | numpy.ndarray | None = None,
    targets: numpy.ndarray | None = None,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
    mtp_depths: int = 0,
) -> BshdArrays:
    """Cut rows into inputs and labels and derive masks, positions and boundaries.

    Args:
        rows: int64 `[B, S + 1]`, raw ids.
        eod_id: id that ends a document.
        lengths: `[B]`, real ids of each row, of S + 1; None means all.
        targets: `[B, S + 1]`, not 0 where an id may be a label that counts; None means all.
        reset_position_ids: restart positions at 0 after each EOD.
        reset_attention_mask: no attention across an EOD.
        eod_mask_loss: no loss where the *input* is EOD. No deeper prediction crosses such a
            position, either.
        mtp_depths: multi-token-prediction depths beyond the main loss.

    Returns:
        The batch. A label beyond a row's real ids is never supervised, and an EOD id in the tail
        padding is no EOD.

    Raises:
        ConfigurationError: if the shapes don't fit.

    Source: megatron/core/datasets/gpt_dataset.py, `_get_ltor_masks_and_position_ids`
    """
    if rows.ndim != 2 or rows.shape[1] < 2:
        raise ConfigurationError(f"rows must be [B, S + 1] with S >= 1, got {rows.shape}")
    batch, seq_length = rows.shape[0], rows.shape[1] - 1
    if lengths is None:
        lengths = numpy.full(batch, seq_length + 1)
    lengths = numpy.asarray(lengths, dtype=numpy.int64).reshape(-1, 1)
    if lengths.shape[0] != batch or (lengths < 0).any() or (lengths > seq_length + 1).any():
        raise ConfigurationError(
            f"row lengths must be {batch} numbers of [0, {seq_length + 1}], got {lengths.ravel()}"
        )
    tokens, labels = rows[:, :-1], rows[:, 1:]
    place = numpy.arange(seq_length, dtype=numpy.int64)
    is_eod = (tokens == eod_id) & (place < lengths)
    supervised = place + 1 < lengths
    if targets is not None:
        supervised = supervised & (targets[:, 1:] != 0)
    if eod_mask_loss:
        supervised &= ~is_eod

    starts = numpy.zeros((batch, seq_length), dtype=bool)
    starts[:, 0] = True
    starts[:, 1:] = is_eod[:, :-1]

    position_ids = numpy.broadcast_to(place, (batch, seq_length))
    if reset_position_ids:
        origin = numpy.maximum.accumulate(numpy.where(starts, place, 0), axis=1)
        position_ids = position_ids - origin
    if not reset_attention_mask:
        starts[:, 1:] = False
    cu_seqlens = numpy.append(numpy.flatnonzero(starts), batch * seq_length).astype(numpy.int32)
    return BshdArrays(
        tokens=numpy.ascontiguousarray(tokens),
        labels=numpy.ascontiguousarray(labels),
        loss_mask=supervised.astype(numpy.float32),
        position_ids=numpy.ascontiguousarray(position_ids),
        cu_seqlens=cu_seqlens,
        max_seqlen=int(numpy.diff(cu_seqlens).max(initial=0)),
        valid_mask=place < lengths,
        **_deeper(labels, supervised, mtp_depths),
    )


def _deeper(
    labels: numpy.ndarray, supervised: numpy.ndarray, depths: int
) -> dict[str, numpy.ndarray]:
    """Labels and masks of every depth, from those of the main loss."""
    deeper_labels = numpy.zeros((depths, *labels.shape), dtype=numpy.int64)
    masks = numpy.zeros((depths, *labels.shape), dtype=numpy.float32)
    so_far = supervised
    for depth in range(1, min(depths, labels.shape[1] - 1) + 1):
        # A chain of predictions: each of its inputs had to be one that may be predicted from.
        so_far = so_far[:, :-1] & supervised[:, depth:]
        deeper_labels[depth - 1, :, :-depth] = labels[:, depth:]
        masks[depth - 1, :, :-depth] = so_far
    return {"mtp_labels": deeper_labels, "mtp_loss_masks": masks}


@dataclass(frozen=True)
class BshdBatch:
    """A batch as tensors, all of them views of one buffer; shapes and dtypes as in BshdArrays.

    Attributes:
        max_seqlen: tokens of the longest block.
        num_blocks: causal attention blocks.
        real_tokens: input tokens that are no tail padding.
        supervised_tokens: positions whose label counts.
        mtp_targets: those of depth 1, 2, ...
        sum_squared_lengths: over attention blocks.
        sample_indices: the samples' places in the dataset, for error messages.
        buffer: uint8, the bytes that the tensors are views of.
        attention: the plans of this context-parallel rank, whose share of every row the tensors
            hold; None where rows are whole. Boundaries and counts are always those of whole rows.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    valid_mask: torch.Tensor
    mtp_labels: torch.Tensor
    mtp_loss_masks: torch.Tensor
    max_seqlen: int
    num_blocks: int
    real_tokens: int
    supervised_tokens: int
    mtp_targets: tuple[int, ...]
    sum_squared_lengths: int
    sample_indices: tuple[int, ...]
    buffer: torch.Tensor
    attention: Any = None

    @classmethod
    def from_arrays(
        cls,
        arrays: BshdArrays,
        real_tokens: int,
        sample_indices: Sequence[int],
        *,
        supervised_tokens: int | None = None,
        mtp_targets: Sequence[int] | None = None,
        attention: Any = None,
    ) -> Self:
        """Put a batch on the host into one buffer.

        Args:
            arrays: the batch.
            real_tokens: input tokens that are no tail padding.
            sample_indices: places in the dataset.
            supervised_tokens: positions whose label counts; by default those of the arrays.
            mtp_targets: those of each depth; by default those of the arrays.
            attention: plans, where the arrays are one rank's share.
        """
        if supervised_tokens is None:
            supervised_tokens = int(numpy.count_nonzero(arrays.loss_mask))
        if mtp_targets is None:
            mtp_targets = [int(numpy.count_nonzero(mask)) for mask in arrays.mtp_loss_masks]
        lengths = numpy.diff(arrays.cu_seqlens).astype(numpy.int64)
        rows, seq_length = arrays.tokens.shape
        header = _Header(
            rows=rows,
            seq_length=seq_length,
            num_blocks=len(lengths),
            num_indices=len(sample_indices),
            depths=len(arrays.mtp_labels),
            max_seqlen=arrays.max_seqlen,
            real_tokens=real_tokens,
            supervised_tokens=supervised_tokens,
            sum_squared_lengths=int((lengths * lengths).sum()),
        )
        # 64-bit arrays first, so that each starts at a multiple of its item size.
        parts = (
            numpy.array(header, dtype=numpy.int64),
            arrays.tokens,
            arrays.labels,
            arrays.position_ids,
            numpy.array([*mtp_targets, *sample_indices], dtype=numpy.int64),
            arrays.mtp_labels,
            arrays.mtp_loss_masks,
            arrays.loss_mask,
            arrays.cu_seqlens,
            arrays.valid_mask,
        )
        flat = [numpy.ascontiguousarray(part).reshape(-1).view(numpy.uint8) for part in parts]
        return cls.from_buffer(torch.from_numpy(numpy.concatenate(flat)), attention)

    @classmethod
    def from_buffer(cls, buffer: torch.Tensor, attention: Any = None) -> Self:
        """Rebuild a batch from its bytes, such as another rank received them.

        Args:
            buffer: uint8 on the host.
            attention: the plans that go with it.
        """
        words = 8 * len(_Header._fields)
        header = _Header(*buffer[:words].view(torch.int64).tolist())
        at = words + 3 * 8 * header.rows * header.seq_length
        held = buffer[at : at + 8 * (header.depths + header.num_indices)]
        return cls._over(buffer, header, tuple(held.view(torch.int64).tolist()), attention)

    @classmethod
    def _over(
        cls, buffer: torch.Tensor, header: _Header, numbers: tuple[int, ...], attention: Any
    ) -> Self:
        """Take views of a buffer on any device; `numbers` are its targets and sample indices."""
        shape = (header.rows, header.seq_length)
        size = header.rows * header.seq_length
        at = 8 * len(_Header._fields)

        def take(count: int, dtype: torch.dtype) -> torch.Tensor:
            nonlocal at
            begin, at = at, at + count * dtype.itemsize
            return buffer[begin:at].view(dtype)

        tokens, labels, position_ids = (take(size, torch.int64).view(shape) for _ in range(3))
        take(header.depths + header.num_indices, torch.int64)
        deeper = (header.depths, *shape)
        return cls(
            tokens=tokens,
            labels=labels,
            position_ids=position_ids,
            mtp_labels=take(header.depths * size, torch.int64).view(deeper),
            mtp_loss_masks=take(header.depths * size, torch.float32).view(deeper),
            loss_mask=take(size, torch.float32).view(shape),
            cu_seqlens=take(header.num_blocks + 1, torch.int32),
            valid_mask=take(size, torch.bool).view(shape),
            max_seqlen=header.max_seqlen,
            num_blocks=header.num_blocks,
            real_tokens=header.real_tokens,
            supervised_tokens=header.supervised_tokens,
            sum_squared_lengths=header.sum_squared_lengths,
            mtp_targets=numbers[: header.depths],
            sample_indices=numbers[header.depths :],
            buffer=buffer,
            attention=attention,
        )

    def _on(self, buffer: torch.Tensor) -> Self:
        rows, seq_length = self.tokens.shape
        header = _Header(
            rows=rows,
            seq_length=seq_length,
            num_blocks=self.num_blocks,
            num_indices=len(self.sample_indices),
            depths=len(self.mtp_targets),
            max_seqlen=self.max_seqlen,
            real_tokens=self.real_tokens,
            supervised_tokens=self.supervised_tokens,
            sum_squared_lengths=self.sum_squared_lengths,
        )
        numbers = self.mtp_targets + self.sample_indices
        return self._over(buffer, header, numbers, self.attention)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """The same batch on `device`: one copy."""
        return self._on(self.buffer.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """The same batch in page-locked memory."""
        return self._on(self.buffer.pin_memory())

    def __reduce__(self) -> tuple[Any, ...]:
        # From a data-loader worker one shared-memory tensor travels, not five.
        return type(self).from_buffer, (self.buffer, self.attention)


class _Header(NamedTuple):
    """Sizes and counts, as int64 words at the start of the buffer."""

    rows: int
    seq_length: int
    num_blocks: int
    num_indices: int
    depths: int
    max_seqlen: int
    real_tokens: int
    supervised_tokens: int
    sum_squared_lengths: int


@dataclass(frozen=True)
class BshdCollator:
    """Turns samples `{"text", "length"}` into a BshdBatch; runs in the data-loader workers.

    Attributes:
        eod_id: id that ends a document.
        reset_position_ids: see `build_bshd`.
        reset_attention_mask: see `build_bshd`.
        eod_mask_loss: see `build_bshd`.
        mtp_depths: see `build_bshd`.
    """

    eod_id: int
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    mtp_depths: int = 0

    def __call__(self, samples: list[dict[str, Any]]) -> BshdBatch:
        """Collate.

        Args:
            samples: `text` int64 `[S + 1]`, `length` int, `supervised` `[S + 1]` where only some
                ids are targets, and `index` int where known.
        """
        lengths = numpy.array([sample["length"] for sample in samples], dtype=numpy.int64)
        arrays = build_bshd(
            numpy.stack([sample["text"] for sample in samples]),
            self.eod_id,
            lengths=lengths,
            targets=numpy.stack([sample["supervised"] for sample in samples])
            if "supervised" in samples[0]
            else None,
            reset_position_ids=self.reset_position_ids,
            reset_attention_mask=self.reset_attention_mask,
            eod_mask_loss=self.eod_mask_loss,
            mtp_depths=self.mtp_depths,
        )
        return BshdBatch.from_arrays(
            arrays,
            real_tokens=int(numpy.minimum(lengths, arrays.tokens.shape[1]).sum()),
            sample_indices=[int(sample["index"]) for sample in samples if "index" in sample],
        )
