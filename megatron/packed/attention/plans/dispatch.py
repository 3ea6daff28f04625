"""dispatch: chunks to ranks by attention work; exactly the keys that a rank needs come to it.

```
chunks of 2 tokens, one segment of 16, 2 ranks   0 1 2 3 4 5 6 7
heaviest first to the least loaded rank          0 1 1 0 0 1 1 0     68 pairs each
```

Chunks know nothing of segments, so short segments stay whole on one rank and nothing of them
travels. The exchanges are the ring's; `stages` groups them when a rank has many peers.

Source: MagiAttention's min-heap dispatch and multi-stage overlap.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DEFAULT_PARTITION = "dispatch"


def exchange_of_offset(ring_size: int, stages: int | None) -> NDArray[np.int64]:
    """One exchange an offset, or `stages` exchanges of about as many offsets each."""
    offsets = ring_size - 1
    if stages is None or stages >= offsets:
        return np.arange(ring_size)
    return -(-np.arange(ring_size) * stages // offsets)


def effective_chunk_size(chunk_size: int, valid_tokens: int, cp_size: int) -> int:
    """Chunk size that `--magi-attn-chunk-size` leads to.

    Args:
        chunk_size: the flag, tokens.
        valid_tokens: real tokens of the pack.
        cp_size: context-parallel ranks.

    Returns:
        The flag, or the last power of two that is not above the real tokens of a rank, whichever
        is less; at least 1. Align the pack to `cp_size` times this.
    """
    share = max(valid_tokens // cp_size, 1)
    return max(1, min(chunk_size, 1 << (share.bit_length() - 1)))
