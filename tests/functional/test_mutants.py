"""Faults put into the product are caught; four of them by default, `make mutants` tries all."""

from __future__ import annotations

import pytest

from tests.distributed.pool import WorkerPools
from tests.functional.mutant_checks import CHECKS, REPOSITORY, catch
from tests.functional.mutants import MUTANTS

OFTEN = ("next-document", "positions-go-on", "padding-attended", "dkv-lost")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in MUTANTS],
)
def test_mutant_is_caught(name: str, functional_pools: WorkerPools) -> None:
    assert catch(functional_pools, name)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("test", sorted({check.test for check in CHECKS.values()}))
def test_checks_pass_on_the_product(test: str, functional_pools: WorkerPools) -> None:
    """Without a fault; by default their tests themselves say so."""
    next(check for check in CHECKS.values() if check.test == test).run(
        functional_pools, functional_pools
    )


def test_checks_are_named_after_tests_that_exist() -> None:
    for check in CHECKS.values():
        path, test = check.test.split("::")
        source = (REPOSITORY / path).read_text(encoding="utf-8")
        assert f"def {test.split('[')[0]}(" in source, check.test
