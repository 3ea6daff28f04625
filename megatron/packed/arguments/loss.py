"""What is minimised: reductions over documents and multi-token prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What is minimised: reductions over documents and multi-token prediction."""

    SECTION: ClassVar[str] = "loss"
