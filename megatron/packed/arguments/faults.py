"""What a run does about signals, stragglers, bad values and bad files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.packed.arguments.declare import flag


@dataclass(frozen=True, kw_only=True)
class FaultsConfig:
    """What a run does about signals, stragglers, bad values and bad files."""

    SECTION: ClassVar[str] = "faults"

    exit_signal_handler: bool = flag(
        "On --exit-signal or SIGUSR1 finish the step, save, and end with exit code 0; a second "
        "signal ends at once.",
        default=False,
    )
    exit_signal: str = flag(
        "The signal that --exit-signal-handler listens to, besides SIGUSR1.",
        default="SIGTERM",
        choices=("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"),
    )
    exit_signal_handler_for_dataloader: bool = flag(
        "Keep the signal from data-loader workers; always so.", default=False
    )
