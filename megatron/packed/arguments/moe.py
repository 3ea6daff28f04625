"""Experts, their router and their dispatcher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Experts, their router and their dispatcher."""

    SECTION: ClassVar[str] = "mixture of experts"
