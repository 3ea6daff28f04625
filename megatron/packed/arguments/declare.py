"""How a dataclass field declares the command-line flag it is filled from.

A field of a config group is the only place a flag is written down. Its annotation gives the type,
its default the default, and the metadata that the functions below attach gives the rest: spellings,
help, choices, bounds, polarity, and what happens to the flag on hardware that lacks what it asks
for. `flag_specs` reads the fields back as plain `FlagSpec` records, which is all that the parser,
the rules and the reports know about.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

METADATA_KEY = "flag"
KEEP = "keep"  # a replaced flag whose value stays as asked, since other parts read it
EVERYWHERE = ("cpu", "cuda")


@dataclass(frozen=True)
class Replaced:
    """A flag that some hardware answers with an exact equivalent instead of what was asked.

    Attributes:
        why: One clause for the start-up table.
        used: What runs instead, for the table.
        value: The value the field takes then; `KEEP` leaves it as asked.
        accelerators: Where the replacement happens.
    """

    why: str
    used: str
    value: Any = KEEP
    accelerators: tuple[str, ...] = ("cpu",)


@dataclass(frozen=True)
class Bounds:
    """The interval a number must lie in; None is no bound on that side."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def violated_by(self, value: float) -> str | None:
        """Return the rule that `value` breaks in words, or None.

        Args:
            value: The number to check, in the flag's own unit.
        """
        if not math.isfinite(value):
            return "must be a finite number"
        if self.at_least is not None and value < self.at_least:
            return f"must be at least {self.at_least:g}"
        if self.above is not None and value <= self.above:
            return f"must be greater than {self.above:g}"
        if self.at_most is not None and value > self.at_most:
            return f"must be at most {self.at_most:g}"
        if self.below is not None and value >= self.below:
            return f"must be less than {self.below:g}"
        return None


@dataclass(frozen=True)
class FlagSpec:
    """Everything known about one config field and its flag.

    Attributes:
        dest: Field name, unique over all groups; the name upstream's parsed arguments use.
        group: The group's attribute name on `Config`.
        section: Heading in `--help`.
        names: Spellings, the documented one first; empty for a field without a flag.
        value_type: Element type: bool, int, float or str.
        is_list: True if the flag takes one or more values.
        default: Upstream's default; None for unset.
        required: True if a run can't start without it.
        instead: Field that makes a required one unnecessary.
        default_rule: In words, what an unset value is derived from.
        negative: True for a flag without a value that turns the field off.
        choices: Legal values; empty for any.
        bounds: Legal interval of a number.
        environment: The launcher's variable that fills the field.
        replaced: What happens on hardware that answers the flag with an equivalent.
        refused: Why the flag can't be honoured; it then parses, to be refused by name.
        refused_on: Where it is refused.
        passed_on: megatron-core declares the flag and reads it; nothing here knows it.
        help: One or two sentences.
    """

    dest: str
    group: str
    section: str
    names: tuple[str, ...]
    value_type: type
    is_list: bool
    default: Any
    required: bool
    instead: str | None
    default_rule: str | None
    negative: bool
    choices: tuple[str, ...]
    bounds: Bounds
    environment: str | None
    replaced: Replaced | None
    refused: str | None
    refused_on: tuple[str, ...]
    passed_on: bool
    help: str

    @property
    def name(self) -> str:
        """The spelling used in messages: the flag, or the launcher's variable, or the field."""
        return self.names[0] if self.names else self.environment or self.dest

    @property
    def takes_value(self) -> bool:
        return self.value_type is not bool

    @property
    def disposition(self) -> str:
        """`refused` or `replaced` (on some hardware), `passed on` or `honoured`."""
        if self.refused:
            return "refused"
        if self.replaced:
            return "replaced"
        return "passed on" if self.passed_on else "honoured"

    def violated_by(self, value: Any) -> str | None:
        """Return the rule a value breaks, by choice or by bounds, in words, or None.

        Args:
            value: One value, or the tuple of values of a list flag.
        """
        for item in value if self.is_list and value is not None else (value,):
            if item is None:
                continue
            if self.choices and item not in self.choices:
                return f"must be one of {', '.join(self.choices)}"
            if self.value_type in (int, float) and (rule := self.bounds.violated_by(item)):
                return rule
        return None


