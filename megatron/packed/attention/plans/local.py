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

import numpy as np
from numpy.typing import NDArray

DEFAULT_PARTITION = "contiguous"


def exchange_of_offset(ring_size: int, stages: int | None) -> NDArray[np.int64]:
    """Nothing is exchanged.

    Raises:
        ValueError: with more than one rank.
    """
    if ring_size != 1:
        raise ValueError(f"kind: 'local' is for one rank, not {ring_size}; use 'p2p'")
    return np.zeros(1, np.int64)
