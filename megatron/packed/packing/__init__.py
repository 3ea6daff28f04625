"""Rows and documents to packs: integers only, without torch.distributed.

`PackedBatch` and `PackedSeqParamsWithValidTokens` need torch and megatron-core and load on first
use, so that planning in a data-loader worker or a tool stays light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.packed.packing.alignment import Alignment
from megatron.packed.packing.boundaries import (
    SegmentBoundaries,
    boundaries_from_document_index,
    generate_cu_seqlens_and_max_seqlen_batch,
)
from megatron.packed.packing.documents import DocumentPack, PackerCounters
from megatron.packed.packing.packer_base import DocumentPacker
from megatron.packed.packing.packers import build_document_packer
from megatron.packed.packing.plan import PackPlan
from megatron.packed.packing.rows import build_pack_plan
from megatron.packed.packing.views import PackStatistics, PackView

if TYPE_CHECKING:
    from megatron.packed.packing.batch import PackedBatch, PackedSeqParamsWithValidTokens

__all__ = [
    "Alignment",
    "DocumentPack",
    "DocumentPacker",
    "PackPlan",
    "PackStatistics",
    "PackView",
    "PackedBatch",
    "PackedSeqParamsWithValidTokens",
    "PackerCounters",
    "SegmentBoundaries",
    "boundaries_from_document_index",
    "build_document_packer",
    "build_pack_plan",
    "generate_cu_seqlens_and_max_seqlen_batch",
]

_TORCH_NAMES = ("PackedBatch", "PackedSeqParamsWithValidTokens")


def __getattr__(name: str) -> Any:
    if name in _TORCH_NAMES:
        from megatron.packed.packing import batch

        return getattr(batch, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
