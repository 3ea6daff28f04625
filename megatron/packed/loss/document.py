"""Losses of documents: what a token of each weighs, and one segment reduction over a pack.

Every reduction is a weighted mean over supervised tokens, `sum w * loss / sum w`, whose weights
depend on the token's document alone. With n supervised tokens in the document:

    token      w = 1         the mean over tokens
    document   w = 1 / n     the mean over documents of their means
    sqrt       w = n^-1/2    sum n^-1/2 * (sum of the document's losses) / sum n^1/2

The weights are known where packs are made; so are their sums, over context-parallel ranks too, and
nothing that a rank computes depends on which tokens of a document it holds. Documents without a
supervised token weigh nothing and are counted nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron.packed.errors import DataError
from megatron.packed.packing.batch import PackedBatch, PackedSeqParamsWithValidTokens

_EXPONENTS = {"token": 0.0, "document": -1.0, "sqrt": -0.5}


def token_weights(lengths: NDArray[np.int64], reduction: str) -> NDArray[np.float64]:
    """What one token of a document weighs.

    Args:
        lengths: int64 `[n]`, supervised tokens of each document.
        reduction: `token`, `document` or `sqrt`.

    Returns:
        float64 `[n]`; 0 for documents without a supervised token.
    """
    floor = np.maximum(lengths, 1).astype(np.float64)
    return np.where(lengths > 0, floor ** _EXPONENTS[reduction], 0.0)


def update_packed_doc_level_params(
    batch: PackedBatch, *, reduction: str, document_length: str = "segment"
) -> None:
    """Write into a batch what its tokens weigh: a `register_batch_sliced_hook` of helpers.

    Args:
        batch: this rank's share of a pack, as a helper's `pack` has made it.
        reduction: `token`, `document` or `sqrt`.
        document_length: `segment` counts the supervised tokens of each segment; `document` those
            of the stored document it is a piece of.

    Raises:
        DataError: when the lengths of stored documents are asked for and not known.
    """
    params = batch.packed_seq_params
    held = params.segment_targets[0]
    lengths = held
    if document_length == "document":
        lengths = np.where(held > 0, params.segments.targets, 0)
        if np.any(lengths < held):
            place = int(np.flatnonzero(lengths < held)[0])
            raise DataError(
                f"--document-length document: segment {place} of a pack has {held[place]} "
                f"supervised tokens and its stored document {lengths[place]} (-1: unknown); use "
                "--document-length segment, or --document-boundaries index"
            )
    weights = np.where(held > 0, token_weights(lengths, reduction), 0.0)
    params.token_weights_host[:] = weights * params.segments.weights


@dataclass(frozen=True)
class PackedDocLevelParams:
    """What the loss must know of the documents in this rank's share of a pack.

    Attributes:
        document_ids: int32 `[1, T_local]`, slot of each token's document, -1 in padding.
        weights: float64 `[n]`, what a token of each document weighs.
        targets: int64 `[n]` numpy, supervised tokens of each over all context-parallel ranks.
        total_weight: of all supervised tokens over all context-parallel ranks.
    """

    document_ids: Tensor
    weights: Tensor
    targets: NDArray[np.int64]
    total_weight: float

    @classmethod
    def of(cls, params: PackedSeqParamsWithValidTokens) -> PackedDocLevelParams:
        """Those of a batch; nothing is copied and no device waited for."""
        targets = params.segment_targets[0]
        return cls(
            document_ids=params.document_ids,
            weights=params.token_weights,
            targets=targets,
            total_weight=float(np.dot(targets, params.token_weights_host)),
        )


def document_sums(losses: Tensor, loss_mask: Tensor, params: PackedDocLevelParams) -> Tensor:
    """Sum this rank's supervised losses by document, in one reduction over its tokens.

    Args:
        losses: float `[1, T_local]`, per-token losses; anything, NaN too, where unsupervised.
        loss_mask: float `[1, T_local]`, nonzero where supervised.
        params: documents of these tokens.

    Returns:
        float64 `[n]` with the gradient of `losses`. Over context-parallel ranks they add up, see
        `reduce_document_sums`.
    """
    supervised = loss_mask.reshape(-1) != 0
    selected = torch.where(supervised, losses.reshape(-1), 0.0).double()
    # Padding has no document; it is unsupervised, and adds zero to the first one.
    slots = params.document_ids.reshape(-1).clamp(min=0)
    sums = torch.zeros(len(params.weights), dtype=torch.float64, device=losses.device)
    return sums.index_add(0, slots, selected)


def reduce_document_sums(sums: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sums of whole documents, on every context-parallel rank, without gradient.

    Args:
        sums: float64 `[n]`, this rank's, of `document_sums`.
        group: the context-parallel group; a collective call when it has several ranks.
    """
    whole = sums.detach().clone()
    if group is not None and group.size() > 1:
        dist.all_reduce(whole, group=group)
    return whole


def document_loss(losses: Tensor, loss_mask: Tensor, params: PackedDocLevelParams) -> Tensor:
    """This rank's weighted sum of losses: float64 scalar, never divided here.

    Arguments as for `document_sums`. Added over all ranks and micro-batches, and divided by the
    weights added likewise, it is the objective of the global batch.
    """
    return torch.dot(document_sums(losses, loss_mask, params), params.weights)
