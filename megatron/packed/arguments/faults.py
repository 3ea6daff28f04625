"""What a run does about signals, stragglers, bad values and bad files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class FaultsConfig:
    """What a run does about signals, stragglers, bad values and bad files."""

    SECTION: ClassVar[str] = "faults"
