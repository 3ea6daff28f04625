"""How attention projects, scales and masks beyond plain heads: latent attention, windows, gates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """How attention projects, scales and masks: latent attention, windows, gates."""

    SECTION: ClassVar[str] = "attention"
