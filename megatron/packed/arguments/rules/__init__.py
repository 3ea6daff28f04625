"""Every rule that ties flags together: one small function each, yielding what is wrong.

A message names the flag and its value, the rule, and a way out. Rules see what was asked for, with
derived fields filled in; they never change anything. A new rule is a function in the module it
belongs to, added to the tuple at that module's end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron.packed.arguments.config import Config, all_specs
from megatron.packed.arguments.declare import EVERYWHERE, FlagSpec
from megatron.packed.arguments.rules import (
    attention,
    checkpoint,
    context_parallel,
    data,
    faults,
    hardware,
    heterogeneous,
    layout,
    linear_attention,
    loss,
    model,
    moe,
    packing,
    pipeline,
    schedule,
    sft,
    training,
)
from megatron.packed.errors import ConfigurationError

Rule = Callable[[Config], Iterator[str]]

RULES: tuple[Rule, ...] = (
    layout.RULES
    + pipeline.RULES
    + model.RULES
    + linear_attention.RULES
    + attention.RULES
    + heterogeneous.RULES
    + moe.RULES
    + training.RULES
    + schedule.RULES
    + data.RULES
    + packing.RULES
    + sft.RULES
    + context_parallel.RULES
    + checkpoint.RULES
    + loss.RULES
    + faults.RULES
)
HARDWARE_RULES: tuple[Rule, ...] = hardware.RULES + moe.HARDWARE_RULES


def check_values(config: Config) -> None:
    """Check each value by itself: choices, bounds, and flags this build refuses.

    Raises:
        ConfigurationError: Lists every value that can't be honoured.
    """
    problems = []
    for dest, spec in all_specs().items():
        value = config.get(dest)
        if rule := spec.violated_by(value):
            problems.append(f"{spec.name} {value}: {rule}")
        elif _is_refused(config, spec, EVERYWHERE):
            problems.append(_refusal(config, spec))
    _raise(problems)


def _is_refused(config: Config, spec: FlagSpec, on: tuple[str, ...]) -> bool:
    return bool(spec.refused) and spec.refused_on == on and config.get(spec.dest) != spec.default


def _refusal(config: Config, spec: FlagSpec) -> str:
    value = f" {config.get(spec.dest)}" if spec.takes_value and not spec.is_list else ""
    return f"{spec.name}{value} is refused: {spec.refused}"


def check_rules(config: Config) -> None:
    """Check every rule among flags.

    Raises:
        ConfigurationError: Lists every broken rule.
    """
    _raise([message for rule in RULES for message in rule(config)])


def check_hardware_rules(config: Config) -> None:
    """Check the rules that depend on the accelerator, which is known by now.

    Raises:
        ConfigurationError: Lists every broken rule.
    """
    refusals = [
        _refusal(config, spec)
        for spec in all_specs().values()
        if _is_refused(config, spec, (config.device_type,))
    ]
    _raise(refusals + [message for rule in HARDWARE_RULES for message in rule(config)])


def check_strictness(config: Config) -> None:
    """Check that nothing was replaced, where --strict-flags asks for that.

    Raises:
        ConfigurationError: Lists every replacement.
    """
    if config.runtime.strict_flags:
        _raise(
            [
                f"{row.flag} {row.asked}: would be replaced by {row.used}, since {row.why}; "
                "leave it out, or --strict-flags"
                for row in config.replacements
                if not row.exact_spelling
            ]
        )


def _raise(problems: list[str]) -> None:
    if len(problems) == 1:
        raise ConfigurationError(problems[0])
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise ConfigurationError(f"{len(problems)} problems in the flags:\n{lines}")
