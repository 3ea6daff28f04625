"""Run-time replacements of megatron-core's functions."""

from __future__ import annotations

import importlib

import pytest

from megatron.packed.model import patches


@pytest.fixture(autouse=True)
def _restore(monkeypatch):
    """Leave megatron-core as it was."""
    for patch in patches.PATCHES:
        module = importlib.import_module(patch.module)
        monkeypatch.setattr(module, patch.name, getattr(module, patch.name))


def test_install_replaces_every_name_and_may_be_repeated():
    patches.install()
    patches.install()
    for patch in patches.PATCHES:
        module = importlib.import_module(patch.module)
        assert getattr(module, patch.name) is patch.replacement
        assert patch.reason
        assert patch.versions


def test_a_name_that_is_gone_is_reported(monkeypatch):
    patch = patches.PATCHES[0]
    monkeypatch.delattr(importlib.import_module(patch.module), patch.name)
    with pytest.raises(ImportError, match=f"{patch.module} has no {patch.name}"):
        patches.install()
