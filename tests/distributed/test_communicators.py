"""What every communicator between processes does: one line in TRANSPORTS puts it to the test."""

from __future__ import annotations

import gc
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.packed.attention import host
from megatron.packed.attention.communicator import Form, Label
from megatron.packed.attention.host import communicator_of
from megatron.packed.attention.process_group import ProcessGroupCommunicator
from megatron.packed.attention.shared_memory import MAX_UNREAD
from megatron.packed.errors import TrainingError
from tests.distributed.pool import RankDiedError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shares memory on Linux alone")

CPU = torch.device("cpu")
LABEL = Label("keys", 1, "forward")
FORM = Form(3, torch.float32, CPU)


def _shared(group):
    return communicator_of(group, CPU, LABEL)


TRANSPORTS = {"process group": ProcessGroupCommunicator, "shared memory": _shared}
each_transport = pytest.mark.parametrize("transport", TRANSPORTS)


def _start(transport):
    return TRANSPORTS[transport](dist.group.WORLD)


def _message(communicator, rows, value, form=FORM, label=LABEL):
    return communicator.outgoing(rows, form, label).fill_(value)


def _send(communicator, peer, value, rows=2):
    """One message to a peer, and the exchange's end."""
    message = _message(communicator, rows, value)
    communicator.exchange([(peer, message)], [], FORM, LABEL).wait()


def _receive(communicator, peer, rows=2):
    pending = communicator.exchange([], [(peer, rows)], FORM, LABEL)
    pending.wait()
    return pending


def _pass_on(communicator, to, source):
    """This rank's number for one peer, that of another from it."""
    message = _message(communicator, 2, communicator.rank)
    pending = communicator.exchange([(to, message)], [(source, 2)], FORM, LABEL)
    pending.wait()
    assert (pending.parts()[0] == source).all()
    pending.release()


def _swap_with_all(transport):
    """Every rank sends every other messages of many sizes; what arrived, by round and peer."""
    communicator = _start(transport)
    others = [peer for peer in range(communicator.size) if peer != communicator.rank]
    seen = []
    for number, rows in enumerate([1, 500, 7, 50_000, 3]):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            form, label = Form(3, dtype, CPU), Label("keys", number, "forward")
            values = [100 * communicator.rank + 10 * peer + number for peer in others]
            memory = communicator.outgoing(rows * (len(others) - 1), form, label)
            messages = [*memory.split(rows), torch.empty(rows, 3, dtype=dtype)]  # one is not lent
            for message, value in zip(messages, values, strict=True):
                message.fill_(value)
            sends = list(zip(others, messages, strict=True))
            pending = communicator.exchange(sends, [(peer, rows) for peer in others], form, label)
            pending.wait()
            for peer, part in zip(others, pending.parts(), strict=True):
                assert part.shape == (rows, 3) and part.dtype == dtype
                assert (part == 100 * peer + 10 * communicator.rank + number).all()
                seen.append(peer)
            pending.release()
    return getattr(communicator, "shares_memory", None), len(seen)


@each_transport
def test_messages_arrive_as_they_were_sent(worker_pool, transport):
    shares = {"process group": None, "shared memory": True}[transport]
    assert worker_pool(4).run(_swap_with_all, transport) == [(shares, 5 * 3 * 3)] * 4


def _open_files():
    return len(os.listdir("/proc/self/fd"))


def _run_ahead(transport):
    """Rank 0 sends as fast as it can, rank 1 reads late; files that stay open on rank 0."""
    communicator = _start(transport)
    if communicator.rank == 1:
        time.sleep(0.3)
        for number in range(60):
            pending = _receive(communicator, 0)
            assert (pending.parts()[0] == number).all()
            pending.release()
        return None
    files = []
    for number in range(60):
        _send(communicator, 1, number)
        files.append(_open_files())
    return files[-1] - files[0]


@each_transport
def test_a_sender_may_run_ahead_and_takes_no_more_memory(worker_pool, transport):
    assert worker_pool(2).run(_run_ahead, transport)[0] <= 2 * MAX_UNREAD


def _read_late(transport):
    """Messages are read after later ones were sent; then their memory may be written again."""
    communicator = _start(transport)
    if communicator.rank == 0:
        for number in range(5):
            _send(communicator, 1, number)
        dist.barrier()
        return
    held = [_receive(communicator, 0) for _ in range(5)]
    dist.barrier()
    assert [float(pending.parts()[0][0, 0]) for pending in held] == [0, 1, 2, 3, 4]


@each_transport
def test_what_is_not_released_stays(worker_pool, transport):
    worker_pool(2).run(_read_late, transport)


def _only_two_exchange(transport):
    communicator = _start(transport)
    if communicator.rank < 2:
        _pass_on(communicator, 1 - communicator.rank, 1 - communicator.rank)
    dist.barrier()


@each_transport
def test_a_rank_without_exchanges_keeps_nobody_waiting(worker_pool, transport):
    worker_pool(3).run(_only_two_exchange, transport, timeout=20.0)


