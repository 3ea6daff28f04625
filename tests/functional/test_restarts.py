"""The launcher's own restarts: a rank that is killed, and a run that ends as if it had not been."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.functional.test_programs import PRETRAIN, REPOSITORY, RUN, corpus  # noqa: F401

FLAGS = f"{RUN} --train-iters 14 --log-interval 1 --save-interval 3 --async-save --eval-iters 0 "
DEADLINE = 900.0


class Launched:
    """torchrun in the background, its output in a file."""

    def __init__(self, flags: str, folder: Path, *launcher: str) -> None:
        folder.mkdir(exist_ok=True)
        self.log = folder / "output.txt"
        environ = {
            name: value
            for name, value in os.environ.items()
            if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        }
        environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", *launcher, PRETRAIN, *flags.split()]
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environ, stdout=output, stderr=subprocess.STDOUT
            )

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str) -> None:
        """Wait for a line of output."""
        deadline = time.monotonic() + DEADLINE
        while text not in self.text:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.05)

    def ranks(self) -> list[int]:
        """Process ids of the ranks, the program's own: not their data-loader workers."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        found = []
        for child in children.read_text().split():
            if "pretrain_gpt.py" in Path(f"/proc/{child}/cmdline").read_text():
                found.append(int(child))
        return found

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()  # with its ranks
            self.process.wait(timeout=60.0)

    def end(self) -> int:
        """Wait for the launcher's end."""
        return self.process.wait(timeout=DEADLINE)


def _losses(text: str) -> dict[int, set[str]]:
    """Logged losses by iteration, of all starts."""
    found: dict[int, set[str]] = {}
    for iteration, loss in re.findall(r"iteration +(\d+)/.*lm loss: (\S+)", text):
        found.setdefault(int(iteration), set()).add(loss)
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_killed_rank_is_started_again_without_a_flag(
    corpus: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    flags = f"{FLAGS} --data-path {corpus}"
    saving, restarts = f"{flags} --save checkpoints", ("--max-restarts", "2")
    with Launched(saving, tmp_path / "killed", *restarts) as killed:
        for restart, iteration in ((1, 5), (2, 10)):
            killed.wait_for(f"iteration {iteration:8d}/")
            os.kill(killed.ranks()[1], signal.SIGKILL)
            killed.wait_for(f"restart {restart} of the job: going on from")
        assert killed.end() == 0, killed.text
    assert all(len(losses) == 1 for losses in _losses(killed.text).values())
    with Launched(flags, tmp_path / "whole") as whole:
        assert whole.end() == 0, whole.text
    assert _losses(killed.text) == _losses(whole.text)
    assert len(_losses(whole.text)) == 14
    tracker = tmp_path / "killed" / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert tracker.read_text() == "14"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_launcher_passes_a_signal_on(
    corpus: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """As a cluster does it: the launcher and every rank get the signal."""
    flags = f"{FLAGS} --data-path {corpus} --train-iters 1000 --save c --exit-signal-handler"
    with Launched(flags, tmp_path / "signalled") as run:
        run.wait_for("iteration        4/")
        for process in (*run.ranks(), run.process.pid):
            os.kill(process, signal.SIGTERM)
        run.end()
    assert "SIGTERM: ending after iteration" in run.text and "second signal" not in run.text
    iteration = re.search(r"ending after iteration (\d+), saving", run.text)
    assert iteration is not None
    tracker = tmp_path / "signalled" / "c" / "latest_checkpointed_iteration.txt"
    assert tracker.read_text() == iteration[1]
    assert "exitcode  : 1" not in run.text and "SIGKILL" not in run.text
