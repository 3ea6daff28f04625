"""What is saved, when, and how a run goes on from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is saved, when, and how a run goes on from it."""

    SECTION: ClassVar[str] = "checkpointing"
