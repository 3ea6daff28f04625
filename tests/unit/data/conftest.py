"""Fixtures of the data tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from .helpers import numbered_documents, write_corpus


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """200 documents, about 6,000 tokens."""
    return write_corpus(tmp_path / "corpus_text_document", numbered_documents(200))
