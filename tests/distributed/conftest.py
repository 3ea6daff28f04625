"""Worker pools for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.distributed.corpora import short_documents, write_byte_corpus
from tests.distributed.harness import RankResult, run
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


@pytest.fixture(scope="session")
def data_flags(corpus_documents: list[str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Flags that read real text, bytes as tokens, about three documents in 128 tokens."""
    folder = tmp_path_factory.mktemp("byte-corpus")
    prefix = write_byte_corpus(folder / "text", short_documents(corpus_documents))
    return (
        f"--data-path {prefix} --data-cache-path {folder / 'cache'} --split 90,5,5 "
        "--tokenizer-type ByteTokenizer --num-workers 0"
    )


@pytest.fixture(scope="module")
def one_process(worker_pool: WorkerPools, data_flags: str) -> Callable[[str], RankResult]:
    """The reference run of some flags on the common data, made once a module."""
    known: dict[str, RankResult] = {}

    def get(flags: str) -> RankResult:
        if flags not in known:
            known[flags] = run(worker_pool, 1, f"{flags} {data_flags}")
        return known[flags]

    return get
