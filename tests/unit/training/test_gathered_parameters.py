"""Weights are read between steps only once the overlapped gather has brought them."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from megatron.packed.training.replicas import gathered_parameters


@dataclass
class Chunk:
    """Stands for megatron-core's DistributedDataParallel."""

    overlap: bool
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ddp_config = SimpleNamespace(overlap_param_gather=self.overlap)

    def disable_forward_pre_hook(self) -> None:
        self.calls.append("gather")

    def enable_forward_pre_hook(self) -> None:
        self.calls.append("overlap again")


def test_overlapped_chunks_gather_first() -> None:
    plain, overlapped = Chunk(False), Chunk(True)
    with gathered_parameters([plain, overlapped]):
        assert (plain.calls, overlapped.calls) == ([], ["gather"])
    assert (plain.calls, overlapped.calls) == ([], ["gather", "overlap again"])


def test_an_error_leaves_the_overlap_as_it_was() -> None:
    chunk = Chunk(True)
    with pytest.raises(OSError), gathered_parameters([chunk]):
        raise OSError
    assert chunk.calls == ["gather", "overlap again"]