def _two_labels(transport):
    """Messages of one rank are told apart by their labels, whatever their order."""
    communicator = _start(transport)
    labels = [Label("keys", 2, "backward"), Label("gradients", 1, "backward")]
    if communicator.rank == 0:
        for value, label in enumerate(labels):
            message = _message(communicator, 2, value, label=label)
            communicator.exchange([(1, message)], [], FORM, label).wait()
        return None
    pending = [communicator.exchange([], [(0, 2)], FORM, label) for label in reversed(labels)]
    values = []
    for one in pending:
        one.wait()
        assert one.is_done()
        values.append(float(one.parts()[0][0, 0]))
    return values


@each_transport
def test_labels_tell_messages_apart(worker_pool, transport):
    assert worker_pool(2).run(_two_labels, transport)[1] == [1.0, 0.0]


# ---- lost peers ------------------------------------------------------------------------------


def _lose(transport, how, folder):
    """Rank 1 is lost after a first exchange; what rank 0 says of it, and how soon."""
    group = dist.new_group(timeout=timedelta(seconds=1.5))
    communicator = TRANSPORTS[transport](group)
    if communicator.rank == 1:
        _send(communicator, 0, 1.0)
        if how == "dies":
            if os.fork() == 0:  # a child that lives on holds none of its parent's links
                time.sleep(3.0)
                os._exit(0)
            os._exit(3)
        time.sleep(2.5)
        return
    _receive(communicator, 1).release()
    started = time.monotonic()
    with pytest.raises(TrainingError) as caught:
        if how == "reads nothing":
            for number in range(1000):
                _send(communicator, 1, number, rows=100_000)
        _receive(communicator, 1)
    (folder / "seconds").write_text(str(time.monotonic() - started))
    (folder / "message").write_text(str(caught.value))


@pytest.mark.parametrize(
    ("transport", "how"),
    [
        ("process group", "is silent"),
        ("shared memory", "is silent"),
        ("shared memory", "reads nothing"),
    ],
)
def test_a_silent_peer_is_named_within_the_timeout(worker_pool, tmp_path, transport, how):
    worker_pool(2).run(_lose, transport, how, tmp_path)
    message = (tmp_path / "message").read_text()
    assert "context-parallel rank 0 lost rank 1 (global rank 1) in step 1 of the" in message
    assert 1.0 < float((tmp_path / "seconds").read_text()) < 2.5


def test_a_dead_peer_is_named_at_once(worker_pool, tmp_path: Path):
    with pytest.raises(RankDiedError, match="code 3"):
        worker_pool(2).run(_lose, "shared memory", "dies", tmp_path)
    message = (tmp_path / "message").read_text()
    assert "context-parallel rank 0 lost rank 1 (global rank 1) in step 1 of the" in message
    assert "closed its connection" in message
    assert float((tmp_path / "seconds").read_text()) < 1.0


def _unequal_sizes():
    communicator = _start("shared memory")
    if communicator.rank == 0:
        _send(communicator, 1, 0.0, rows=2)
        return
    with pytest.raises(RuntimeError, match="rank 1 expects 36 bytes from rank 0 in step 1 of .*24"):
        _receive(communicator, 0, rows=3)


def test_a_message_of_another_size_is_an_error(worker_pool):
    worker_pool(2).run(_unequal_sizes)


# ---- which transport -------------------------------------------------------------------------


def _elsewhere(what):
    """The last rank can't share memory: messages arrive all the same. Whether each rank does."""
    if dist.get_rank() == 2:
        if what == "host":
            host.host_identity = lambda: b"another host".ljust(32)
        else:
            os.environ["MEGATRON_PACKED_SHARED_MEMORY"] = "0"
    communicator = _shared(dist.group.WORLD)
    assert _shared(dist.group.WORLD) is communicator  # one for all layers
    _pass_on(communicator, (communicator.rank + 1) % 3, (communicator.rank - 1) % 3)
    return communicator.shares_memory


@pytest.mark.parametrize("what", ["host", "variable"])
def test_one_rank_elsewhere_sends_all_through_the_group(worker_pool, what):
    try:
        assert worker_pool(3).run(_elsewhere, what) == [False] * 3
    finally:
        worker_pool(3).close()  # their host stays replaced


def _open_and_close():
    def shares_of_files():
        targets = []
        for name in os.listdir("/proc/self/fd"):
            try:
                targets.append(os.readlink(f"/proc/self/fd/{name}"))
            except FileNotFoundError:
                continue
        return sum("context-parallel-rows" in target for target in targets)

    group = dist.new_group()
    communicator = _shared(group)
    _pass_on(communicator, 1 - communicator.rank, 1 - communicator.rank)
    during = shares_of_files()
    dist.barrier()
    dist.destroy_process_group(group)
    del communicator, group
    gc.collect()
    return during > 0, shares_of_files()


def test_memory_goes_with_the_process_group(worker_pool):
    assert worker_pool(2).run(_open_and_close) == [(True, 0)] * 2
