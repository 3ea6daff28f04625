"""a2a and a2a+p2p: heads for tokens inside subgroups, and a ring between them.

```
8 ranks, a2a groups of 4       {0 1 2 3}   {4 5 6 7}       --hierarchical-context-parallel-sizes 4 2
before                         each rank: its tokens, all heads
after the head exchange        each rank of a group: all tokens of the group, 1/4 of the heads
ring between groups            0 <-> 4, 1 <-> 5, 2 <-> 6, 3 <-> 7
```

`a2a` is the case of one group: then every rank has the whole pack, and the steps are the local
one. Neighbouring ranks pool neighbouring chunks, so a zigzag over all ranks is one over the groups.

Sources: DeepSpeed-Ulysses (Jacobs et al. 2023); LoongTrain and TransformerEngine for the hierarchy.
"""

from __future__ import annotations

import numpy as np

from megatron.packed.attention.plans.plan import HeadExchange
from megatron.packed.packing.partition import Partition

DEFAULT_PARTITION_A2A = "contiguous"
DEFAULT_PARTITION_HIERARCHICAL = "zigzag"


def head_exchange(partition: Partition, cp_rank: int, group_size: int) -> HeadExchange:
    """Members of this rank's subgroup, and the order of their rows by position.

    Args:
        partition: token partition over all ranks.
        cp_rank: this rank.
        group_size: ranks of a subgroup; neighbours.
    """
    place = cp_rank % group_size
    members = tuple(range(cp_rank - place, cp_rank - place + group_size))
    positions = np.concatenate([partition.indices(member) for member in members])
    order = np.argsort(positions, kind="stable")
    in_order = bool(np.all(positions[1:] > positions[:-1]))
    return HeadExchange(
        members=members,
        place=place,
        member_rows=partition.local_tokens,
        order=None if in_order else order,
    )
