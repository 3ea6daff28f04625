"""What multi-token prediction replaces of megatron-core is what was read."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from megatron.packed.model.mtp_patches import OVERRIDES, Override

INSTALLED = version("megatron-core")


@pytest.mark.parametrize("override", OVERRIDES, ids=lambda each: each.name)
def test_the_source_is_the_one_that_was_read(override: Override) -> None:
    assert override.checksum() == override.sources.get(INSTALLED), (
        f"{override.module}.{override.name} of megatron-core {INSTALLED} is another one than was "
        f"read ({', '.join(override.sources)}). It was replaced since: {override.reason} Read it, "
        "adapt what replaces it, and add its checksum."
    )


def test_a_changed_source_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    import inspect

    source = inspect.getsource
    monkeypatch.setattr(inspect, "getsource", lambda found: source(found).replace("self", "this"))
    assert OVERRIDES[0].checksum() != OVERRIDES[0].sources.get(INSTALLED)
