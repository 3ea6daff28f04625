"""Every rule that ties flags together, each a small function that yields what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron.packed.arguments.config import Config, all_specs
from megatron.packed.errors import ConfigurationError

Rule = Callable[[Config], Iterator[str]]


def check_values(config: Config) -> None:
    """Check each value by itself: choices and bounds.

    Raises:
        ConfigurationError: Lists every value out of range.
    """
    problems = []
    for dest, spec in all_specs().items():
        value = config.get(dest)
        rule = spec.violated_by(value)
        if rule:
            problems.append(f"{spec.name} {value}: {rule}")
    raise_problems(problems)


def check_rules(config: Config) -> None:
    """Check every cross-flag rule on a config whose derived fields are filled in.

    Raises:
        ConfigurationError: Lists every broken rule.
    """
    raise_problems([message for rule in RULES for message in rule(config)])


def raise_problems(problems: list[str]) -> None:
    """Raise one error for a list of messages; do nothing for an empty one."""
    if len(problems) == 1:
        raise ConfigurationError(problems[0])
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise ConfigurationError(f"{len(problems)} problems in the flags:\n{lines}")


RULES: tuple[Rule, ...] = ()
