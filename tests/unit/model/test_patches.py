"""Run-time replacements of megatron-core's functions."""

from __future__ import annotations

import importlib

import pytest
import torch

from megatron.packed.model import patches
from megatron.packed.model.recomputation import recomputed_storage


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


def test_a_recomputed_output_is_seen_by_all_views_of_the_dropped_one():
    dropped = torch.arange(6.0).view(2, 3)
    view, recomputed = dropped[1], torch.arange(6.0, 12.0).view(2, 3)
    version = dropped._version
    dropped.untyped_storage().resize_(0)
    recomputed_storage()(dropped, recomputed)
    assert view.tolist() == [9, 10, 11] and torch.equal(dropped, recomputed)
    assert dropped._version == version  # autograd has saved it: a change would be an error