def flag(
    help: str,
    *names: str,
    default: Any = None,
    negative: bool = False,
    choices: tuple[str, ...] = (),
    section: str | None = None,
    replaced: Replaced | None = None,
    refused: str | None = None,
    refused_on: tuple[str, ...] = EVERYWHERE,
    passed_on: bool = False,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Any:
    """Declare a field with a flag and a default.

    Args:
        help: What the flag does.
        *names: Spellings; none means `--` and the field's name with dashes.
        default: Upstream's default.
        negative: The flag turns the field (whose default is True) off.
        choices: Legal values.
        section: Heading in `--help`, where it differs from the group's.
        replaced: See `FlagSpec`.
        refused: See `FlagSpec`.
        refused_on: See `FlagSpec`.
        passed_on: See `FlagSpec`.
        at_least: Smallest legal number.
        above: Number the value must exceed.
        at_most: Largest legal number.
        below: Number the value must stay under.
    """
    return _field(
        default,
        help=help,
        names=names,
        negative=negative,
        choices=choices,
        section=section,
        replaced=replaced,
        refused=refused,
        refused_on=refused_on,
        passed_on=passed_on,
        bounds=Bounds(at_least, above, at_most, below),
    )


def required(
    help: str,
    *names: str,
    at_least: float | None = None,
    at_most: float | None = None,
    choices: tuple[str, ...] = (),
    instead: str | None = None,
) -> Any:
    """Declare a field that the user must give; it has no default.

    Args:
        help: What the flag does.
        *names: Spellings, as for `flag`.
        at_least: Smallest legal number.
        at_most: Largest legal number.
        choices: Legal values.
        instead: Field that may be given in its place; `validate` derives this one then.
    """
    metadata = dict(
        help=help, names=names, bounds=Bounds(at_least, at_most=at_most), choices=choices
    )
    metadata |= dict(required=True, instead=instead)
    if instead is not None:
        return dataclasses.field(default=None, metadata={METADATA_KEY: metadata})
    return dataclasses.field(metadata={METADATA_KEY: metadata})


def derived(rule: str, help: str, *names: str, **options: Any) -> Any:
    """Declare a field whose default follows from others.

    The annotation is its type in a validated config; the parser leaves None until `validate`.

    Args:
        rule: In words, what the default is.
        help: What the flag does.
        *names: Spellings, as for `flag`.
        **options: `at_least`, `choices`, `section`, as for `flag`.
    """
    bounds = Bounds(options.pop("at_least", None), options.pop("above", None))
    return _field(None, help=help, names=names, default_rule=rule, bounds=bounds, **options)


def from_environment(variable: str, default: int, help: str, at_least: int = 0) -> Any:
    """Declare a field without a flag that the launcher sets through an environment variable."""
    bounds = Bounds(at_least)
    return _field(default, help=help, names=None, environment=variable, bounds=bounds)


def _field(default: Any, **metadata: Any) -> Any:
    return dataclasses.field(default=default, metadata={METADATA_KEY: metadata})


def flag_specs(group_class: type, group: str, section: str) -> Iterator[FlagSpec]:
    """Read the declarations of one config group back.

    Args:
        group_class: The group's dataclass.
        group: Its attribute name on `Config`.
        section: Its heading in `--help`.

    Yields:
        One `FlagSpec` a declared field, in order of declaration.
    """
    hints = typing.get_type_hints(group_class)
    for field in dataclasses.fields(group_class):
        metadata = dict(field.metadata.get(METADATA_KEY, {}))
        if not metadata:
            continue
        value_type, is_list = _element_type(hints[field.name])
        names = metadata.get("names", ())
        if names == ():
            names = ("--" + field.name.replace("_", "-"),)
        yield FlagSpec(
            dest=field.name,
            group=group,
            section=metadata.get("section") or section,
            names=names or (),
            value_type=value_type,
            is_list=is_list,
            default=None if field.default is dataclasses.MISSING else field.default,
            required=metadata.get("required", False),
            instead=metadata.get("instead"),
            default_rule=metadata.get("default_rule"),
            negative=metadata.get("negative", False),
            choices=metadata.get("choices", ()),
            bounds=metadata.get("bounds", Bounds()),
            environment=metadata.get("environment"),
            replaced=metadata.get("replaced"),
            refused=metadata.get("refused"),
            refused_on=metadata.get("refused_on", EVERYWHERE),
            passed_on=metadata.get("passed_on", False),
            help=metadata["help"],
        )


def _element_type(hint: Any) -> tuple[type, bool]:
    """Return (element type, is a list) of `T`, `T | None`, `tuple[T, ...]` or both together."""
    if isinstance(hint, types.UnionType):
        (hint,) = (arg for arg in typing.get_args(hint) if arg is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    return hint, False
