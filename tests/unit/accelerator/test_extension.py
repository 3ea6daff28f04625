"""The compiled kernels: one of other sources is not called with what it does not take."""

from __future__ import annotations

import types
from pathlib import Path

import pytest

from megatron.packed import extensions
from megatron.packed.accelerator import cpu_ops

SOURCE = Path(__file__).parents[3] / "csrc" / "cpu_ops" / "module.cpp"


@pytest.mark.parametrize("interface", [None, 1, cpu_ops._INTERFACE + 1])
def test_an_extension_of_other_sources_is_not_used(monkeypatch, interface):
    other = types.ModuleType("megatron.packed._cpu_ops")
    if interface is not None:
        other.interface = interface
    monkeypatch.setattr(cpu_ops, "load_extension", lambda name: other)
    with pytest.warns(RuntimeWarning, match="other sources.*build_ext --inplace"):
        assert cpu_ops.load.__wrapped__() is None


def test_python_and_cpp_agree_on_the_interface():
    assert f'm.attr("interface") = {cpu_ops._INTERFACE};' in SOURCE.read_text()


def test_a_build_folder_without_the_extension_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("MEGATRON_PACKED_EXTENSION_DIR", str(tmp_path))
    with pytest.raises(ImportError, match=r"no megatron/packed/_cpu_ops\.\*"):
        extensions.load_extension("_cpu_ops")
