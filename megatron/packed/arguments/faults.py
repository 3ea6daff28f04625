"""What a run does about signals, stragglers, bad values and bad files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.packed.arguments.declare import EVERYWHERE, Replaced, flag


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
    heartbeat_file: str | None = flag(
        "File that rank 0 replaces about once a second with where the run is, as JSON."
    )
    log_straggler: bool = flag(
        "Log how long ranks work on their own before gradients are reduced, and warn of slow ones.",
        default=False,
    )
    straggler_minmax_count: int = flag(
        "Ranks that --log-straggler names at either end.", default=1, at_least=1
    )
    straggler_threshold: float = flag(
        "A rank that takes this many times the median is warned of.", default=1.5, above=1
    )
    rerun_mode: str = flag(
        "What to do about suspicious results: nothing, run the step again to tell faults of the "
        "hardware from the data, or run every step twice and report differences.",
        default="disabled",
        choices=("disabled", "validate_results", "report_stats"),
    )
    error_injection_rate: int = flag(
        "Pretend a suspicious result about once in so many checks; 0 for never.",
        default=0,
        at_least=0,
    )
    error_injection_type: str = flag(
        "What the pretended result turns out to be.",
        default="transient_error",
        choices=("correct_result", "transient_error", "persistent_error"),
    )
    result_rejected_tracker_filename: str | None = flag(
        "File that every suspicious result is appended to."
    )
    check_for_spiky_loss: bool = flag(
        "Look for losses of micro-batches ten times those before.", default=False
    )
    check_for_large_grads: bool = flag(
        "Look for local gradients ten times those before.", default=False
    )
    skip_bad_batches: int = flag(
        "Global batches with NaN or Inf that are left out before the run ends with an error.",
        default=0,
        at_least=0,
    )
    disable_straggler_on_startup: bool = flag(
        "Start with --log-straggler off, to be switched on through a port.",
        default=False,
        refused="there is no port to switch it; leave --log-straggler out instead",
    )
    straggler_ctrlr_port: int = flag(
        "Port that switches --log-straggler.",
        default=65535,
        replaced=Replaced("there is no port", "on for the whole run", 65535, EVERYWHERE),
    )
