"""Who holds which token of a pack, and how it is exchanged.

Names load on first use: the command line needs the table of helpers alone, planning no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.packed.context_parallel.context_parallel_helper import (
        ContextParallelHelper,
        MagiAttnContextParallelHelper,
        RingAttnContextParallelHelper,
        UlyssesContextParallelHelper,
        build_context_parallel_helper,
    )
    from megatron.packed.packing.partition import (
        Partition,
        inverse_permutation,
        make_partition,
        partition_indices,
        real_cu_seqlens_per_rank,
    )

__all__ = [
    "ContextParallelHelper",
    "MagiAttnContextParallelHelper",
    "Partition",
    "RingAttnContextParallelHelper",
    "UlyssesContextParallelHelper",
    "build_context_parallel_helper",
    "inverse_permutation",
    "make_partition",
    "partition_indices",
    "real_cu_seqlens_per_rank",
]

_PARTITION = "megatron.packed.packing.partition"


def __getattr__(name: str) -> Any:
    if name in __all__:
        from importlib import import_module

        is_helper = name.lower().replace("_", "").endswith("contextparallelhelper")
        module = f"{__name__}.context_parallel_helper" if is_helper else _PARTITION
        return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
