"""The tables of malformed inputs are long enough, and no two of their cases are one."""

from __future__ import annotations

from collections import Counter

from . import test_checkpoints, test_data_files, test_flags, test_tokenizers, test_yaml

KINDS = {
    "flags": (*test_flags.CASES, *test_flags.LAYER_FILES),
    "yaml": test_yaml.CASES,
    "data files": test_data_files.CASES,
    "tokenizers": test_tokenizers.CASES,
    "checkpoints": test_checkpoints.CASES,
}


def test_there_are_enough_of_every_kind() -> None:
    counts = {kind: len(cases) for kind, cases in KINDS.items()}
    assert min(counts.values()) >= 12, counts
    assert sum(counts.values()) >= 60, counts


def test_no_two_are_alike() -> None:
    names = Counter(case.name for cases in KINDS.values() for case in cases)
    assert [name for name, count in names.items() if count > 1] == []
    said = Counter((kind, case.says) for kind, cases in KINDS.items() for case in cases)
    assert [each for each, count in said.items() if count > 1] == []


def test_every_message_is_asserted() -> None:
    for cases in KINDS.values():
        assert all(case.says and all(map(bool, case.says)) for case in cases)
