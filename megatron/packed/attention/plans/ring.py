"""p2p: one exchange a peer, on segments cut so that every rank has the same work.

```
one segment, 2 ranks (zigzag):     k chunk  0 1 2 3      step 0, local     both: the tiles on a
rank 0 holds q chunks 0 and 3      q  0 r0  \\ . . .                        rank's own chunks
rank 1 holds q chunks 1 and 2         1 r1  # \\ . .      step 1            rank 0: chunk 3 sees
                                      2 r1  # # \\ .                        chunks 1 and 2;
                                      3 r0  # # # \\                        rank 1: chunks 1 and 2
                                                                           see chunk 0, and chunk 3
                                                                           never travels
```

A ring that hands everything on brings (CP - 1)/CP of all keys to every rank. Here each exchange
goes straight from owner to user and holds the rows that the user's queries see: 3/4 of that under
the causal zigzag, and a segment never reaches a rank that owns none of its later rows.

Sources: Ring Attention (Liu et al. 2023); zigzag as in ring-flash-attention and TransformerEngine.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DEFAULT_PARTITION = "zigzag"


def exchange_of_offset(ring_size: int, stages: int | None) -> NDArray[np.int64]:
    """Every offset is an exchange of its own: two key-value buffers of local size at most."""
    return np.arange(ring_size)
