"""The packs of a run, numbered, and states to restart them from.

A packer looks far ahead: over a window, over an epoch. Batches are prepared ahead of the step that
trains on them, too. So the packer's state *now* is not where the training is. Every so many packs
the sequence keeps a snapshot of the packer; the state of "n packs are trained" is the last
snapshot before n, and how many packs to plan again from there. Planning reads no token: a
thousand packs take milliseconds.

```
packs       0 . . . . 1024 . . . . . . 2048 . . . .
snapshots   S         S                S
trained                        ^ n                      state_at(n) = S(1024), n
prepared                                      ^
```
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.packed.errors import DataError
from megatron.packed.packing import checks
from megatron.packed.packing.documents import DocumentPack
from megatron.packed.packing.packer_base import DocumentPacker

SNAPSHOT_INTERVAL = 1024


@dataclass(frozen=True, eq=False)
class NumberedPack:
    """A pack and its place in the run.

    Attributes:
        number: packs before it.
        pack: its document pieces.
    """

    number: int
    pack: DocumentPack


class PackSequence(Iterator[NumberedPack]):
    """Packs number `start`, `start + 1`, ... of a packer; without end.

    Args:
        packer: a packer at its very beginning.
        start: packs that were trained on before.
        state: what `state_at(start)` gave then. Without it the packer is run from its beginning,
            which gives the same packs.
        snapshot_interval: packs between snapshots.

    Attributes:
        number: of the next pack.

    Raises:
        DataError: when the state is of another corpus, of other settings or of another place.
    """

    def __init__(
        self,
        packer: DocumentPacker,
        *,
        start: int = 0,
        state: dict[str, Any] | None = None,
        snapshot_interval: int = SNAPSHOT_INTERVAL,
    ) -> None:
        self.packer = packer
        self.interval = checks.integer("snapshot_interval", snapshot_interval, 1)
        checks.integer("start", start, 0)
        self.number = 0
        if state is not None:
            if int(state["packs"]) != start:
                raise DataError(
                    f"packing state: saved after {state['packs']} packs, but the run goes on after "
                    f"{start}; load both from one checkpoint"
                )
            packer.load_state_dict(state["packer"])
            self.number = int(state["snapshot"])
        self._snapshots = deque([(self.number, packer.state_dict())])
        while self.number < start:
            next(self)
            self.forget_before(self.number)

    def __next__(self) -> NumberedPack:
        if self.number % self.interval == 0 and self._snapshots[-1][0] != self.number:
            self._snapshots.append((self.number, self.packer.state_dict()))
        pack = NumberedPack(self.number, self.packer.next_pack())
        self.number += 1
        return pack

    def forget_before(self, packs: int) -> None:
        """Drop snapshots that no state of `packs` or more trained packs needs."""
        while len(self._snapshots) > 1 and self._snapshots[1][0] <= packs:
            self._snapshots.popleft()

    def state_at(self, packs: int) -> dict[str, Any]:
        """What to restart from when the first `packs` packs are trained: plain numbers and lists.

        Args:
            packs: at least what `forget_before` was told, at most the packs handed out.

        Raises:
            ValueError: for a place that was forgotten or not reached.
        """
        if not self._snapshots[0][0] <= packs <= self.number:
            raise ValueError(
                f"packs: {packs} is outside [{self._snapshots[0][0]}, {self.number}], for which "
                "there are snapshots"
            )
        number, state = next(s for s in reversed(self._snapshots) if s[0] <= packs)
        return {"packs": packs, "snapshot": number, "packer": state}
