"""The config group of everything that megatron-core declares and no other group does."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from megatron.packed.arguments import core_classes
from megatron.packed.arguments.core_fields import CoreField, core_fields
from megatron.packed.arguments.declare import EVERYWHERE, FlagSpec, Replaced, flag, flag_specs

SECTION = "megatron-core"
_LONGEST_HELP = 300


def build_core_group(hand_written: Mapping[str, type]) -> type:
    """Make the frozen dataclass of the flags that the installed megatron-core brings by itself.

    Args:
        hand_written: All other groups, whose fields and spellings come first.
    """
    taken: set[str] = set()
    for group, group_class in hand_written.items():
        for spec in flag_specs(group_class, group, ""):
            taken |= {spec.dest, *spec.names}
    fields = [
        (field.name, _annotation(field), _declare(field))
        for field in core_fields().values()
        if field.name not in core_classes.INTERNAL
        and not taken.intersection({field.name, *_spellings(field)})
    ]
    return dataclasses.make_dataclass(
        "CoreConfig",
        [("SECTION", ClassVar[str], SECTION), *fields],
        frozen=True,
        kw_only=True,
        namespace={"__doc__": "Settings that megatron-core declares and reads by itself."},
    )


def given_core_values(
    specs: Iterable[FlagSpec], given: Mapping[str, Any], values: Any, accepted: Iterable[str]
) -> dict[str, Any]:
    """Return the settings to hand to one of megatron-core's configs.

    Args:
        specs: Declarations; those of the core group count.
        given: What the user set, by field name.
        values: The validated core group.
        accepted: Field names of the config that is built.
    """
    known = set(accepted)
    chosen = {}
    for spec in specs:
        if spec.group != "core" or spec.dest not in known & given.keys():
            continue
        value = getattr(values, spec.dest)
        if value != spec.default:
            chosen[spec.dest] = list(value) if spec.is_list else value
    return chosen


def _annotation(field: CoreField) -> Any:
    element = field.value_type
    return (tuple[element, ...] if field.is_list else element) | None  # type: ignore[valid-type]


def _spellings(field: CoreField) -> tuple[str, ...]:
    """The flag's names as upstream's factory makes them: a switch that is on has its negatives."""
    names = core_classes.SPELLINGS.get(field.name, field.names)
    if names:
        return names
    plain = field.name.replace("_", "-")
    if field.value_type is bool and field.default is True:
        return (f"--no-{plain}", f"--disable-{plain}")
    return (f"--{plain}",)


def _declare(field: CoreField) -> Any:
    name = field.name
    default = core_classes.DEFAULTS.get(name, field.default)
    replaced = core_classes.REPLACED.get(name)
    if replaced is not None:
        replaced = Replaced(replaced.why, replaced.used, default, replaced.accelerators)
    refused_on_cpu = core_classes.REFUSED_ON_CPU.get(name)
    refused = core_classes.REFUSED.get(name, refused_on_cpu)
    known = replaced or refused or name in core_classes.HONOURED
    return flag(
        _help(field),
        *_spellings(field),
        default=default,
        negative=default is True,
        choices=field.choices,
        replaced=replaced,
        refused=refused,
        refused_on=("cpu",) if refused_on_cpu else EVERYWHERE,
        passed_on=not known,
    )


def _help(field: CoreField) -> str:
    """Core's own words, cut to whole sentences of a few lines."""
    text = ""
    for sentence in re.split(r"(?<=\.)\s+(?=[A-Z])", field.help):
        if text and len(text) + len(sentence) > _LONGEST_HELP:
            break
        text = f"{text} {sentence}".strip()
    text = text or f"megatron-core's {field.name}"
    return text if text.endswith(".") else text.rstrip(" :;,") + "."
