"""Ranks as threads, for stand-ins of engines that bring their own communication."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any


class World:
    """What the ranks of a fake job share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=60)
        self._posted: dict[tuple[int, int], Any] = {}

    def swap(self, rank: int, call: int, value: Any) -> list[Any]:
        """Give a value, get those of all ranks for the same call."""
        self._posted[rank, call] = value
        self._barrier.wait()
        return [self._posted[each, call] for each in range(self.size)]

    def run(self, work) -> list[Any]:
        """Run `work(rank)` on every rank."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


@dataclass(frozen=True)
class FakeGroup:
    """A context-parallel group of a fake world."""

    world: World
    rank: int
