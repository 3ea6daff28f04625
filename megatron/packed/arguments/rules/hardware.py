"""Rules that depend on the accelerator."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron.packed.arguments.config import Config

Rule = Callable[[Config], Iterator[str]]

RULES: tuple[Rule, ...] = ()
