"""Curves of runs: read, written, compared."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.packed.cases.curves import (
    compare,
    golden_text,
    read_curves,
    read_golden,
    read_scalar,
)
from megatron.packed.errors import DataError

REPOSITORY = Path(__file__).resolve().parents[3]


def _tensorboard(folder: Path, values: dict[int, float]) -> Path:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for step, value in values.items():
            writer.add_scalar("lm loss", value, step)
    return folder


def test_golden_values_come_back(tmp_path: Path) -> None:
    path = tmp_path / "golden.json"
    path.write_text(golden_text({"lm loss": {10: 5.1234567, 20: 5.0, 30: 4.0}}))
    assert read_golden(path) == {"lm loss": {10: 5.12346, 20: 5.0, 30: 4.0}}
    entry = json.loads(path.read_text())["lm loss"]
    assert (entry["start_step"], entry["end_step"], entry["step_interval"]) == (10, 30, 10)


def test_values_may_be_a_list_and_steps_may_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "golden.json"
    entry = {"start_step": 1, "end_step": 9, "step_interval": 4, "values": [3.0, "nan", 1.0]}
    path.write_text(json.dumps({"lm loss": entry}))
    assert read_golden(path) == {"lm loss": {1: 3.0, 9: 1.0}}


@pytest.mark.parametrize("text", ["", "[]", '{"lm loss": 3}', '{"lm loss": {"start_step": 1}}'])
def test_what_is_no_golden_file_is_said(text: str, tmp_path: Path) -> None:
    path = tmp_path / "golden.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"golden\.json: must hold golden values"):
        read_golden(path)


def test_comparison() -> None:
    found = compare({1: 1.0, 2: 2.2, 3: 3.0}, {1: 1.0, 2: 2.0, 4: 9.0})
    assert (found.steps, found.first) == (2, 2)
    assert found.largest == pytest.approx(0.1) and found.mean == pytest.approx(0.05)
    assert compare({1: 1.0 + 1e-7}, {1: 1.0}, bound=1e-6).first is None
    assert compare({1: math.nan}, {1: math.nan}).first is None
    assert compare({1: math.nan}, {1: 1.0}, bound=1.0).first == 1
    assert math.isnan(compare({1: 1.0}, {}).largest)


def test_tensorboard_folders(tmp_path: Path) -> None:
    folder = _tensorboard(tmp_path / "run", {1: 5.0, 2: 4.5})
    assert read_scalar(folder, "lm loss") == ([1, 2], [5.0, 4.5])
    assert read_scalar(folder, "grad-norm") == ([], [])
    assert read_curves(folder) == {"lm loss": {1: 5.0, 2: 4.5}}
    with pytest.raises(DataError, match="holds no TensorBoard events"):
        read_curves(tmp_path)


def _compare(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(REPOSITORY / "tools" / "compare_loss_curves.py"), *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=200, env={"PYTHONPATH": str(REPOSITORY)}
    )


def test_the_tool_compares_both_kinds(tmp_path: Path) -> None:
    one = _tensorboard(tmp_path / "run", {1: 5.0, 2: 4.5})
    two = tmp_path / "golden.json"
    two.write_text(golden_text({"lm loss": {1: 5.0, 2: 4.0}}))
    picture = tmp_path / "out" / "curves.png"
    result = _compare(str(two), str(one), "--output", str(picture))
    assert result.returncode == 0, result.stderr
    assert "2 steps, relative difference at most 1.25e-01, mean 6.25e-02" in result.stdout
    assert "more than 1e-06 at step 2" in result.stdout
    assert picture.stat().st_size > 1000
    result = _compare(str(two), str(one), "--metric", "grad-norm")
    assert result.returncode != 0 and "Traceback" not in result.stderr
    assert "--metric grad-norm" in result.stderr
