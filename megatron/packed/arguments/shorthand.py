"""Short ways to a validated config, for tests, benchmarks and tools."""

from __future__ import annotations

import shlex
import types
from collections.abc import Mapping
from typing import Any

from megatron.packed.arguments.config import COMMAND_LINE, Config, build_config
from megatron.packed.arguments.parser import parse_arguments
from megatron.packed.arguments.validation import validate


def config_from_flags(
    flags: str,
    environ: Mapping[str, str] = types.MappingProxyType({}),
    *,
    accelerator: str | None = "cpu",
) -> Config:
    """Build a validated config from flags written as in a shell.

    Args:
        flags: For example `"--num-layers 2 --hidden-size 64"`.
        environ: The launcher's variables (WORLD_SIZE, RANK, ...).
        accelerator: What `--accelerator auto` means, see `validate`.

    Raises:
        ConfigurationError: As `parse_arguments` and `validate`.
    """
    return validate(parse_arguments(shlex.split(flags), environ), accelerator=accelerator)


def override(config: Config, **values: Any) -> Config:
    """Return a validated config with some fields set and everything derived anew.

    Args:
        config: What to start from.
        **values: New values by field name, whichever group the field is in.

    Raises:
        ConfigurationError: A name is unknown, or the result breaks a rule.
    """
    given = {**config.given, **values}
    sources = {dest: config.sources.get(dest, COMMAND_LINE) for dest in given}
    known = config.runtime.accelerator if config.runtime.accelerator != "auto" else None
    return validate(build_config(given, sources), accelerator=known)
