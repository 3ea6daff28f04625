"""Worker pools for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.pool import WorkerPools, start_fork_server


def pytest_configure(config: pytest.Config) -> None:
    """Called when pytest first looks into this folder: import torch while it collects."""
    if not config.option.collectonly:
        start_fork_server()


@pytest.fixture(scope="session")
def worker_pool() -> Iterator[WorkerPools]:
    """`worker_pool(world_size).run(function, ...)`: see pool.py."""
    pools = WorkerPools()
    yield pools
    pools.close()
