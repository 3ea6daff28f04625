"""The messages of the executor: rows of keys and values, and their gradients on the way back.

Keys and values travel side by side, `[rows, kv_heads * d + kv_heads * dv]`: one message a peer and
step. A message is written once, from where its rows lie; nothing that stays is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.packed.attention.communicator import Communicator, Label, Message, Pending
from megatron.packed.attention.head_exchange import split_columns
from megatron.packed.attention.plans.plan import Send, Step

# Average rows of a run from which on a CPU copies run by run; below it, an index is faster.
LONG_RUN = 32


@dataclass(frozen=True)
class Arriving:
    """A step's rows under way: `buffer` `[rows, columns]` is filled when `pending` ends."""

    pending: Pending
    buffer: Tensor


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

    def fetch(self, step: Step) -> Arriving:
        """Post a step's keys and values."""
        buffer = self._sources[0].new_empty(step.rows_received, self._columns)
        sends = [(send.peer, self._message(send)) for send in step.sends]
        parts = buffer.split([receive.rows for receive in step.receives])
        receives = [
            (receive.peer, part) for receive, part in zip(step.receives, parts, strict=True)
        ]
        return self._post(sends, receives, Label("keys", step.index, self._phase), buffer)

    def give_back(self, step: Step, gradients: Tensor) -> Arriving:
        """Post the gradients of a step's rows to their owners, and expect those of rows lent."""
        buffer = gradients.new_empty(step.rows_sent, gradients.shape[1])
        parts = gradients.split([receive.rows for receive in step.receives])
        sends = [(receive.peer, part) for receive, part in zip(step.receives, parts, strict=True)]
        lent = buffer.split([send.rows for send in step.sends])
        receives = [(send.peer, part) for send, part in zip(step.sends, lent, strict=True)]
        return self._post(sends, receives, Label("gradients", step.index, self._phase), buffer)

    def _post(
        self, sends: list[Message], receives: list[Message], label: Label, buffer: Tensor
    ) -> Arriving:
        return Arriving(self._communicator.exchange(sends, receives, label), buffer)

    def _message(self, send: Send) -> Tensor:
        """The rows that one peer gets: `[rows, columns]`."""
        runs = _long_runs(send, self._sources[0].device)
        if runs is None:
            index = torch.from_numpy(send.index).to(self._sources[0].device)
            return torch.cat([x.index_select(0, index).flatten(1) for x in self._sources], dim=1)
        message = self._sources[0].new_empty(send.rows, self._columns)
        parts = split_columns(message, self.shapes)
        for at, start, count in runs:
            for part, x in zip(parts, self._sources, strict=True):
                part.narrow(0, at, count).copy_(x.narrow(0, start, count))
        return message


def add_rows(rows: Tensor, step: Step, arrived: Tensor) -> None:
    """Add what came back for the rows that a step lent, in the order of its sends.

    Args:
        rows: `[rows, columns]`, changed in place.
        step: the step.
        arrived: `[rows sent, columns]`.
    """
    parts = arrived.split([send.rows for send in step.sends])
    for send, part in zip(step.sends, parts, strict=True):
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
