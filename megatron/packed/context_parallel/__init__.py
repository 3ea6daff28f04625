"""Who holds which token of a pack, and how it is exchanged."""

from __future__ import annotations

from megatron.packed.context_parallel.partition import (
    Partition,
    inverse_permutation,
    make_partition,
    partition_indices,
    real_cu_seqlens_per_rank,
)

__all__ = [
    "Partition",
    "inverse_permutation",
    "make_partition",
    "partition_indices",
    "real_cu_seqlens_per_rank",
]
