"""local: one rank holds everything.

```
q rows   # . . . .
         # # . . .      segments a a a b b: one causal task each, nothing travels
         # # # . .
         . . . # .
         . . . # #
```
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megatron.packed.attention.plans.plan import AttentionPlan, Step
from megatron.packed.attention.segments import SegmentLayout
from megatron.packed.attention.task_graph import UNBOUNDED, Mask, Tiles

DEFAULT_PARTITION = "contiguous"


def exchange_of_offset(ring_size: int, stages: int | None) -> NDArray[np.int64]:
    """Nothing is exchanged.

    Raises:
        ValueError: with more than one rank.
    """
    if ring_size != 1:
        raise ValueError(f"kind: 'local' is for one rank, not {ring_size}; use 'p2p'")
    return np.zeros(1, np.int64)


@lru_cache(maxsize=16)
def plan_of_layout(layout: SegmentLayout, window: int | None = None) -> AttentionPlan:
    """The plan of one rank's segments; every layer of a micro-batch asks for the same ones.

    Args:
        layout: segments over rows, which the plan counts through.
        window: tokens to the left that stay visible next to the query itself; None for all.
    """
    start, count = np.array(layout.starts, np.int64), np.array(layout.lengths, np.int64)
    low, high = (np.full_like(count, x) for x in (0, UNBOUNDED if window is None else window))
    bands = np.stack([start, count, start, count, low, high], axis=1)
    return AttentionPlan(
        kind="local",
        partition=DEFAULT_PARTITION,
        mask=Mask("causal", window),
        cp_size=1,
        cp_rank=0,
        rows=layout.rows * layout.row_length,
        real_rows=int(count.sum()),
        ring_size=1,
        steps=(Step(0, (), (), Tiles(bands, fresh=len(bands))),),
    )
