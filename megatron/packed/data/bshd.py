"""The unpacked batch: rows to tokens, labels, loss mask, positions and attention boundaries.

Exactly what megatron-core's `_get_ltor_masks_and_position_ids` says for `--reset-position-ids`,
`--reset-attention-mask` and `--eod-mask-loss`, with the S x S mask replaced by the boundaries of
its diagonal blocks. Real tokens are told from tail padding by position, never by value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

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
    """

    tokens: numpy.ndarray
    labels: numpy.ndarray
    loss_mask: numpy.ndarray
    position_ids: numpy.ndarray
    cu_seqlens: numpy.ndarray
    max_seqlen: int


def build_bshd(
    rows: numpy.ndarray,
    eod_id: int,
    *,
    lengths: Sequence[int] | numpy.ndarray | None = None,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
) -> BshdArrays:
    """Cut rows into inputs and labels and derive masks, positions and boundaries.

    Args:
        rows: int64 `[B, S + 1]`, raw ids.
        eod_id: id that ends a document.
        lengths: `[B]`, real ids of each row, of S + 1; None means all.
        reset_position_ids: restart positions at 0 after each EOD.
        reset_attention_mask: no attention across an EOD.
        eod_mask_loss: no loss where the *input* is EOD.

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
    )


@dataclass(frozen=True)
class BshdBatch:
    """A batch as tensors; shapes and dtypes as in BshdArrays.

    Attributes:
        real_tokens: input tokens that are no tail padding.
        sample_indices: the samples' places in the dataset, for error messages.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    real_tokens: int
    sample_indices: tuple[int, ...]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """The same batch on `device`."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """The same batch in page-locked memory."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, change: Any) -> Self:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return type(self)(
            **{
                name: change(value) if isinstance(value, torch.Tensor) else value
                for name, value in values.items()
            }
        )


@dataclass(frozen=True)
class BshdCollator:
    """Turns samples `{"text", "length"}` into a BshdBatch; runs in the data-loader workers.

    Attributes:
        eod_id: id that ends a document.
        reset_position_ids: see `build_bshd`.
        reset_attention_mask: see `build_bshd`.
        eod_mask_loss: see `build_bshd`.
    """

    eod_id: int
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    def __call__(self, samples: list[dict[str, Any]]) -> BshdBatch:
        """Collate.

        Args:
            samples: `text` int64 `[S + 1]`, `length` int, and `index` int where known.
        """
        lengths = numpy.array([sample["length"] for sample in samples], dtype=numpy.int64)
        arrays = build_bshd(
            numpy.stack([sample["text"] for sample in samples]),
            self.eod_id,
            lengths=lengths,
            reset_position_ids=self.reset_position_ids,
            reset_attention_mask=self.reset_attention_mask,
            eod_mask_loss=self.eod_mask_loss,
        )
        return BshdBatch(
            tokens=torch.from_numpy(arrays.tokens),
            labels=torch.from_numpy(arrays.labels),
            loss_mask=torch.from_numpy(arrays.loss_mask),
            position_ids=torch.from_numpy(arrays.position_ids),
            cu_seqlens=torch.from_numpy(arrays.cu_seqlens),
            max_seqlen=arrays.max_seqlen,
            real_tokens=int(numpy.minimum(lengths, arrays.tokens.shape[1]).sum()),
            sample_indices=tuple(int(sample["index"]) for sample in samples if "index" in sample),
        )
