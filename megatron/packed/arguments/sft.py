"""Supervised fine-tuning on conversations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class FineTuningConfig:
    """Supervised fine-tuning on conversations."""

    SECTION: ClassVar[str] = "fine-tuning"
