"""The messages of the executor: rows of keys and values, and their gradients on the way back.

One message a peer and step. Keys and values travel one after the other, each dense, because
kernels read them slower from longer rows; gradients side by side, `[rows, kv_heads * d + kv_heads *
dv]`, because they are summed up where rows of all peers lie end to end. A message is written once,
from where its rows lie, into memory of the communicator; nothing that stays is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from megatron.packed.attention.communicator import Communicator, Form, Label, Pending
from megatron.packed.attention.plans.plan import Send, Step

# Average rows of a run from which on a CPU copies run by run; below it, an index is faster.
LONG_RUN = 32


class RowExchanges:
    """Posts the messages of one pass over a plan.

    Args:
        communicator: this rank's.
        key: `[rows, kv_heads, d]`.
        value: `[rows, kv_heads, dv]`.
        phase: "forward" or "backward".
    """

    def __init__(self, communicator: Communicator, key: Tensor, value: Tensor, phase: str) -> None:
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
        rows = [send.rows for send in step.sends]
        messages = self._communicator.outgoing(sum(rows), self._form, label).split(rows)
        sends = []
        for send, message in zip(step.sends, messages, strict=True):
            self._write(send, message)
            sends.append((send.peer, message))
        receives = [(receive.peer, receive.rows) for receive in step.receives]
        return self._communicator.exchange(sends, receives, self._form, label)

    def keys_and_values(self, arrived: Pending) -> list[Tensor]:
        """What a fetch has brought: `[rows, kv_heads, d]` and `[rows, kv_heads, dv]`."""
        by_peer = [self._halves(part) for part in arrived.parts()]
        if len(by_peer) == 1:
            return by_peer[0]
        if not by_peer:
            return self._halves(self._form.empty(0))
        return [torch.cat(parts) for parts in zip(*by_peer, strict=True)]

    def _halves(self, message: Tensor) -> list[Tensor]:
        """Keys, then values, of a message `[rows, columns]`."""
        rows = message.shape[0]
        sizes = [rows * heads * width for heads, width in self.shapes]
        return [
            half.view(rows, *shape)
            for half, shape in zip(message.view(-1).split(sizes), self.shapes, strict=True)
        ]

    def gradients(self, step: Step) -> Tensor:
        """`[rows received, columns]` for the gradients of a step's rows, to be given back."""
        label = Label("gradients", step.index, self._phase)
        return self._communicator.outgoing(step.rows_received, self._gradient_form, label)

    def give_back(self, step: Step, gradients: Tensor) -> Pending:
        """Post the gradients of a step's rows to their owners, and expect those of rows lent."""
        label = Label("gradients", step.index, self._phase)
        parts = gradients.split([receive.rows for receive in step.receives])
        sends = [(one.peer, part) for one, part in zip(step.receives, parts, strict=True)]
        receives = [(send.peer, send.rows) for send in step.sends]
        return self._communicator.exchange(sends, receives, self._gradient_form, label)

    def _write(self, send: Send, message: Tensor) -> None:
        """Gather the rows that one peer gets: `[rows, columns]`."""
        parts = self._halves(message)
        runs = _long_runs(send, message.device)
        if runs is None:
            index = torch.from_numpy(send.index).to(message.device)
            for part, x in zip(parts, self._sources, strict=True):
                part.copy_(x.index_select(0, index))
            return
        for at, start, count in runs:
            for part, x in zip(parts, self._sources, strict=True):
                part.narrow(0, at, count).copy_(x.narrow(0, start, count))


def add_rows(rows: Tensor, step: Step, arrived: Sequence[Tensor]) -> None:
    """Add what came back for the rows that a step lent, in the order of its sends.

    Args:
        rows: `[rows, columns]`, changed in place.
        step: the step.
        arrived: `[rows sent, columns]` of each send.
    """
    for send, part in zip(step.sends, arrived, strict=True):
        runs = _long_runs(send, rows.device)
        if runs is None:
            rows.index_add_(0, torch.from_numpy(send.index).to(rows.device), part)
            continue
        for at, start, count in runs:
            rows.narrow(0, start, count).add_(part.narrow(0, at, count))


def _long_runs(send: Send, device: torch.device) -> Sequence[tuple[int, int, int]] | None:
    """Row in the message, local row and length of each run; None where an index does better."""
    if len(send.starts) > 1 and (device.type != "cpu" or send.rows < LONG_RUN * len(send.starts)):
        return None
    starts, counts = send.starts.tolist(), send.counts.tolist()
    places = [0]
    for count in counts[:-1]:
        places.append(places[-1] + count)
    return list(zip(places, starts, counts, strict=True))
