"""all_gather: everything that a rank needs in one exchange, under its local tasks.

```
p2p          [local      ][from r-1   ][from r-2   ][from r-3   ]
all_gather   [local      ][from r-1, r-2 and r-3                ]     one buffer for all
```

The fewest and largest messages and kernel calls; the buffer grows to all keys that the rank needs.

Source: the all-gather context parallelism of Llama 3 (Dubey et al. 2024) and TransformerEngine.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DEFAULT_PARTITION = "zigzag"


def exchange_of_offset(ring_size: int, stages: int | None) -> NDArray[np.int64]:
    """One exchange covers all offsets."""
    return np.minimum(np.arange(ring_size), 1)
