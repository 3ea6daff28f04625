"""What programs do around their work: turn a user's mistake into a message."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator

from megatron.packed.arguments import CommandLineError, ConfigFileError
from megatron.packed.errors import (
    EXIT_FAILURE,
    EXIT_USAGE,
    ConfigurationError,
    DataError,
    TrainingError,
)
from megatron.packed.processes import end_workers

# Seconds that other ranks leave to rank 0 to say what it has found, too. A launcher ends all
# processes once one has failed, so a rank that leaves at once would take the message with it.
_RANK_0_FIRST = 15.0


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn a user's mistake into one message and an exit code, without a traceback.

    A mistake in flags or files is found by all ranks, a NaN is told to all: rank 0 speaks first,
    and the launcher ends the others. A rank that is still there after a while was alone with its
    error, and prints it.

    Exit codes: 2 for the command line, 1 for data, configuration and training errors; all are
    listed in docs/operations.md.
    """
    try:
        yield
    except (ConfigurationError, DataError) as error:
        usage = isinstance(error, (CommandLineError, ConfigFileError))
        _leave(f"error: {error}", EXIT_USAGE if usage else EXIT_FAILURE)
    except TrainingError as error:
        _leave(f"error: {error}", error.exit_code)


def _leave(message: str, code: int) -> None:
    if not _is_first_rank():
        time.sleep(_RANK_0_FIRST)
    print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    end_workers()
    # Not sys.exit: process groups of a failed run would be torn down with warnings and waits.
    os._exit(code)
