"""Both ways to compute: the C++ kernels where they are built, and plain torch."""

from __future__ import annotations

import pytest

from megatron.packed.accelerator import cpu_ops


@pytest.fixture(params=["native", "torch"])
def implementation(request, monkeypatch):
    """Run a test with and without the extension; skip the former where it was not built."""
    if request.param == "torch":
        monkeypatch.setattr(cpu_ops, "load", lambda: None)
    elif cpu_ops.load() is None:
        pytest.skip("the extension megatron.packed._cpu_ops is not built")
    return request.param
