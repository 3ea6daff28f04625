"""What the fault suite counts: fault, tries, survived, lost steps."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Count:
    """Outcomes of one kind of fault.

    Attributes:
        tries: how often it happened.
        survived: went on bit by bit, or was refused with a message.
        lost: steps trained again, over all tries.
    """

    tries: int = 0
    survived: int = 0
    lost: int = 0


@dataclass
class FaultTable:
    """Outcomes by kind of fault."""

    rows: dict[str, Count] = field(default_factory=dict)

    def add(self, fault: str, *, lost: int = 0, tries: int = 1) -> None:
        """Count faults that were survived; a try that isn't fails its test."""
        row = self.rows.setdefault(fault, Count())
        row.tries += tries
        row.survived += tries
        row.lost += lost

    def lines(self) -> list[str]:
        """The table, as in docs/operations.md."""
        head = ["| fault | tries | survived | steps trained again |", "|---|---|---|---|"]
        rows = (
            f"| {fault} | {row.tries} | {row.survived} | {row.lost} |"
            for fault, row in sorted(self.rows.items())
        )
        return [*head, *rows]
