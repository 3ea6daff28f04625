"""What a stage expects to receive, against a simulation of messages between stages."""

from __future__ import annotations

import pytest

from megatron.packed.arguments.stages import Stages
from megatron.packed.training.pipeline import arrivals


def sent(stages: Stages, process: int, micro_batches: int, group: int) -> list[tuple[int, int]]:
    """(micro-batch, stage) in the order in which a process runs forward."""
    order = []
    for first in range(0, micro_batches, group):
        here = range(first, min(first + group, micro_batches))
        order += [(m, c * stages.processes + process) for c in range(stages.virtual) for m in here]
    return order


@pytest.mark.parametrize(
    ("processes", "virtual", "micro_batches", "group"),
    [(1, 1, 3, 3), (2, 1, 5, 5), (4, 1, 2, 2), (2, 2, 4, 2), (4, 2, 9, 5), (4, 3, 8, 4)],
)
@pytest.mark.parametrize("predicting", [False, True])
def test_arrivals_are_what_neighbours_send(
    processes: int, virtual: int, micro_batches: int, group: int, predicting: bool
) -> None:
    count = processes * virtual
    predictions = [0] * count
    if predicting and count > 1:
        predictions[-2] = 2
    stages = Stages(processes, virtual, (1,) * count, tuple(predictions))
    last = count - 1
    for process in range(processes):
        previous, following = (process - 1) % processes, (process + 1) % processes
        depths = 3 if predicting and count > 1 else 1
        forward = [
            (m, depths if stage >= last - 1 else 1)
            for m, stage in sent(stages, previous, micro_batches, group)
            if stage != last
        ]
        # Backward is the same walk with stages counted from the end.
        backward = [
            (m, depths if last - stage - 1 >= last - 1 else 1)
            for m, stage in sent(
                stages, (processes - 1 - following) % processes, micro_batches, group
            )
            if stage != last
        ]
        for expected, direction in ((forward, False), (backward, True)):
            got = arrivals(stages, process, micro_batches, group, backward=direction)
            assert [(each.micro_batch, each.depths) for each in got] == expected
