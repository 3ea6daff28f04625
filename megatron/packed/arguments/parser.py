"""The command line, generated from the config's declarations."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from megatron.packed.arguments.config import (
    COMMAND_LINE,
    CONFIG_FILE,
    ENVIRONMENT,
    Config,
    all_specs,
    build_config,
)
from megatron.packed.arguments.config_file import read_config_file
from megatron.packed.arguments.declare import FlagSpec
from megatron.packed.errors import ConfigurationError

DESCRIPTION = "Pre-train a GPT on packed sequences, on megatron-core."
KINDS = {int: "a whole number", float: "a number"}
# argparse's own pattern takes -1e-5, and the window -1,0, for a flag.
NEGATIVE_NUMBER = re.compile(r"^-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?(,-?\d+)*$")

_LARGEST = (1 << 63) - 1


class CommandLineError(ConfigurationError):
    """A command line that can't be read: the program's exit code is 2, as is usual."""

    exit_code = 2


def parse_arguments(argv: Sequence[str], environ: Mapping[str, str]) -> Config:
    """Read the command line, its --config-file and the launcher's environment into a config.

    Flags on the command line win over the file, which wins over defaults.

    Args:
        argv: Arguments without the program's name.
        environ: Process environment; WORLD_SIZE, RANK, LOCAL_RANK and LOCAL_WORLD_SIZE are read.

    Returns:
        The config as asked for, not yet checked across flags: see `validate`.

    Raises:
        CommandLineError: A flag is unknown, lacks its value or has a bad one, or required flags
            are missing.
        ConfigFileError: The same of the file.
        SystemExit: With code 0 after `--help`.
    """
    values = read_command_line(argv)
    sources = {dest: COMMAND_LINE for dest in values}
    if path := values.get("config_file"):
        from_file = read_config_file(path, _convert)
        sources = {**dict.fromkeys(from_file, CONFIG_FILE), **sources}
        values = {**from_file, **values}
    for dest, value in read_environment(environ).items():
        values[dest] = value
        sources[dest] = ENVIRONMENT
    try:
        return build_config(values, sources, complete=not values.get("use_checkpoint_args", False))
    except ConfigurationError as error:
        raise CommandLineError(f"{error} (--help lists every flag)") from None


def read_command_line(argv: Sequence[str]) -> dict[str, Any]:
    """Return the values of the flags given, and of no others, by field name.

    Args:
        argv: Arguments without the program's name.

    Raises:
        CommandLineError: As `parse_arguments`, but for missing flags.
    """
    parser = build_parser()
    try:
        given, left_over = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise CommandLineError(_sentence(error)) from None
    if left_over:
        raise CommandLineError(_explain_unknown(left_over, list(argv)))
    return vars(given)


def read_environment(environ: Mapping[str, str]) -> dict[str, int]:
    """Return what the launcher set, by field name.

    Args:
        environ: Process environment.

    Raises:
        CommandLineError: A variable isn't a whole number in range.
    """
    values = {}
    for spec in all_specs().values():
        if spec.environment is None or spec.environment not in environ:
            continue
        text = environ[spec.environment]
        try:
            values[spec.dest] = _convert(spec, text)
        except argparse.ArgumentTypeError as error:
            raise CommandLineError(
                f"environment variable {spec.environment}={text!r}: {error}; torchrun sets it"
            ) from None
    return values


class _Parser(argparse.ArgumentParser):
    def __init__(self) -> None:
        super().__init__(
            prog="pretrain_gpt.py",
            description=DESCRIPTION,
            allow_abbrev=False,  # a prefix that works today may be ambiguous tomorrow
            exit_on_error=False,
            argument_default=argparse.SUPPRESS,  # what is absent was not given
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=40),
            usage="torchrun [launcher flags] %(prog)s [flags]",
        )
        self._negative_number_matcher = NEGATIVE_NUMBER

    def error(self, message: str) -> NoReturn:
        raise CommandLineError(message)


def build_parser() -> argparse.ArgumentParser:
    """Return a parser with one argument a declared flag, in sections."""
    parser = _Parser()
    sections: dict[str, Any] = {}
    for spec in all_specs().values():
        if not spec.names:
            continue
        if spec.section not in sections:
            sections[spec.section] = parser.add_argument_group(spec.section)
        _add(sections[spec.section], spec)
    return parser


def _add(section: Any, spec: FlagSpec) -> None:
    text = _help_text(spec)
    if not spec.takes_value:
        action = "store_false" if spec.negative else "store_true"
        section.add_argument(
            *spec.names, dest=spec.dest, action=action, default=argparse.SUPPRESS, help=text
        )
        return
    metavar = "{" + ",".join(spec.choices) + "}" if spec.choices else spec.value_type.__name__
    section.add_argument(
        *spec.names,
        dest=spec.dest,
        type=_converter(spec),
        nargs="+" if spec.is_list else None,
        action=_StoreTuple if spec.is_list else "store",
        metavar=metavar.upper() if not spec.choices else metavar,
        help=text,
    )


class _StoreTuple(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, tuple(values))


def _help_text(spec: FlagSpec) -> str:
    notes = []
    if spec.required:
        notes.append("required")
    elif spec.default_rule:
        notes.append(f"default: {spec.default_rule}")
    elif spec.takes_value and spec.default is not None and spec.default != "":
        notes.append(f"default: {spec.default}")
    if spec.refused:
        notes.append("refused in this build")
    text = f"{spec.help} ({'; '.join(notes)})" if notes else spec.help
    return text.replace("%", "%%")


def _converter(spec: FlagSpec) -> Callable[[str], Any]:
    return lambda text: _convert(spec, text)


def _convert(spec: FlagSpec, text: str) -> Any:
    try:
        value = spec.value_type(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{_shown(text)} must be {KINDS[spec.value_type]}"
        ) from None
    rule = _unusable(value) or spec.violated_by((value,) if spec.is_list else value)
    if rule:
        raise argparse.ArgumentTypeError(f"{_shown(text)} {rule}")
    return value


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 80 else f"{text[:40]!r}... ({len(text)} characters)"


def _unusable(value: Any) -> str | None:
    """The rule that a value breaks whatever the flag, in words, or None."""
    if isinstance(value, str):
        try:
            held = os.fsencode(value)
        except UnicodeEncodeError:
            return "must be text that a file name can hold"
        return "must not hold a zero byte" if b"\0" in held else None
    if isinstance(value, int) and not -_LARGEST <= value <= _LARGEST:
        return "must fit in 64 bits"
    return None


def _sentence(error: argparse.ArgumentError) -> str:
    name = (error.argument_name or "").split("/")[0]
    message = str(error.message)
    if message.startswith("ignored explicit argument"):
        value = message.removeprefix("ignored explicit argument ")
        message = f"takes no value, but has {value}; leave the flag out to turn it off"
    elif message == "expected one argument":
        message = "needs a value after it"
    elif message == "expected at least one argument":
        message = "needs one or more values after it"
    return f"{name}: {message}"


def _explain_unknown(left_over: Sequence[str], argv: Sequence[str]) -> str:
    known = [name for spec in all_specs().values() for name in spec.names]
    messages = []
    for token in left_over:
        if token.startswith("-") and not NEGATIVE_NUMBER.match(token):
            messages.append(_explain_unknown_flag(token.split("=")[0], known))
        elif not messages:  # else it is the value of the unknown flag before it
            previous = argv[argv.index(token) - 1] if argv.index(token) else ""
            where = f" after {previous}" if previous.startswith("-") else ""
            messages.append(f"unexpected value {token!r}{where}; only values of flags are taken")
    return "\n".join(messages)


def _explain_unknown_flag(name: str, known: Sequence[str]) -> str:
    import difflib  # only needed on this path; --help shall stay quick

    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]}?" if nearest else "--help lists every flag"
    return f"unknown flag {name}: {hint}"
