"""Two ways to start the training program for a functional test, and to wait for its end."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from unittest import mock

from tests.distributed.pool import WorkerPools
from tests.functional.mutants import MutatedPools

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT = 900.0

Launch = Callable[[Sequence[str], int, Mapping[str, str], Path], None]
"""Runs a command line on a number of processes with variables, in a folder; raises if it fails."""


def through_torchrun(
    words: Sequence[str], processes: int, environment: Mapping[str, str], folder: Path
) -> None:
    """As a user starts it."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(processes), str(REPOSITORY / "pretrain_gpt.py")]
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    }
    environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [*launcher, *words],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    if result.returncode:
        said = [line for line in result.stderr.splitlines() if "rror" in line] or ["nothing said"]
        raise RuntimeError(f"exit code {result.returncode}: {said[0]}")


def in_pool(pools: WorkerPools | MutatedPools) -> Launch:
    """In ranks that have imported everything already."""

    def launch(
        words: Sequence[str], processes: int, environment: Mapping[str, str], folder: Path
    ) -> None:
        pools(processes).run(_main, list(words), dict(environment), str(folder), timeout=TIMEOUT)

    return launch


def _main(words: list[str], environment: dict[str, str], folder: str) -> None:
    """The program in this rank."""
    import pretrain_gpt
    from megatron.packed.training import setup

    os.chdir(folder)
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(sys, "argv", ["pretrain_gpt.py", *words]),
        # The peak only scales the MFU of the log, and takes half a second.
        mock.patch.object(setup, "measure_gemm_peak", lambda *args, **kwargs: 1e9),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        pretrain_gpt.main()
