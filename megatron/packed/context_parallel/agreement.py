"""Debug mode: every rank of a model must plan with the same metadata."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from megatron.packed.errors import TrainingError


class HasDigest(Protocol):
    """Metadata with a checksum that needs no device, such as `PackedSeqParamsWithValidTokens`."""

    def digest(self) -> int:
        """Checksum of what all ranks must agree on."""


def assert_same_metadata(params: HasDigest, group: dist.ProcessGroup | None, what: str) -> None:
    """Compare a micro-batch's metadata over a host group; a collective call.

    Call it in a debug mode only: it exchanges one integer and waits for the slowest rank.

    Args:
        params: this rank's metadata.
        group: a gloo group of the tensor-, context- and pipeline-parallel ranks that share a
            micro-batch. None, or a group of one, has nothing to compare.
        what: named in the message, such as "iteration 7, micro-batch 2".

    Raises:
        TrainingError: on every rank of the group, naming the ranks that differ from the first.
    """
    if group is None or group.size() == 1:
        return
    mine = torch.tensor([params.digest()], dtype=torch.int64)
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    digests = [int(value) for value in everyone]
    different = [rank for rank, value in enumerate(digests) if value != digests[0]]
    if different:
        names = ", ".join(str(dist.get_global_rank(group, rank)) for rank in different)
        raise TrainingError(
            f"{what}: rank(s) {names} planned this pack with other boundaries than rank "
            f"{dist.get_global_rank(group, 0)}; all ranks of a model must read the same batch"
        )
