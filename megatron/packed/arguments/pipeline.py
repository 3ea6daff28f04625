"""How layers are laid over pipeline stages and virtual stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How layers are laid over pipeline stages and virtual stages."""

    SECTION: ClassVar[str] = "pipeline"
