"""The three ways a run can end early, each with one message a user can act on."""

from __future__ import annotations

# Exit codes of a rank besides 0; docs/operations.md has them all.
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_HANG = 3


class ConfigurationError(ValueError):
    """A flag, or a combination of flags, that can't be honoured."""


class DataError(ValueError):
    """A corpus, index, tokenizer or output folder that can't be used."""


class TrainingError(RuntimeError):
    """A failure inside a running job, such as a NaN loss.

    Attributes:
        exit_code: of the program that ends for it.
    """

    exit_code = EXIT_FAILURE
