"""Lengths of a run counted in samples, ramp-up of the batch, and when to exit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Lengths of a run counted in samples, ramp-up of the batch, and when to exit."""

    SECTION: ClassVar[str] = "schedule"
