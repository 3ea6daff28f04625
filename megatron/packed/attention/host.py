"""Which communicator a process group gets: shared memory where all its ranks are on one host.

Every rank tells the others once, over the group itself, which host it is on and where it listens.
The answers are the same on every rank, and so is what follows from them. A rank reads them before
its first exchange, and sends its own at its first attention: one that exchanges nothing keeps
nobody waiting.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import sys
import weakref
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.packed.attention.communicator import (
    Communicator,
    Expected,
    Form,
    Label,
    Message,
    Pending,
)
from megatron.packed.attention.process_group import ProcessGroupCommunicator
from megatron.packed.attention.shared_memory import SharedMemoryCommunicator, connect
from megatron.packed.errors import TrainingError

_TAG = 1 << 20  # no step has so many
_DIGEST, _TOKEN = 32, 16
_communicators: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Communicator]] = (
    weakref.WeakKeyDictionary()
)


def communicator_of(group: dist.ProcessGroup, device: torch.device, label: Label) -> Communicator:
    """The communicator of a process group, one for all calls.

    Args:
        group: context-parallel process group.
        device: where the rows are.
        label: the first exchange, for errors.
    """
    of_device = _communicators.setdefault(group, {})
    if device.type not in of_device:
        through_group = ProcessGroupCommunicator(group)
        may_share = device.type == "cpu" and not through_group.in_order and through_group.size > 1
        of_device[device.type] = (
            HostCommunicator(through_group, group, label) if may_share else through_group
        )
    return of_device[device.type]


class HostCommunicator:
    """Finds out at the first exchange whether ranks share a host, and exchanges accordingly.

    Args:
        through_group: the communicator for ranks that don't.
        group: its process group.
        label: the first exchange, for errors.
    """

    in_order = False

    def __init__(
        self, through_group: ProcessGroupCommunicator, group: dist.ProcessGroup, label: Label
    ) -> None:
        self.rank = through_group.rank
        self.size = through_group.size
        self._through_group = through_group
        self._timeout = _timeout_of(group).total_seconds()
        self._chosen: Communicator | None = None
        token = secrets.token_bytes(_TOKEN)
        self._listener = _listen(token, self.size) if can_share_memory() else None
        if self._listener is not None:
            weakref.finalize(self, self._listener.close)
        self._host = host_identity() if self._listener else secrets.token_bytes(_DIGEST)
        form = Form(_DIGEST + _TOKEN, torch.uint8, torch.device("cpu"))
        hello = torch.frombuffer(bytearray(self._host + token), dtype=torch.uint8).unsqueeze(0)
        others = [peer for peer in range(self.size) if peer != self.rank]
        self._answers = through_group.exchange(
            [(peer, hello) for peer in others],
            [(peer, 1) for peer in others],
            form,
            label,
            tag=_TAG,
        )

    @property
    def shares_memory(self) -> bool | None:
        """Whether exchanges go through shared memory; None before the first one."""
        if self._chosen is None:
            return None
        return isinstance(self._chosen, SharedMemoryCommunicator)

    def outgoing(self, rows: int, form: Form, label: Label) -> Tensor:
        """See `Communicator`."""
        return self._communicator(label).outgoing(rows, form, label)

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Expected], form: Form, label: Label
    ) -> Pending:
        """Post messages; see `Communicator`."""
        return self._communicator(label).exchange(sends, receives, form, label)

    def _communicator(self, label: Label) -> Communicator:
        if self._chosen is None:
            self._chosen = self._choose(label)
        return self._chosen

    def _choose(self, label: Label) -> Communicator:
        self._answers.wait()
        answers = [bytes(part[0].tolist()) for part in self._answers.parts()]
        if self._listener is None or any(answer[:_DIGEST] != self._host for answer in answers):
            if self._listener is not None:
                self._listener.close()
            return self._through_group
        links = {}
        for peer in range(self.rank):  # those above connect to this one
            try:
                links[peer] = connect(_address(answers[peer][_DIGEST:]), self.rank)
            except OSError as error:
                name = self._through_group.name(peer)
                raise TrainingError(
                    f"context-parallel rank {self.rank} lost {name} in {label} ({error})"
                ) from error
        return SharedMemoryCommunicator(
            self.rank,
            self.size,
            self._listener,
            links,
            self._through_group.name,
            self._timeout,
        )


def can_share_memory() -> bool:
    """Whether this process can; ``MEGATRON_PACKED_SHARED_MEMORY=0`` turns it off, to compare."""
    return sys.platform == "linux" and os.environ.get("MEGATRON_PACKED_SHARED_MEMORY") != "0"


def host_identity() -> bytes:
    """The same in processes that can reach each other's sockets and share memory."""
    parts = [
        Path("/proc/sys/kernel/random/boot_id").read_text(),
        *(os.readlink(f"/proc/self/ns/{name}") for name in ("net", "user")),
        str(os.getuid()),
    ]
    return hashlib.sha256("\n".join(parts).encode()).digest()


def _address(token: bytes) -> str:
    return f"\0megatron-packed-{token.hex()}"  # abstract: no file is left behind


def _listen(token: bytes, size: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(_address(token))
    listener.listen(size)
    return listener


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long the group itself would wait."""
    backend = group._get_backend(torch.device("cpu"))
    timeout: timedelta = backend.options._timeout
    return timeout
