"""Broken rules of signals, watches and bad results: rule, flags, message, world size."""

from __future__ import annotations

_REFUSED = "--rerun-mode validate_results ends the run at such a batch; choose one"

BROKEN_FAULTS = [
    (
        "pretended_errors_need_reruns",
        "--error-injection-rate 100",
        "--error-injection-rate 100: needs --rerun-mode validate_results, not disabled",
        1,
    ),
    (
        "pretended_errors_need_reruns",
        "--error-injection-rate 100 --rerun-mode report_stats",
        "needs --rerun-mode validate_results, not report_stats",
        1,
    ),
    (
        "bad_batches_are_skipped_or_examined",
        "--skip-bad-batches 2 --rerun-mode validate_results",
        f"--skip-bad-batches 2: {_REFUSED}",
        1,
    ),
    (
        "bad_batches_are_skipped_or_examined",
        "--skip-bad-batches 2 --no-check-for-nan-in-loss-and-grad",
        "needs the check that --no-check-for-nan-in-loss-and-grad turns off",
        1,
    ),
]
