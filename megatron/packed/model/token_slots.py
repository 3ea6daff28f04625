"""What a mixture of experts must know of each token slot, in one tensor.

megatron-core hands a `padding_mask [B, S]` through the model, its recomputation and its pipeline
stages, down to each layer's router. An int64 tensor takes the same way: -1 for a slot without a
token, else which sequence its token belongs to (upper half) and where it stands in the
micro-batch (lower half).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_HALF = 32


@dataclass(frozen=True)
class TokenSlots:
    """The slots of one rank's tokens, flattened as the router sees them.

    Attributes:
        valid: bool [T], the slot holds a token.
        sequence: int64 [T], which row or document of the micro-batch; -1 without a token.
        order: int64 [T], where the token stands in the micro-batch; -1 without a token.
    """

    valid: Tensor
    sequence: Tensor
    order: Tensor

    @classmethod
    def decode(cls, codes: Tensor) -> TokenSlots:
        """Read a rank's codes.

        Args:
            codes: int64 [B, S], see `encode_slots`.

        Returns:
            The slots in the order of hidden states `[S, B]`.
        """
        flat = codes.transpose(0, 1).reshape(-1)
        valid = flat >= 0
        order = torch.where(valid, flat & ((1 << _HALF) - 1), -1)
        return cls(valid=valid, sequence=flat >> _HALF, order=order)

    @classmethod
    def whole(cls, rows: int, length: int, device: torch.device) -> TokenSlots:
        """Slots of rows that are all tokens."""
        return cls.decode(row_slots(torch.ones(rows, length, dtype=torch.bool, device=device)))


def encode_slots(valid: Tensor, sequence: Tensor, order: Tensor) -> Tensor:
    """Put what is known of each slot into one number.

    Args:
        valid: bool [B, S], the slot holds a token.
        sequence: integers [B, S], at least 0 where valid.
        order: integers [B, S], at least 0 where valid.

    Returns:
        int64 [B, S].
    """
    codes = (sequence.long() << _HALF) | order.long()
    return torch.where(valid, codes, -1)


def row_slots(valid: Tensor, place: Tensor | None = None) -> Tensor:
    """Codes of rows, each a sequence.

    Args:
        valid: bool [B, S].
        place: integers [B, S], where each token stands in its row; None for 0, 1, 2, ...

    Returns:
        int64 [B, S]; tokens are ordered as hidden states `[S, B]` are.
    """
    rows, length = valid.shape
    row = torch.arange(rows, device=valid.device)[:, None].expand(rows, length)
    if place is None:
        place = torch.arange(length, device=valid.device)
    return encode_slots(valid, row, place * rows + row)


def pack_slots(document_ids: Tensor, position_ids: Tensor, starts: Tensor) -> Tensor:
    """Codes of a pack, each document a sequence.

    Args:
        document_ids: integers [1, T], -1 in padding.
        position_ids: integers [1, T], position in the document.
        starts: integers [n + 1], where each document starts in the pack.

    Returns:
        int64 [1, T].
    """
    valid = document_ids >= 0
    document = torch.where(valid, document_ids, 0).long()
    return encode_slots(valid, document, starts.long()[document] + position_ids)
