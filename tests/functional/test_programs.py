"""The programs as a user starts them: processes, exit codes, and what they print."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PRETRAIN = str(REPOSITORY / "pretrain_gpt.py")

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 "
    "--position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 "
    "--tokenizer-type ByteTokenizer --lr 1e-3 --accelerator cpu --threads 1 "
)
RUN = (
    MODEL + "--micro-batch-size 1 --global-batch-size 4 --train-iters 6 --log-interval 2 "
    "--eval-iters 1 --eval-interval 3 --split 90,5,5 --num-workers 1 --use-packed-sequence "
)


def _program(*command: str, folder: Path, timeout: float = 120.0) -> subprocess.CompletedProcess:
    """Run a command in a folder of its own, one thread a process, the repository importable."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    }
    environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), environ.get("PYTHONPATH", "")])
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=timeout
    )


def _pretrain(
    flags: str, folder: Path, *, processes: int | None = None, timeout: float = 120.0
) -> subprocess.CompletedProcess:
    launcher = [sys.executable]
    if processes is not None:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(processes)]
    return _program(*launcher, PRETRAIN, *flags.split(), folder=folder, timeout=timeout)


def _losses(output: str) -> list[float]:
    return [float(text) for text in re.findall(r"lm loss: (\S+)", output)]


def _assert_one_message(result: subprocess.CompletedProcess, code: int, *parts: str) -> None:
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr + result.stdout
    lines = result.stderr.strip().splitlines()
    assert lines[0].startswith("error: ")
    assert len(lines) == 1, result.stderr
    for part in parts:
        assert part in lines[0]


