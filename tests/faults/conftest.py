"""Data and uninterrupted runs that faulty ones are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.distributed.conftest import data_flags, worker_pool  # noqa: F401  (the same)
from tests.faults.fleet import COMMON, Fleet
from tests.faults.started import end_started
from tests.faults.table import FaultTable

Reference = Callable[..., Fleet]


@pytest.fixture(autouse=True)
def _no_rank_is_left_behind() -> Iterator[None]:
    """End the ranks of a test that has failed before it could."""
    yield
    end_started()


@pytest.fixture(scope="session")
def fault_flags(data_flags: str) -> str:  # noqa: F811
    """The command line of all runs here."""
    return f"{COMMON} {data_flags}"


@pytest.fixture(scope="session")
def reference(fault_flags: str, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The run of some ranks and flags that nothing happened to, made once."""
    known: dict[tuple[int, str], Fleet] = {}

    def get(world_size: int, flags: str = "") -> Fleet:
        if (world_size, flags) not in known:
            folder = tmp_path_factory.mktemp("uninterrupted")
            fleet = Fleet(world_size, f"{fault_flags} {flags}", folder)
            assert fleet.run() == [0] * world_size, fleet.output()
            known[world_size, flags] = fleet
        return known[world_size, flags]

    return get


TABLE = FaultTable()


@pytest.fixture(scope="session")
def table() -> FaultTable:
    """Where tests count the faults that a run survived."""
    return TABLE


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table after the tests."""
    if TABLE.rows:
        terminalreporter.section("faults")
        for line in TABLE.lines():
            terminalreporter.write_line(line)
