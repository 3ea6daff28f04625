"""Exchanges between ranks of one host through memory that they share.

```
sender     outgoing() lends a segment | rows are written there | exchange() sends a note
receiver   wait() reads the note | tiles are computed straight from the segment | release()
```

Notes go over a Unix socket to each peer: which segment, where in it, how much. The kernel orders
them after what was written before, wakes a rank that waits, and closes the socket of one that died.
A segment is written again once all its messages are released. Senders never wait for a receiver to
be ready, but for one that is `MAX_UNREAD` exchanges behind.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from megatron.packed.attention.communicator import Expected, Form, Label, Message, Pending
from megatron.packed.attention.shared_segments import Mapping, Segment
from megatron.packed.errors import TrainingError

# More than the executor has under way at a time, so that no two ranks wait for each other here.
MAX_UNREAD = 8

_HELLO = struct.Struct("=i")
_NOTE = struct.Struct("=6q")
_CREDENTIALS = struct.Struct("=3i")  # process, user, group
_MESSAGE, _RELEASE = 0, 1


class _Note(NamedTuple):
    """What goes over the socket: a message lies there, or is not read any more.

    Attributes:
        kind: `_MESSAGE` or `_RELEASE`.
        tag: of the message's label.
        segment: the sender's number of it.
        segment_size: bytes of the segment.
        offset: bytes from its start to the message.
        size: bytes of the message.
    """

    kind: int
    tag: int
    segment: int
    segment_size: int
    offset: int
    size: int


def connect(address: str, rank: int) -> socket.socket:
    """A link to the rank that listens there."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.connect(address)
    link.send(_HELLO.pack(rank))
    return link


