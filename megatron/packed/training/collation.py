"""From samples to the batches that loaders hand over: packs, or rows, cut to this rank's share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from megatron.packed.arguments import Config
from megatron.packed.context_parallel.context_parallel_helper import (
    AnyHelper,
    ContextParallelHelper,
    build_context_parallel_helper,
    helper_settings,
)
from megatron.packed.data.bshd import BshdBatch, BshdCollator
from megatron.packed.errors import ConfigurationError, DataError
from megatron.packed.loss.document import update_packed_doc_level_params
from megatron.packed.packing import (
    Alignment,
    PackedBatch,
    boundaries_from_document_index,
    build_pack_plan,
)
from megatron.packed.training.packs import (
    DocumentCollator,
    pack_share,
    segments_of_rows,
)

# No token has this id: rows say by position what is padding.
_NO_PAD_ID = -1


@dataclass(frozen=True)
class PackingCollator:
    """Turns the rows of a micro-batch into one pack; runs in the data-loader workers.

    Attributes:
        eod_id: id that ends a document.
        alignment: multiples that the parallel layout needs.
        capacity: tokens every pack is padded to, so that pipeline stages know its shape.
        by_index: documents end where the corpus's index says, whatever the tokens are.
        helper: cuts packs over context-parallel ranks; None with one and no hooks.
        mtp_depths: multi-token-prediction depths beyond the main loss.
    """

    eod_id: int
    alignment: Alignment
    capacity: int | None
    by_index: bool = False
    helper: AnyHelper | None = None
    mtp_depths: int = 0

    def __call__(self, samples: list[dict[str, Any]]) -> PackedBatch:
        """Pack samples `{"text": int64 [S + 1], "length": int}`.

        By index, a sample's `document_lengths` say where its documents end.

        Raises:
            DataError: when padding every segment takes more than the capacity.
        """
        rows = np.stack([sample["text"] for sample in samples])
        boundaries = None
        if self.by_index:
            boundaries = boundaries_from_document_index(
                [sample["document_lengths"] for sample in samples], rows.shape[1] - 1
            )
        try:
            plan = build_pack_plan(
                rows[:, :-1],
                self.eod_id,
                _NO_PAD_ID,
                extra_token=rows[:, -1],
                row_lengths=np.array([sample["length"] for sample in samples]),
                alignment=self.alignment,
                capacity=self.capacity,
                boundaries=boundaries,
            )
        except ValueError as error:
            raise DataError(str(error)) from error
        return pack_share(
            plan,
            rows,
            self.helper,
            mtp_depths=self.mtp_depths,
            segments=segments_of_rows(plan, samples),
        )


@dataclass(frozen=True)
class RowShareCollator:
    """Collates whole rows and cuts them to this context-parallel rank's share.

    Attributes:
        whole: collates the rows.
        helper: cuts them.
    """

    whole: BshdCollator
    helper: ContextParallelHelper

    def __call__(self, samples: list[dict[str, Any]]) -> BshdBatch:
        """Collate samples, see `BshdCollator`."""
        return self.helper.pack(self.whole(samples))


def pack_capacity(config: Config, alignment: Alignment) -> int | None:
    """Tokens of every pack, or None where segments are padded one by one.

    The samples of a micro-batch hold at most micro-batch-size * seq-length tokens, so that many,
    rounded up to the layout's multiple, always suffices when only the pack's end is padded.
    `--packed-sequence-capacity` sets another length; it moves no boundary.

    Raises:
        ConfigurationError: when the layout can't divide the capacity that was asked for.
    """
    asked = config.packing.packed_sequence_capacity
    multiple = alignment.pack_multiple
    if asked is not None:
        if asked % multiple:
            raise ConfigurationError(
                f"--packed-sequence-capacity {asked}: must be a multiple of {multiple}, which the "
                f"parallel layout cuts packs into; {asked + -asked % multiple} would do"
            )
        return asked
    if alignment.segment != 1:
        return None
    slots = config.training.micro_batch_size * config.data.seq_length
    return slots + (-slots) % alignment.pack_multiple


def pack_alignment(config: Config) -> Alignment:
    """The alignment that this run's layout needs."""
    return helper_settings(config).alignment


Collator = PackingCollator | DocumentCollator | BshdCollator | RowShareCollator


def build_collator(
    config: Config, eod_id: int, helper: AnyHelper | None = None, *, whole_packs: bool = False
) -> Collator:
    """The collator for packs of rows, packs of documents, or rows that aren't packed.

    Args:
        config: the run's configuration.
        eod_id: id that ends a document.
        helper: cuts batches over context-parallel ranks; by default the one of the flags.
        whole_packs: an external engine cuts packs, once they have arrived.
    """
    loss = config.loss
    uncut = config.parallel.context_parallel_size == 1 or whole_packs
    if uncut and not loss.is_weighted:
        helper = None  # nothing is cut
    elif helper is None:
        helper = build_context_parallel_helper(config)
    if helper is not None and whole_packs:
        helper = helper.uncut()
    if helper is not None and loss.is_weighted:
        helper.register_batch_sliced_hook(
            partial(
                update_packed_doc_level_params,
                reduction=loss.loss_reduction,
                document_length=loss.document_length,
            )
        )
    if config.packing.use_packed_sequence:
        alignment = pack_alignment(config)
        capacity = pack_capacity(config, alignment)
        if config.packing.packs_documents:
            return DocumentCollator(alignment, capacity, helper, loss.mtp_depths)
        by_index = config.packing.document_boundaries == "index"
        return PackingCollator(eod_id, alignment, capacity, by_index, helper, loss.mtp_depths)
    data = config.data
    whole = BshdCollator(
        eod_id,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
        mtp_depths=loss.mtp_depths,
    )
    if helper is None:
        return whole
    assert isinstance(helper, ContextParallelHelper)  # the one for rows
    return RowShareCollator(whole, helper)
