"""The three ways a run can end early, each with one message a user can act on."""

from __future__ import annotations


class ConfigurationError(ValueError):
    """A flag, or a combination of flags, that can't be honoured."""


class DataError(ValueError):
    """A corpus, index, tokenizer or output folder that can't be used."""


class TrainingError(RuntimeError):
    """A failure inside a running job, such as a NaN loss."""