@pytest.fixture(scope="module")
def corpus(corpus_documents: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real text in short documents, preprocessed by the tool; the prefix of .bin and .idx."""
    folder = tmp_path_factory.mktemp("programs")
    source = folder / "text.jsonl"
    with source.open("w", encoding="utf-8") as file:
        for text in corpus_documents[:12]:
            for part in text.split("\n\n"):
                file.write(json.dumps({"text": part}) + "\n")
    flags = f"--input {source} --output-prefix {folder / 'bytes'} --workers 1 --append-eod"
    tool = str(REPOSITORY / "tools" / "preprocess_data.py")
    result = _program(
        sys.executable, tool, *flags.split(), "--tokenizer-type", "ByteTokenizer", folder=folder
    )
    assert result.returncode == 0, result.stderr
    return folder / "bytes_text_document"


@pytest.fixture(scope="module")
def two_processes(corpus: Path, tmp_path_factory: pytest.TempPathFactory):
    """Output and TensorBoard folder of a short run on two processes."""
    folder = tmp_path_factory.mktemp("two-processes")
    flags = f"{RUN} --data-path {corpus} --use-distributed-optimizer --log-throughput"
    return _pretrain(f"{flags} --tensorboard-dir curves", folder, processes=2), folder / "curves"


def test_two_processes_train(two_processes: tuple) -> None:
    result, _ = two_processes
    assert result.returncode == 0, result.stderr
    output = result.stdout
    assert "world size 2: tensor 1, pipeline 1, context 1, data 2" in output
    losses = _losses(output)
    assert len(losses) == 3 and losses[-1] < losses[0] - 0.1
    lines = [line for line in output.splitlines() if "lm loss:" in line]
    assert [re.search(r"iteration +(\d+)/ +6 ", line)[1] for line in lines] == ["2", "4", "6"]
    assert all("throughput per GPU" in line for line in lines)
    assert output.count("segments per pack:") == 3
    assert output.count("validation loss at iteration") == 2
    assert output.count("test loss at the end of training") == 1


def test_the_log_is_clean(two_processes: tuple) -> None:
    """One line once, and nothing on standard error that a library chose to say."""
    result, _ = two_processes
    lines = [line for line in result.stdout.splitlines() if line.strip("- ")]
    assert len(lines) == len(set(lines))
    noise = [line for line in result.stderr.splitlines() if line.strip()]
    noise = [line for line in noise if "torch.distributed.run" not in line and "*****" not in line]
    noise = [line for line in noise if "OMP_NUM_THREADS" not in line]
    assert not noise


def test_tensorboard_curves(two_processes: tuple) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, folder = two_processes
    assert len(list(folder.iterdir())) == 1  # rank 0 alone writes
    events = EventAccumulator(str(folder)).Reload()
    names = set(events.Tags()["scalars"])
    assert {"lm loss", "lm loss vs samples", "grad-norm", "learning-rate", "batch-size"} <= names
    assert {"throughput", "lm loss validation", "lm loss test"} <= names
    assert [event.step for event in events.Scalars("lm loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in events.Scalars("lm loss vs samples")] == [4, 8, 12, 16, 20, 24]


def test_one_process_without_a_launcher_trains_the_same(
    two_processes: tuple, corpus: Path, tmp_path: Path
) -> None:
    result = _pretrain(f"{RUN} --data-path {corpus}", tmp_path)
    assert result.returncode == 0, result.stderr
    assert _losses(result.stdout) == pytest.approx(_losses(two_processes[0].stdout), rel=5e-6)
    assert not list(tmp_path.iterdir())  # a run writes nothing that was not asked for


def test_two_processes_that_share_every_pack_train_the_same(
    two_processes: tuple, corpus: Path, tmp_path: Path
) -> None:
    flags = f"{RUN} --data-path {corpus} --context-parallel-size 2 --attention-backend magi"
    result = _pretrain(flags, tmp_path, processes=2)
    assert result.returncode == 0, result.stderr
    assert "world size 2: tensor 1, pipeline 1, context 2, data 1" in result.stdout
    assert _losses(result.stdout) == pytest.approx(_losses(two_processes[0].stdout), rel=5e-6)


def test_help_is_quick(tmp_path: Path) -> None:
    start = time.perf_counter()
    result = _pretrain("--help", tmp_path)
    seconds = time.perf_counter() - start
    assert result.returncode == 0
    assert "--use-packed-sequence" in result.stdout and not result.stderr
    assert seconds < 2.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (RUN + "--mock-data --sequence-lenght 128", ["--sequence-lenght", "--seq-length"]),
        (MODEL + "--mock-data --micro-batch-size 1", ["--train-iters"]),
        (RUN + "--mock-data --micro-batch-size x", ["--micro-batch-size", "whole number"]),
    ],
    ids=["unknown-flag", "missing-flag", "bad-value"],
)
def test_a_command_line_that_cannot_be_read(flags: str, parts: list[str], tmp_path: Path) -> None:
    _assert_one_message(_pretrain(flags, tmp_path), 2, *parts)


def test_flags_that_do_not_fit_each_other(tmp_path: Path) -> None:
    flags = RUN + "--mock-data --tensor-model-parallel-size 3"
    result = _pretrain(flags, tmp_path)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "--tensor-model-parallel-size 3" in result.stderr


def test_data_that_is_not_there(corpus: Path, tmp_path: Path) -> None:
    typo = f"{corpus}s"
    _assert_one_message(_pretrain(f"{RUN} --data-path {typo}", tmp_path), 1, f"--data-path {typo}")


def test_two_processes_say_an_error_once(corpus: Path, tmp_path: Path) -> None:
    result = _pretrain(f"{RUN} --data-path {corpus}s", tmp_path, processes=2)
    assert result.returncode != 0
    assert result.stderr.count("error: --data-path") == 1


def test_training_that_diverges(corpus: Path, tmp_path: Path) -> None:
    flags = f"{RUN} --data-path {corpus} --lr 1e30 --clip-grad 0"
    result = _pretrain(flags, tmp_path)
    _assert_one_message(result, 1, "NaN or Inf at iteration 2: samples 4..7", "--lr")


def test_a_folder_that_cannot_be_written(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    result = _pretrain(f"{RUN} --data-path {corpus} --tensorboard-dir taken", tmp_path)
    _assert_one_message(result, 1, "--tensorboard-dir taken", "another folder")
