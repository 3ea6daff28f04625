"""striped: the ring on tokens dealt round robin.

```
one segment, 2 ranks:        k of rank 0  0 2 4 6        k of rank 1  1 3 5 7
q of rank 0    0                          \\ . . .                     . . . .
               2                          # \\ . .                     \\ . . .   causal, one row
               4                          # # \\ .                     # \\ . .   later: the band
               6                          # # # \\                     # # \\ .   has low = 1
```

Every pair of ranks has about half a square of work in every exchange, so no rank waits for another,
at the price of moving nearly all keys. Segments need no alignment of their own.

Source: Striped Attention (Brandon et al. 2023).
"""

from __future__ import annotations

from megatron.packed.attention.plans.ring import exchange_of_offset

__all__ = ["DEFAULT_PARTITION", "exchange_of_offset"]

DEFAULT_PARTITION = "striped"
