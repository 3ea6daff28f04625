"""How the executor's ranks exchange rows: process groups in training, one process in tests.

The executor is written once, as generators that yield what they wait for. A process group drives
one of them and blocks; `InProcessNetwork` drives those of all ranks in turns, without threads or
processes, and finds out when they wait for each other in a circle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.packed.errors import TrainingError

T = TypeVar("T")
Message = tuple[int, Tensor]
"""A context-parallel rank, and a contiguous tensor for it or from it."""

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

    def __str__(self) -> str:
        return f"step {self.step} of the attention's {self.phase} pass ({self.channel})"


class Pending(Protocol):
    """An exchange under way."""

    def wait(self) -> None:
        """Return when every message has arrived or left (on CUDA: in the order of the stream)."""

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""


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

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], label: Label
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


class _Works:
    """Posted operations of torch.distributed, with the peers they belong to."""

    def __init__(
        self, works: list[tuple[Any, str]], tensors: list[Tensor], rank: int, label: Label
    ) -> None:
        self._works = works
        self._tensors = tensors  # alive until the messages have left
        self._rank = rank
        self._label = label

    def wait(self) -> None:
        for work, peer in self._works:
            try:
                work.wait()
            except RuntimeError as error:
                raise TrainingError(
                    f"context-parallel rank {self._rank} lost {peer} in {self._label}; look for "
                    f"the first error in that rank's log ({_first_line(error)})"
                ) from error
        self._works, self._tensors = [], []

    def is_done(self) -> bool:
        return all(work.is_completed() for work, _ in self._works)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class ProcessGroupCommunicator:
    """Exchanges over a context-parallel process group of torch.distributed.

    Args:
        group: the group; its ranks are the context-parallel ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._group = group
        self._global_ranks = dist.get_process_group_ranks(group)
        # NCCL knows no tags. It also wants sends and receives of an exchange in one group call.
        self.in_order = dist.get_backend(group) != "gloo"

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], label: Label
    ) -> Pending:
        """Post messages; see `Communicator`."""
        tensors = [tensor for _, tensor in (*receives, *sends)]
        try:
            works = (
                self._batch(sends, receives)
                if self.in_order
                else self._tagged(
                    sends, receives, CHANNELS.index(label.channel) + label.step * len(CHANNELS)
                )
            )
        except RuntimeError as error:
            peers = sorted({peer for peer, _ in (*receives, *sends)})
            raise TrainingError(
                f"context-parallel rank {self.rank} could not reach rank(s) "
                f"{', '.join(map(self._name, peers))} in {label} ({_first_line(error)})"
            ) from error
        return _Works(works, tensors, self.rank, label)

    def _name(self, peer: int) -> str:
        return f"rank {peer} (global rank {self._global_ranks[peer]})"

    def _tagged(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int
    ) -> list[tuple[Any, str]]:
        works = []
        for peer, tensor in receives:
            work = dist.irecv(tensor, self._global_ranks[peer], group=self._group, tag=tag)
            works.append((work, self._name(peer)))
        for peer, tensor in sends:
            work = dist.isend(tensor, self._global_ranks[peer], group=self._group, tag=tag)
            works.append((work, self._name(peer)))
        return works

    def _batch(
        self, sends: Sequence[Message], receives: Sequence[Message]
    ) -> list[tuple[Any, str]]:
        operations = [
            dist.P2POp(operation, tensor, self._global_ranks[peer], group=self._group)
            for operation, messages in ((dist.irecv, receives), (dist.isend, sends))
            for peer, tensor in messages
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        peers = sorted({peer for peer, _ in (*receives, *sends)})
        return [(work, ", ".join(map(self._name, peers))) for work in works]


class InProcessNetwork:
    """All ranks of a plan in one process: for tests, simulations and debugging.

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

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], label: Label
    ) -> Pending:
        """Post messages; see `Communicator`."""
        for peer, tensor in sends:
            key = self.rank, peer, label
            self._network.mail.setdefault(key, deque()).append(tensor.clone())
            self._network.bytes_sent[self.rank] += tensor.numel() * tensor.element_size()
        return _Mail(self._network, self.rank, list(receives), label)


class _Mail:
    """Messages that a rank of an in-process network waits for."""

    def __init__(
        self, network: InProcessNetwork, rank: int, receives: list[Message], label: Label
    ) -> None:
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
        for peer, into in self._receives:
            tensor = self._network.mail[peer, self._rank, self._label].popleft()
            if tensor.shape != into.shape or tensor.dtype != into.dtype:
                raise RuntimeError(
                    f"rank {self._rank} expects {tuple(into.shape)} {into.dtype} from rank {peer} "
                    f"in {self._label}, got {tuple(tensor.shape)} {tensor.dtype}"
                )
            with torch.no_grad():
                into.copy_(tensor)
        self._receives = []
