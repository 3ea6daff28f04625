"""Cases as they are written down, and the local files they are pointed at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.packed.cases.case import Case, command_line, read_cases
from megatron.packed.cases.launch import Launched, outcome
from megatron.packed.cases.local_files import LocalFiles, localise
from megatron.packed.cases.shrink import SmallRun
from megatron.packed.errors import DataError

FILES = LocalFiles(("a", "b"), "vocab.json", "merges.txt", "tokenizer.json", "sp.model")


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    args = {"--bf16": True, "--fp16": False, "--lr": "1e-3", "--modules": "[attn mlp]", "--n": None}
    entries = [{"case": "gpt/a", "type": "release", "args": args}, {"case": "b", "args": {}}]
    path.write_text("\n".join(map(json.dumps, entries)) + "\n\n")
    first, second = read_cases(path)
    assert (first.name, first.kind, second.kind) == ("gpt/a", "release", "regular")
    assert first.args == {"--bf16": True, "--lr": "1e-3", "--modules": ["attn", "mlp"]}


def test_a_model_config(tmp_path: Path) -> None:
    path = tmp_path / "gpt3_tp2" / "model_config.yaml"
    path.parent.mkdir()
    path.write_text(
        "ENV_VARS:\n  NCCL_ALGO: Ring\nMODEL_ARGS:\n  --num-layers: 12\n  --bf16: true\n"
        "  --recompute-modules: [core_attn, mlp]\nTEST_TYPE: ckpt-resume\n"
    )
    (case,) = read_cases(path)
    assert (case.name, case.kind) == ("gpt3_tp2", "ckpt-resume")
    assert case.args == {
        "--num-layers": 12,
        "--bf16": True,
        "--recompute-modules": ["core_attn", "mlp"],
    }


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"case": "x"}', "a.jsonl line 1: must be a JSON object"),
        ("a.jsonl", '\n{"case', "a.jsonl line 2: must be a JSON object"),
        ("a.yaml", "A: 1", "must hold MODEL_ARGS"),
        ("a.yaml", "A: [", "must hold MODEL_ARGS"),
    ],
)
def test_a_file_that_holds_something_else(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_cases(path)
    with pytest.raises(DataError, match="can't be read"):
        read_cases(tmp_path / "none.jsonl")


def test_the_command_line_of_flags_with_several_values() -> None:
    args = {
        "--bf16": True,
        "--data-path": "0.3 a 0.7 b",
        "--split": "99,1,0",
        "--valid-data-path": ["c", "d"],
        "--seed": 3,
    }
    line = "--bf16 --data-path 0.3 a 0.7 b --split 99,1,0 --valid-data-path c d --seed 3"
    assert " ".join(command_line(args)) == line


def local(args: dict) -> SmallRun:
    run = SmallRun(Case("c", "regular", args), args, 1, ("before",))
    return localise(run, FILES, Path("/out"))


def test_paths_become_local() -> None:
    run = local(
        {
            "--data-path": "${DATA}/x",
            "--vocab-file": "${DATA}/v",
            "--merge-file": "${DATA}/m",
            "--save": "${SAVE}",
            "--load": "${LOAD}/model",
            "--seed": "${REPEAT}",
            "--tensorboard-dir": "t",
            "--wandb-project": "p",
            "--wandb-save-dir": "w",
        }
    )
    assert run.args == {
        "--data-path": ["a"],
        "--vocab-file": "vocab.json",
        "--merge-file": "merges.txt",
        "--save": "/out/checkpoints",
        "--load": "/out/checkpoints",
        "--seed": 1,
        "--tensorboard-dir": "/out/tensorboard",
    }
    assert run.notes == ("before", "--wandb-* talk to a service")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"--tokenizer-type": "NullTokenizer"}, {"--tokenizer-type": "NullTokenizer"}),
        (
            {"--tokenizer-type": "Llama2Tokenizer", "--tokenizer-model": "x"},
            {"--tokenizer-type": "Llama2Tokenizer", "--tokenizer-model": "sp.model"},
        ),
        (
            {"--tokenizer-type": "TikTokenizer", "--tokenizer-model": "x"},
            {"--tokenizer-type": "HuggingFaceTokenizer", "--tokenizer-model": "tokenizer.json"},
        ),
        ({"--data-path": "$DATA_BLEND"}, {"--data-path": ["0.7", "a", "0.3", "b"]}),
        ({"--data-path": "0.5 x 0.5 y"}, {"--data-path": ["0.7", "a", "0.3", "b"]}),
    ],
)
def test_tokenizers_and_blends(given: dict, expected: dict) -> None:
    assert local(given).args == expected


def judge(tmp_path: Path, out: str, err: str = "", codes: dict | None = None):
    (tmp_path / "out.0").write_text(out)
    (tmp_path / "err.0").write_text(err)
    run = SmallRun(Case("c", "regular", {}), {}, 1, ())
    launched = Launched(run, [], tmp_path, {}, 0.0, 0.0, codes or {0: 0})
    return outcome(launched, 3)


def lines(*losses: str) -> str:
    return "\n".join(f" iteration 1/3 | lm loss: {loss} | loss scale: 1.0 |" for loss in losses)


@pytest.mark.parametrize(
    ("out", "err", "code", "status", "reason"),
    [
        (lines("3.0", "3.1", "2.9"), "", 0, "ok", "3.0000 > 3.1000 > 2.9000"),
        (lines("3.0", "2.9"), "", 0, "failed", "2 losses logged, not 3"),
        (lines("3.0", "nan", "2.9"), "", 0, "failed", "loss isn't finite"),
        (lines("3.0", "2.5", "3.0"), "", 0, "failed", "loss doesn't fall"),
        ("", "w\nerror: --fp8 is refused: no fp8", 1, "refused", "--fp8 is refused: no fp8"),
        ("", "error: --a: must be 1", 1, "failed", "--a: must be 1"),
        ("", "error: 2 problems:\n  - x is refused: a\n  - y", 1, "refused", "2 problems: - x is"),
        ("", "Traceback (...)\nValueError: is refused: x", 1, "failed", "Traceback: ValueError"),
        ("", "", -9, "failed", "exit codes"),
    ],
)
def test_what_a_run_is_judged_by(
    tmp_path: Path, out: str, err: str, code: int, status: str, reason: str
) -> None:
    result = judge(tmp_path, out, err, {0: code})
    assert result.status == status
    assert reason in result.reason
