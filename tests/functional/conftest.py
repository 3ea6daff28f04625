"""The worker pools of tests/distributed, for the tests of this folder as well."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.pool import WorkerPools


@pytest.fixture(scope="session")
def functional_pools() -> Iterator[WorkerPools]:
    """`functional_pools(world_size).run(function, ...)`: see tests/distributed/pool.py."""
    pools = WorkerPools()
    yield pools
    pools.close()
