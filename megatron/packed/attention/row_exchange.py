"""The messages of the executor: rows of keys and values, and their gradients on the way back.

One message a peer and step, which holds keys, then values, as kernels read them fastest, or their
gradients as kernels write them. Where rows of several peers lie end to end in one step, gradients
of keys and values lie side by side in each row, `[rows, kv_heads * d + kv_heads * dv]`, so that
each peer's are one piece. A message is written once, from where its rows lie, into memory of the
communicator; nothing that stays is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from megatron.packed.attention.communicator import Communicator, Form, Label, Pending
from megatron.packed.attention.plans.plan import AttentionPlan, Receive, Send, Step
from megatron.packed.attention.row_copies import (
    add_rows,
    copy_rows,
    laid_out_parts,
    split_columns,
)


class RowExchanges:
    """Posts the messages of one pass over a plan.

    Args:
        plan: this rank's.
        communicator: this rank's.
        key: `[rows, kv_heads, d]`.
        value: `[rows, kv_heads, dv]`.
        phase: "forward" or "backward".
    """

    def __init__(
        self,
        plan: AttentionPlan,
        communicator: Communicator,
        key: Tensor,
        value: Tensor,
        phase: str,
    ) -> None:
        self._is_pairwise = plan.is_pairwise
        self._communicator = communicator
        self._sources = key, value
        self._phase = phase
        self.shapes = [(x.shape[1], x.shape[2]) for x in self._sources]
        self._columns = sum(heads * width for heads, width in self.shapes)
        self._form = Form(self._columns, key.dtype, key.device)

    @cached_property
    def _gradient_form(self) -> Form:
        """Gradients are summed up, and travel, in fp32 or fp64."""
        dtype = torch.promote_types(self._form.dtype, torch.float32)
        return Form(self._columns, dtype, self._form.device)

    def fetch(self, step: Step) -> Pending:
        """Post a step's keys and values."""
        label = Label("keys", step.index, self._phase)
        memory = self._communicator.outgoing(step.rows_sent, self._form, label)
        sends = []
        for send, message in zip(step.sends, _cut(memory, step.sends), strict=True):
            for part, x in zip(laid_out_parts(message, self.shapes), self._sources, strict=True):
                copy_rows(part, x, send.runs)
            sends.append((send.peer, message))
        receives = [(receive.peer, receive.rows) for receive in step.receives]
        return self._communicator.exchange(sends, receives, self._form, label)

    def keys_and_values(self, arrived: Pending) -> list[Tensor]:
        """What a fetch has brought: `[rows, kv_heads, d]` and `[rows, kv_heads, dv]`."""
        by_peer = [laid_out_parts(part, self.shapes) for part in arrived.parts()]
        if len(by_peer) == 1:
            return by_peer[0]
        rows = sum(parts[0].shape[0] for parts in by_peer)
        wholes = laid_out_parts(self._form.empty(rows), self.shapes)
        start = 0
        for parts in by_peer:
            for whole, part in zip(wholes, parts, strict=True):
                whole[start : start + len(part)].copy_(part)
            start += len(parts[0])
        return wholes

    def gradients(self, step: Step) -> Tensor:
        """`[rows received, columns]` for the gradients of a step's rows, to be given back."""
        label = Label("gradients", step.index, self._phase)
        return self._communicator.outgoing(step.rows_received, self._gradient_form, label)

    def parts_of(self, gradients: Tensor) -> list[Tensor]:
        """Those of keys and of values: `[rows, kv_heads, d]` and `[rows, kv_heads, dv]`."""
        divide = laid_out_parts if self._is_pairwise else split_columns
        return divide(gradients, self.shapes)

    def give_back(self, step: Step, gradients: Tensor) -> Pending:
        """Post the gradients of a step's rows to their owners, and expect those of rows lent."""
        label = Label("gradients", step.index, self._phase)
        parts = _cut(gradients, step.receives)
        sends = [(one.peer, part) for one, part in zip(step.receives, parts, strict=True)]
        receives = [(send.peer, send.rows) for send in step.sends]
        return self._communicator.exchange(sends, receives, self._gradient_form, label)

    def take_back(self, local: Sequence[Tensor], step: Step, arrived: Pending) -> None:
        """Add the gradients that came back for rows that a step lent, in the order of its sends.

        Args:
            local: gradients of all local keys and of all local values, changed in place.
            step: the step.
            arrived: what `give_back` of that step returned, waited for; it is released.
        """
        for send, message in zip(step.sends, arrived.parts(), strict=True):
            for target, part in zip(local, self.parts_of(message), strict=True):
                add_rows(target, part, send.runs.inverse)
        arrived.release()


def _cut(memory: Tensor, pieces: Sequence[Send] | Sequence[Receive]) -> Iterator[Tensor]:
    """The rows of each piece, which lie end to end."""
    start = 0
    for piece in pieces:
        yield memory[start : start + piece.rows]
        start += piece.rows
