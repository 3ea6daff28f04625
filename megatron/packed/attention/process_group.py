"""Exchanges over process groups of torch.distributed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron.packed.attention.communicator import (
    Expected,
    Form,
    Label,
    Landing,
    Message,
    Pending,
)
from megatron.packed.errors import TrainingError


class _Works(Landing):
    """Posted operations of torch.distributed, with the peers they belong to."""

    def __init__(
        self,
        sends: Sequence[Message],
        receives: Sequence[Expected],
        form: Form,
        rank: int,
        label: Label,
    ) -> None:
        super().__init__(receives, form)
        self.works: list[tuple[Any, str]] = []
        self._sends = sends  # alive until the messages have left
        self._rank = rank
        self._label = label

    def wait(self) -> None:
        for work, peer in self.works:
            try:
                work.wait()
            except RuntimeError as error:
                raise TrainingError(
                    f"context-parallel rank {self._rank} lost {peer} in {self._label}; look for "
                    f"the first error in that rank's log ({_first_line(error)})"
                ) from error
        self.works, self._sends = [], ()

    def is_done(self) -> bool:
        return all(work.is_completed() for work, _ in self.works)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class ProcessGroupCommunicator:
    """Exchanges over a context-parallel process group of torch.distributed.

    Args:
        group: the group; its ranks are the context-parallel ranks. torch.distributed keeps it until
            it is destroyed; this object does not.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._weak_group = weakref.ref(group)
        self._global_ranks = dist.get_process_group_ranks(group)
        # NCCL knows no tags. It also wants sends and receives of an exchange in one group call.
        self.in_order = dist.get_backend(group) != "gloo"

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self._weak_group()
        if group is None:
            raise RuntimeError("the context-parallel process group was destroyed")
        return group

    def outgoing(self, rows: int, form: Form, label: Label) -> Tensor:
        """Ordinary memory; see `Communicator`."""
        return form.empty(rows)

    def exchange(
        self,
        sends: Sequence[Message],
        receives: Sequence[Expected],
        form: Form,
        label: Label,
        *,
        tag: int | None = None,
    ) -> Pending:
        """Post messages; see `Communicator`. `tag` keeps them apart, by default the label's."""
        works = _Works(sends, receives, form, self.rank, label)
        landing = [(peer, part) for (peer, _), part in zip(receives, works.parts(), strict=True)]
        try:
            works.works = (
                self._batch(sends, landing)
                if self.in_order
                else self._tagged(sends, landing, label.tag if tag is None else tag)
            )
        except RuntimeError as error:
            peers = sorted({peer for peer, _ in (*receives, *sends)})
            raise TrainingError(
                f"context-parallel rank {self.rank} could not reach rank(s) "
                f"{', '.join(map(self.name, peers))} in {label} ({_first_line(error)})"
            ) from error
        return works

    def name(self, peer: int) -> str:
        """A context-parallel rank as errors call it."""
        return f"rank {peer} (global rank {self._global_ranks[peer]})"

    def _tagged(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int
    ) -> list[tuple[Any, str]]:
        works = []
        for peer, tensor in receives:
            work = dist.irecv(tensor, self._global_ranks[peer], group=self._group, tag=tag)
            works.append((work, self.name(peer)))
        for peer, tensor in sends:
            work = dist.isend(tensor, self._global_ranks[peer], group=self._group, tag=tag)
            works.append((work, self.name(peer)))
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
        return [(work, ", ".join(map(self.name, peers))) for work in works]
