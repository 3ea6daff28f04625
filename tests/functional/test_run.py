"""The runner of whole runs: a few cases against their golden values, and what it says of others."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatron.packed.cases.curves import golden_text, read_golden
from tests.distributed.pool import WorkerPools
from tests.functional.case_files import FunctionalCase, find_cases, make_corpus
from tests.functional.launching import in_pool
from tests.functional.mutants import MutatedPools
from tests.functional.run import (
    CaseFailed,
    CaseResult,
    Runner,
    check_golden,
    record,
    run_all,
    write_junit,
)

CASES = find_cases()
SMOKE = [case.id for case in CASES if "smoke" in case.tags]


@pytest.fixture(scope="module")
def runner(functional_pools: WorkerPools, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    folder = tmp_path_factory.mktemp("functional")
    return Runner(in_pool(functional_pools), folder, make_corpus(folder / "corpus"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.id, marks=() if case.id in SMOKE else pytest.mark.slow)
        for case in CASES
    ],
)
def test_golden_values(case: FunctionalCase, runner: Runner) -> None:
    result = runner(case)
    assert result.status == "ok", result.message


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("mutant", "name", "message"),
    [
        ("label-at-the-end", "gpt3/packed", "at step 1, golden is"),
        ("dkv-lost", "llama/cp2_ring", "grad-norm: |lm loss: "),
        ("sample-repeated", "gpt3/packed_ckpt_resume", "after the restart other values"),
    ],
)
def test_faults_are_noticed(mutant: str, name: str, message: str, tmp_path: Path) -> None:
    own = WorkerPools()
    try:
        launch = in_pool(MutatedPools(own, mutant))
        result = Runner(launch, tmp_path, make_corpus(tmp_path / "corpus"))(
            find_cases(only=name)[0]
        )
    finally:
        own.close()
    assert result.status == "failed"
    assert re.search(message, result.message), result.message


def test_cases_cover_what_they_should() -> None:
    tags = {tag for case in CASES for tag in case.tags}
    assert {"packed", "bshd", "context", "checkpoint", "experts", "mtp", "bf16"} <= tags
    assert all(case.golden.is_file() for case in CASES)
    for case in CASES:
        golden = read_golden(case.golden)["lm loss"]
        assert list(golden) == list(range(1, case.iterations + 1))
        assert golden[case.iterations] < golden[1] - 0.1


@pytest.mark.parametrize(
    ("one", "others"),
    [
        ("llama/packed", "llama/cp?_[!b]*"),
        ("llama/packed", "llama/packed_[dr][ie][sc]*"),
        ("llama/bshd", "llama/cp?_bshd"),
        ("gpt3/packed", "gpt3/packed_*"),
        ("mla/packed", "mla/packed_*"),
        ("moe/packed_deepseek", "moe/packed_deepseek_*"),
    ],
)
def test_layouts_share_their_curve(one: str, others: str) -> None:
    """Golden values of layouts of one run are one curve, whoever recorded them."""
    (reference,) = (read_golden(case.golden)["lm loss"] for case in find_cases(only=one))
    found = [case for case in find_cases(only=others) if case.args["--num-layers"] == 2]
    assert found
    for case in found:
        assert read_golden(case.golden)["lm loss"] == pytest.approx(reference, abs=2e-5), case.id


# ---- without training ----------------------------------------------------------------------------


@pytest.fixture
def case(tmp_path: Path) -> FunctionalCase:
    """A case with golden values of its own."""
    found = replace(CASES[0], folder=tmp_path)
    found.golden.write_text(golden_text({"lm loss": {1: 5.123454, 2: 5.0}}))
    return found


def test_the_fifth_decimal_counts(case: FunctionalCase) -> None:
    check_golden(case, {"lm loss": {1: 5.123454, 2: 5.0}})
    with pytest.raises(CaseFailed, match="lm loss: 5.12347 at step 1, golden is 5.12345"):
        check_golden(case, {"lm loss": {1: 5.123466, 2: 5.0}})
    with pytest.raises(CaseFailed, match="5.0000. at step 2|nan at step 2"):
        check_golden(case, {"lm loss": {1: 5.123454, 2: float("nan")}})
    with pytest.raises(CaseFailed, match="1 steps logged, golden are 2"):
        check_golden(case, {"lm loss": {1: 5.123454}})
    with pytest.raises(CaseFailed, match="golden values are"):
        check_golden(case, {"lm loss": {1: 5.123454, 2: 5.0}, "grad-norm": {1: 1.0}})


def test_recording_says_what_changed(case: FunctionalCase, tmp_path: Path) -> None:
    same = {"lm loss": {1: 5.123454, 2: 5.0}}
    assert record(case, same, tmp_path / "pictures") == "golden values as before"
    said = record(case, {"lm loss": {1: 5.123454, 2: 4.5}}, tmp_path / "pictures")
    assert said.startswith("lm loss: up to 1.0e-01 from step 2 on; see ")
    assert len(list((tmp_path / "pictures").glob("*.png"))) == 1
    assert read_golden(case.golden)["lm loss"][2] == 4.5
    entry = json.loads(case.golden.read_text())["lm loss"]
    assert (entry["start_step"], entry["end_step"], entry["step_interval"]) == (1, 2, 1)


def test_a_case_without_golden_values_fails(case: FunctionalCase) -> None:
    case.golden.unlink()
    with pytest.raises(CaseFailed, match="--record"):
        check_golden(case, {"lm loss": {1: 1.0}})


def test_a_failed_program_is_a_failed_case(tmp_path: Path) -> None:
    def launch(
        words: Sequence[str], processes: int, environment: Mapping[str, str], folder: Path
    ) -> None:
        raise RuntimeError("exit code 1: error: --lr")

    result = Runner(launch, tmp_path, tmp_path)(CASES[0])
    assert (result.status, result.case) == ("failed", CASES[0].id)
    assert "exit code 1" in result.message


def test_what_has_passed_is_not_run_again(tmp_path: Path) -> None:
    kept, ran = tmp_path / "kept.jsonl", []

    def run_one(each: FunctionalCase) -> CaseResult:
        ran.append(each.id)
        return CaseResult(each.id, "failed" if each is CASES[1] else "ok", "")

    assert [each.status for each in run_all(CASES[:3], run_one, 1, kept)] == ["ok", "failed", "ok"]
    run_all(CASES[:3], run_one, 1, kept)
    assert ran == [each.id for each in (*CASES[:3], CASES[1])]


def test_junit(tmp_path: Path) -> None:
    results = [CaseResult("gpt3/one", "ok", "", 1.5), CaseResult("moe/two", "failed", "why")]
    write_junit(tmp_path / "out.xml", results)
    suite = ElementTree.parse(tmp_path / "out.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    assert [each.get("classname") for each in suite] == ["functional.gpt3", "functional.moe"]
    assert suite[1][0].get("message") == "why"


def test_the_second_part_is_laid_out_anew(tmp_path: Path) -> None:
    (case,) = find_cases(only="reshard_tp2_to_cp2")
    first = case.words(tmp_path, tmp_path / "text")
    second = case.words(tmp_path, tmp_path / "text", resume=True)
    assert "--sequence-parallel" in first and "--sequence-parallel" not in second
    assert second[second.index("--context-parallel-size") + 1] == "2"
    assert second[second.index("--load") + 1] == first[first.index("--save") + 1]
    assert second[second.index("--ckpt-step") + 1] == "10"
    assert not any("${" in word for word in (*first, *second))
