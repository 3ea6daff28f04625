"""What programs do around their work: turn a user's mistake into a message."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from megatron.packed.arguments import CommandLineError
from megatron.packed.errors import ConfigurationError, DataError, TrainingError

EXIT_FAILURE = 1
EXIT_USAGE = 2


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn a user's mistake into one message and an exit code, without a traceback.

    All ranks find the same mistake in flags and files; rank 0 speaks for them. A training error
    is one rank's news, so each rank that raises it prints it.

    Exit codes: 2 for the command line, 1 for data, configuration and training errors.
    """
    try:
        yield
    except (ConfigurationError, DataError) as error:
        usage = isinstance(error, CommandLineError)
        _leave(f"error: {error}", EXIT_USAGE if usage else EXIT_FAILURE, _is_first_rank())
    except TrainingError as error:
        _leave(f"error: {error}", EXIT_FAILURE, _is_first_rank())


def _leave(message: str, code: int, speaks: bool) -> None:
    if speaks:
        print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    # Not sys.exit: process groups of a failed run would be torn down with warnings and waits.
    os._exit(code)
