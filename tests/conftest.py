"""Fixtures and settings that all tests share."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

# Read when torch is imported, which is later. Tests share the cores with the ranks of the pools.
# Training on CPU is eager, and tests are, too, in whatever order a test module imports things:
# compiling one fused function of megatron-core takes fifteen seconds.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHDYNAMO_DISABLE"):
    os.environ.setdefault(_variable, "1")

SEED = 1234
CORPUS_BYTES = 300_000
_LONGEST_DOCUMENT = 40_000

# A busy machine must not fail a property: no deadline. CI tries the same examples every time.
settings.register_profile(
    "default", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=2000)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default")
)


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    """Seed every generator before every test, so that no test depends on the order of tests."""
    random.seed(SEED)
    np.random.seed(SEED)
    # Tests of pure host code never import torch: don't make them pay for it.
    if torch := sys.modules.get("torch"):
        torch.manual_seed(SEED)
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _signal_handlers_are_left_alone() -> Iterator[None]:
    """Fail a test that leaves a signal handler behind.

    Processes forked later inherit it: a suite once never ended, since a worker that saw a handler
    for SIGTERM ignored SIGTERM.
    """
    watched = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.getsignal(each) for each in watched]
    yield
    assert [signal.getsignal(each) for each in watched] == before


@pytest.fixture
def rng() -> np.random.Generator:
    """A numpy generator of this test's own."""
    return np.random.default_rng(SEED)


@pytest.fixture(scope="session")
def corpus_documents() -> list[str]:
    """About 300 KB of real text with long-tailed lengths: the standard library's own modules.

    The order is fixed for a Python version and unrelated to length. Use `corpus_jsonl` where a
    file is wanted.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(folder.glob("*.py"))
    random.Random(SEED).shuffle(paths)
    documents: list[str] = []
    size = 0
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="replace")
        if not text or len(text) > _LONGEST_DOCUMENT:
            continue
        documents.append(text)
        size += len(text.encode())
        if size >= CORPUS_BYTES:
            break
    return documents


@pytest.fixture(scope="session")
def corpus_jsonl(corpus_documents: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`corpus_documents` as the input of tools/preprocess_data.py: one {"text": ...} per line."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for text in corpus_documents:
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    return path


@pytest.fixture(scope="session")
def awkward_documents() -> list[str]:
    """Texts that break careless code: empty, blank, one letter, beyond ASCII, markers, long."""
    return [
        "",
        "\n",
        " ",
        "a",
        "naïve café — 東京 🙂",
        "line one\r\nline two\x00\u2028still one document",
        "<|endoftext|>",
        "word " * 4000,
    ]
