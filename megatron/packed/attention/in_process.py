"""All ranks of a plan in one process: for tests, simulations and debugging."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.packed.attention.communicator import (
    Expected,
    Form,
    Label,
    Landing,
    Message,
    Pending,
    T,
    Task,
)


class InProcessNetwork:
    """Drives the tasks of all ranks in turns, without threads or processes.

    Args:
        size: ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.mail: dict[tuple[int, int, Label], deque[Tensor]] = {}
        self.bytes_sent = [0] * size

    def communicators(self) -> list[InProcessCommunicator]:
        """One end for every rank."""
        return [InProcessCommunicator(self, rank) for rank in range(self.size)]

    def drive(self, tasks: Sequence[Task[T]]) -> list[T]:
        """Run the tasks of all ranks, each as far as it gets, until all have ended.

        Raises:
            RuntimeError: if all wait for each other, or if a message is never received.
        """
        waiting: dict[int, Pending | None] = dict.fromkeys(range(len(tasks)))
        results: dict[int, T] = {}
        while waiting:
            moved = False
            for rank, pending in list(waiting.items()):
                if pending is not None and not pending.is_done():
                    continue
                moved = True
                if pending is not None:
                    pending.wait()
                try:
                    waiting[rank] = next(tasks[rank])
                except StopIteration as end:
                    results[rank] = end.value
                    del waiting[rank]
            if not moved:
                stuck = "; ".join(f"rank {rank} {waiting[rank]}" for rank in sorted(waiting))
                raise RuntimeError(f"ranks wait for each other: {stuck}")
        unread = [key for key, queue in self.mail.items() if queue]
        if unread:
            source, target, label = unread[0]
            raise RuntimeError(f"rank {target} never received what rank {source} sent in {label}")
        return [results[rank] for rank in range(len(tasks))]


class InProcessCommunicator:
    """One rank's end of an `InProcessNetwork`."""

    in_order = False

    def __init__(self, network: InProcessNetwork, rank: int) -> None:
        self.rank = rank
        self.size = network.size
        self._network = network

    def outgoing(self, rows: int, form: Form, label: Label) -> Tensor:
        """Ordinary memory; see `Communicator`."""
        return form.empty(rows)

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Expected], form: Form, label: Label
    ) -> Pending:
        """Post messages; see `Communicator`."""
        for peer, tensor in sends:
            key = self.rank, peer, label
            self._network.mail.setdefault(key, deque()).append(tensor.clone())
            self._network.bytes_sent[self.rank] += tensor.numel() * tensor.element_size()
        return _Mail(self._network, self.rank, receives, form, label)


class _Mail(Landing):
    """Messages that a rank of an in-process network waits for."""

    def __init__(
        self,
        network: InProcessNetwork,
        rank: int,
        receives: Sequence[Expected],
        form: Form,
        label: Label,
    ) -> None:
        super().__init__(receives, form)
        self._network = network
        self._rank = rank
        self._receives = receives
        self._label = label

    def __str__(self) -> str:
        peers = ", ".join(str(peer) for peer, _ in self._receives)
        return f"waits for rank {peers} in {self._label}"

    def is_done(self) -> bool:
        mail, rank = self._network.mail, self._rank
        return all(mail.get((peer, rank, self._label)) for peer, _ in self._receives)

    def wait(self) -> None:
        for (peer, _), into in zip(self._receives, self.parts(), strict=True):
            tensor = self._network.mail[peer, self._rank, self._label].popleft()
            if tensor.shape != into.shape or tensor.dtype != into.dtype:
                raise RuntimeError(
                    f"rank {self._rank} expects {tuple(into.shape)} {into.dtype} from rank {peer} "
                    f"in {self._label}, got {tuple(tensor.shape)} {tensor.dtype}"
                )
            with torch.no_grad():
                into.copy_(tensor)
        self._receives = ()

    def release(self) -> None:
        """Spoil what arrived, as the sender's next message would where memory is shared."""
        with torch.no_grad():
            for part in self.parts():
                part.fill_(torch.nan)
