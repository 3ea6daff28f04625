"""Rules of signals, watches and bad results."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.packed.arguments.config import Config


def pretended_errors_need_reruns(config: Config) -> Iterator[str]:
    """Nobody looks at pretended errors without reruns."""
    flags = config.faults
    if flags.error_injection_rate and flags.rerun_mode != "validate_results":
        yield (
            f"--error-injection-rate {flags.error_injection_rate}: needs --rerun-mode "
            f"validate_results, not {flags.rerun_mode}"
        )


def bad_batches_are_skipped_or_examined(config: Config) -> Iterator[str]:
    """A step that is examined ends the run; one that is skipped must be noticed."""
    flags = config.faults
    if not flags.skip_bad_batches:
        return
    if flags.rerun_mode == "validate_results":
        yield (
            f"--skip-bad-batches {flags.skip_bad_batches}: --rerun-mode validate_results ends the "
            "run at such a batch; choose one of them"
        )
    if not config.training.check_for_nan_in_loss_and_grad:
        yield (
            f"--skip-bad-batches {flags.skip_bad_batches}: needs the check that "
            "--no-check-for-nan-in-loss-and-grad turns off"
        )


RULES = (pretended_errors_need_reruns, bad_batches_are_skipped_or_examined)
