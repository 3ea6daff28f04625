"""What the start-up log says about the configuration."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.packed.arguments.config import DEFAULT, Config, all_specs
from megatron.packed.arguments.validation import show


def config_report(config: Config, *, everything: bool = False) -> str:
    """Return aligned lines `group  field  value  from` of every value that isn't a default.

    Kernel choices that nobody made are left out, and so is this process's place among the others.

    Args:
        config: Parsed or validated.
        everything: Leave nothing out.
    """
    rows = []
    for dest, spec in all_specs().items():
        value = config.get(dest)
        source = config.sources.get(dest, DEFAULT)
        if everything:
            rows.append((spec.group, dest, "unset" if value is None else show(value), source))
            continue
        if spec.environment or (spec.group == "kernels" and not config.is_given(dest)):
            continue
        if value != spec.default and value is not None:
            rows.append((spec.group, dest, show(value), source))
    return _align(("group", "field", "value", "from"), rows)


def replacement_report(config: Config) -> str:
    """Return the table of what was asked for and is done by an equivalent; empty if nothing is.

    Args:
        config: Validated.
    """
    rows = [(row.flag, row.asked, row.used, row.why) for row in config.replacements]
    return _align(("flag", "asked", "used", "why"), rows) if rows else ""


def _align(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    table = [header, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(header) - 1)]
    lines = []
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join([*cells, row[-1]]))
    return "\n".join(lines)
