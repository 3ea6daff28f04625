"""How the executor's ranks exchange rows: what it asks of a communicator.

The executor is written once, as generators that yield what they wait for. Three do the rest:

```
process_group.py   torch.distributed: NCCL, or gloo between hosts
shared_memory.py   ranks of one host that compute on its CPU: a message is written once, where the
                   receiver reads it
in_process.py      all ranks in one process, in turns: for tests, simulations and debugging
```
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Message = tuple[int, Tensor]
"""A context-parallel rank, and contiguous rows `[rows, columns]` for it."""
Expected = tuple[int, int]
"""A context-parallel rank, and how many rows come from it."""

CHANNELS = ("keys", "gradients", "heads", "outputs")


@dataclass(frozen=True)
class Label:
    """What an exchange is for: keeps messages apart and names them in errors.

    Attributes:
        channel: one of `CHANNELS`.
        step: index of the plan's step.
        phase: "forward" or "backward".
    """

    channel: str
    step: int
    phase: str

    @property
    def tag(self) -> int:
        """A number that tells the exchanges of a pass apart."""
        return CHANNELS.index(self.channel) + self.step * len(CHANNELS)

    def __str__(self) -> str:
        return f"step {self.step} of the attention's {self.phase} pass ({self.channel})"


@dataclass(frozen=True)
class Form:
    """What the rows of an exchange are.

    Attributes:
        columns: numbers in a row.
        dtype: theirs.
        device: where they are.
    """

    columns: int
    dtype: torch.dtype
    device: torch.device

    def empty(self, rows: int) -> Tensor:
        """`[rows, columns]` of ordinary memory."""
        return torch.empty(rows, self.columns, dtype=self.dtype, device=self.device)


class Pending(Protocol):
    """An exchange under way."""

    def wait(self) -> None:
        """Return when every message has arrived or left (on CUDA: in the order of the stream)."""

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""

    def parts(self) -> Sequence[Tensor]:
        """After `wait`: what each rank sent, `[rows, columns]`, in the order they were expected."""

    def release(self) -> None:
        """Say that what arrived is not read any more: its memory may be written again."""


class Communicator(Protocol):
    """One rank's end of the exchanges.

    Attributes:
        rank: this context-parallel rank.
        size: context-parallel ranks.
        in_order: messages between two ranks are matched by order alone, so all ranks have to post
            the exchanges of a plan in one global order.
    """

    rank: int
    size: int
    in_order: bool

    def outgoing(self, rows: int, form: Form, label: Label) -> Tensor:
        """Memory `[rows, columns]` for the messages of one exchange, where they need no copy.

        It is the sender's until it posts that exchange, and not read or written after it.
        """

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Expected], form: Form, label: Label
    ) -> Pending:
        """Post messages; none is empty, and tensors stay untouched until `wait` returns."""


Task = Generator[Pending, None, T]
"""One rank's part of a computation: yields each exchange that it has to wait for."""


def drive(task: Task[T]) -> T:
    """Run one rank's task, blocking where it waits."""
    try:
        while True:
            next(task).wait()
    except StopIteration as end:
        return end.value


class Landing:
    """Ordinary memory for what an exchange brings.

    Args:
        receives: who sends how many rows.
        form: theirs.
    """

    def __init__(self, receives: Sequence[Expected], form: Form) -> None:
        self._parts = [form.empty(rows) for _, rows in receives]

    def parts(self) -> Sequence[Tensor]:
        """See `Pending`."""
        return self._parts

    def release(self) -> None:
        """Nothing: the memory goes with the last tensor that uses it."""
