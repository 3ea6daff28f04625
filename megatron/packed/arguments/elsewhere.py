"""Flags that launch scripts carry from elsewhere: other spellings, and what upstream alone has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.packed.arguments.declare import flag

_DISTILLATION = (
    "distillation adds a teacher's loss, which isn't part of this build; train without it"
)


@dataclass(frozen=True, kw_only=True)
class ElsewhereConfig:
    """Accepted so that a launch script runs as it is."""

    SECTION: ClassVar[str] = "flags from elsewhere"

    use_packed_sequences: bool = flag("Another spelling of --use-packed-sequence.", default=False)
    packed_seq_cu_seqlens_style: str | None = flag(
        "How boundaries of packs are written; always as cumulative lengths, with "
        "--use-packed-sequence.",
        choices=("flash_attn",),
    )
    dataloader_inter_document_masking: bool = flag(
        "Another spelling of --use-packed-sequence: no attention, positions or targets across "
        "documents.",
        default=False,
    )
    enable_experimental: bool = flag(
        "Accepted; what is experimental upstream has flags of its own.", default=False
    )
    test_mode: bool = flag(
        "Accepted; upstream's run-time checks of its data loader are always on here.",
        default=False,
    )
    export_te_mcore_model: bool = flag(
        "Lay the model out for TensorRT Model Optimizer.", default=False, refused=_DISTILLATION
    )
    export_kd_teacher_load: str | None = flag(
        "Checkpoint of a teacher to distil from.", refused=_DISTILLATION
    )
    export_kd_cfg: str | None = flag("Settings of a distillation.", refused=_DISTILLATION)