class SharedMemoryCommunicator:
    """One rank's end of exchanges through shared memory; tensors are on the CPU.

    Args:
        rank: this context-parallel rank.
        size: context-parallel ranks.
        listener: socket where ranks connect that have no link yet.
        links: sockets to the others.
        name: a rank as errors call it.
        timeout: seconds that a peer may be silent.
    """

    in_order = False

    def __init__(
        self,
        rank: int,
        size: int,
        listener: socket.socket,
        links: dict[int, socket.socket],
        name: Callable[[int], str],
        timeout: float,
    ) -> None:
        self.rank = rank
        self.size = size
        self._name = name
        self._timeout = timeout
        self._listener = listener
        self._links: dict[int, socket.socket] = {}
        self._peer_of: dict[int, int] = {}
        self._lost: set[int] = set()
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._segments: list[Segment] = []
        self._mappings: dict[tuple[int, int], Mapping] = {}
        self._mail: dict[tuple[int, int], deque[_Note]] = defaultdict(deque)
        for peer, link in links.items():
            self._add(peer, link)
        self._finalizer = weakref.finalize(
            self, _close, listener, self._links, self._segments, self._mappings
        )
        _open.add(self)

    def outgoing(self, rows: int, form: Form, label: Label) -> Tensor:
        """Memory that receivers read; see `Communicator`."""
        size = rows * form.columns * form.dtype.itemsize
        if size == 0:
            return form.empty(rows)
        self._read(0)
        self._wait_until(lambda: self._unread() < MAX_UNREAD, self._readers, label)
        segment = self._free_segment(size)
        segment.is_lent = True
        return segment.rows(rows, form)

    def _unread(self) -> int:
        return sum(segment.unread > 0 for segment in self._segments)

    def _readers(self) -> set[int]:
        """Ranks that may have unread messages."""
        return {peer for segment in self._segments if segment.unread for peer in segment.known_to}

    def _free_segment(self, size: int) -> Segment:
        free = [segment for segment in self._segments if segment.is_free]
        fitting = [segment for segment in free if segment.size >= size]
        if fitting:
            return min(fitting, key=lambda segment: segment.size)
        if free:
            segment = max(free, key=lambda segment: segment.size)
        else:
            segment = Segment(len(self._segments))
            self._segments.append(segment)
        segment.grow(size)
        return segment

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Expected], form: Form, label: Label
    ) -> Pending:
        """Post messages; see `Communicator`. Those that are not in lent memory are copied there."""
        placed = [(peer, tensor, *self._place(tensor, form, label)) for peer, tensor in sends]
        for peer, tensor, segment, offset in placed:
            size = tensor.numel() * tensor.element_size()
            note = _Note(_MESSAGE, label.tag, segment.number, segment.size, offset, size)
            self._wait_for_link(peer, label)
            self._send(peer, note, segment, label)
            segment.unread += 1
            segment.is_lent = False
        return _Arriving(self, receives, form, label)

    def _place(self, tensor: Tensor, form: Form, label: Label) -> tuple[Segment, int]:
        """Where a message lies in shared memory."""
        for segment in self._segments:
            offset = segment.offset(tensor) if segment.is_lent else None
            if offset is not None:
                return segment, offset
        copy = self.outgoing(len(tensor), form, label).copy_(tensor)
        return self._place(copy, form, label)

    # ---- what arrivals need ------------------------------------------------------------------

    def has(self, peer: int, label: Label) -> bool:
        """Whether a message has arrived."""
        self._read(0)
        return bool(self._mail[peer, label.tag])

    def take(self, peer: int, rows: int, form: Form, label: Label) -> tuple[Tensor, int]:
        """The next message of a rank `[rows, columns]`, and its segment's number."""
        mail = self._mail[peer, label.tag]
        self._wait_until(lambda: bool(mail), lambda: {peer}, label)
        note = mail.popleft()
        expected = rows * form.columns * form.dtype.itemsize
        if note.size != expected:
            raise RuntimeError(
                f"rank {self.rank} expects {expected} bytes from rank {peer} in {label}, got "
                f"{note.size}"
            )
        mapping = self._mappings[peer, note.segment]
        return mapping.rows(note.segment_size, note.offset, rows, form), note.segment

    def give_back(self, peer: int, segment: int, label: Label) -> None:
        """Tell a rank that a message of a segment is not read any more."""
        if peer not in self._lost:
            self._send(peer, _Note(_RELEASE, 0, segment, 0, 0, 0), None, label, needed=False)

    # ---- sockets -----------------------------------------------------------------------------

    def _add(self, peer: int, link: socket.socket) -> None:
        link.setblocking(False)
        self._links[peer] = link
        self._peer_of[link.fileno()] = peer
        self._poll.register(link, select.POLLIN)

    def _wait_for_link(self, peer: int, label: Label) -> None:
        self._wait_until(lambda: peer in self._links, lambda: {peer}, label)

    def _wait_until(
        self, done: Callable[[], bool], peers: Callable[[], set[int]], label: Label
    ) -> None:
        """Read notes until something has come true that is up to some peers."""
        if done():
            return
        deadline = time.monotonic() + self._timeout
        while not done():
            lost = peers() & self._lost
            if lost:
                raise self._loss(lost, label, "it closed its connection")
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._loss(peers(), label, f"silent for {self._timeout:g} s")
            self._read(left)

    def _loss(self, peers: set[int], label: Label, reason: str) -> TrainingError:
        return TrainingError(
            f"context-parallel rank {self.rank} lost {', '.join(map(self._name, sorted(peers)))} "
            f"in {label}; look for the first error in that rank's log ({reason})"
        )

    def _send(
        self,
        peer: int,
        note: _Note,
        segment: Segment | None,
        label: Label,
        needed: bool = True,
    ) -> None:
        link = self._links[peer]
        descriptors = []
        if segment is not None and peer not in segment.known_to:
            descriptors.append(segment.descriptor)
        while True:
            try:
                socket.send_fds(link, [_NOTE.pack(*note)], descriptors)
                break
            except BlockingIOError:  # it has not read its notes for long
                self._wait_until_writable(peer, label)
            except ConnectionError as error:
                if needed:
                    raise self._loss({peer}, label, "it closed its connection") from error
                return
        if segment is not None:
            segment.known_to.add(peer)

    def _wait_until_writable(self, peer: int, label: Label) -> None:
        poll = select.poll()
        poll.register(self._links[peer], select.POLLOUT)
        if not poll.poll(self._timeout * 1e3):
            raise self._loss({peer}, label, f"silent for {self._timeout:g} s")

    def _read(self, timeout: float) -> None:
        """Take in the notes that are there, waiting up to `timeout` seconds for the first."""
        for descriptor, _ in self._poll.poll(timeout * 1e3):
            if descriptor == self._listener.fileno():
                self._accept()
            else:
                self._read_link(self._peer_of[descriptor])

    def _accept(self) -> None:
        link, _ = self._listener.accept()
        credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        link.settimeout(self._timeout)
        try:
            hello = link.recv(_HELLO.size)
        except OSError:
            hello = b""
        _, user, _ = _CREDENTIALS.unpack(credentials)
        if user == os.getuid() and len(hello) == _HELLO.size:
            self._add(_HELLO.unpack(hello)[0], link)
        else:
            link.close()

    def _read_link(self, peer: int) -> None:
        link = self._links[peer]
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(
                    link, _NOTE.size, 1, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except ConnectionResetError:  # it left releases unread; its messages are still there
                continue
            if not data:
                self._lost.add(peer)
                self._poll.unregister(link)
                return
            self._take_in(peer, _Note(*_NOTE.unpack(data)), descriptors)

    def _take_in(self, peer: int, note: _Note, descriptors: Sequence[int]) -> None:
        if note.kind == _RELEASE:
            self._segments[note.segment].unread -= 1
            return
        for descriptor in descriptors:
            self._mappings[peer, note.segment] = Mapping(descriptor)
        self._mail[peer, note.tag].append(note)


class _Arriving:
    """Messages that a rank waits for; they are read where their senders wrote them."""

    def __init__(
        self,
        communicator: SharedMemoryCommunicator,
        receives: Sequence[Expected],
        form: Form,
        label: Label,
    ) -> None:
        self._communicator = communicator
        self._receives = receives
        self._form = form
        self._label = label
        self._taken: list[tuple[Tensor, int]] = []

    def wait(self) -> None:
        for peer, rows in self._receives[len(self._taken) :]:
            self._taken.append(self._communicator.take(peer, rows, self._form, self._label))

    def is_done(self) -> bool:
        waited_for = self._receives[len(self._taken) :]
        return all(self._communicator.has(peer, self._label) for peer, _ in waited_for)

    def parts(self) -> Sequence[Tensor]:
        return [part for part, _ in self._taken]

    def release(self) -> None:
        for (peer, _), (_, segment) in zip(self._receives, self._taken, strict=True):
            self._communicator.give_back(peer, segment, self._label)
        self._receives, self._taken = (), []


_open: weakref.WeakSet[SharedMemoryCommunicator] = weakref.WeakSet()


def _close(
    listener: socket.socket,
    links: dict[int, socket.socket],
    segments: list[Segment],
    mappings: dict[tuple[int, int], Mapping],
) -> None:
    listener.close()
    for link in links.values():
        link.close()
    memory: list[Segment | Mapping] = [*segments, *mappings.values()]
    for one in memory:
        os.close(one.descriptor)


def _close_in_child() -> None:
    """A forked process must not hold a link open that its parent's end is to close."""
    for communicator in list(_open):
        communicator._finalizer()


os.register_at_fork(after_in_child=_close_in_child)
