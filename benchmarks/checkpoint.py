"""What saves cost: time that training waits for them, and what they leave behind in memory.

python benchmarks/checkpoint.py                      # the demo model, saves of both kinds
python benchmarks/checkpoint.py --soak-steps 2000    # a tiny model, a save every 20 steps
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import resource
import shutil
import statistics
import tempfile
import time
import warnings
from pathlib import Path

from megatron.packed.arguments import config_from_flags

DEMO = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 512 --vocab-size 8192 "
)
TINY = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 64 --vocab-size 512 "
COMMON = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 1 "
    "--lr 1e-4 --lr-decay-style constant --eval-iters 0 --log-interval 1000000 --mock-data "
    "--tokenizer-type NullTokenizer --num-workers 0 --use-packed-sequence --accelerator cpu "
    "--save-interval 1000000 --save-retain-interval 1000000000 "
)


def _build(flags: str, folder: Path, steps: int) -> object:
    from megatron.packed.training import environment, setup

    config = config_from_flags(f"{flags} {COMMON} --train-iters {steps} --save {folder}", {})
    this_process = environment.start(config)
    return setup.build_trainer(config, this_process)


def _blocked(asynchronous: bool, saves: int, steps_between: int) -> tuple[list[float], float]:
    """Seconds that each save kept training waiting, and the median seconds of a step."""
    from megatron.packed.training import environment

    folder = Path(tempfile.mkdtemp(prefix="saves-"))
    blocked: list[float] = []
    steps: list[float] = []
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            count = saves * steps_between
            mode = "--async-save" if asynchronous else ""
            trainer = _build(f"{DEMO} {mode}", folder, count)
            for number in range(1, count + 1):
                start = time.perf_counter()
                trainer._train_one()  # type: ignore[attr-defined]
                steps.append(time.perf_counter() - start)
                before = trainer.saver.blocked_seconds  # type: ignore[attr-defined]
                trainer._asked_to_end()  # type: ignore[attr-defined]
                if number % steps_between == 0:
                    trainer._save(trainer.saver)  # type: ignore[attr-defined]
                spent = trainer.saver.blocked_seconds - before  # type: ignore[attr-defined]
                if number % steps_between == 0:
                    blocked.append(spent)
                elif blocked:
                    blocked[-1] += spent  # an asynchronous one is settled later
            trainer.saver.wait()  # type: ignore[attr-defined]
            environment.stop()
    finally:
        shutil.rmtree(folder)
    return blocked, statistics.median(steps)


def _rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 20)


def _soak(steps: int, interval: int) -> None:
    """A long run with saves: memory, open files and threads over its course."""
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    print("| step | resident memory (MiB) | open files | threads |\n|---|---|---|---|")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            trainer = _build(f"{TINY} --async-save", folder, steps)
        for number in range(1, steps + 1):
            with contextlib.redirect_stdout(io.StringIO()):
                trainer._train_one()  # type: ignore[attr-defined]
                trainer._asked_to_end()  # type: ignore[attr-defined]
                if number % interval == 0:
                    trainer._save(trainer.saver)  # type: ignore[attr-defined]
            if number % max(steps // 5, 1) == 0 or number == 2 * interval:
                files = len(os.listdir("/proc/self/fd"))
                threads = len(os.listdir("/proc/self/task"))
                print(f"| {number} | {_rss_mib():.1f} | {files} | {threads} |", flush=True)
        trainer.saver.wait()  # type: ignore[attr-defined]
    finally:
        shutil.rmtree(folder)


def main() -> None:
    """Measure and print."""
    warnings.simplefilter("ignore")  # about optional packages, on import
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--saves", type=int, default=6, help="saves of each kind")
    parser.add_argument("--steps-between", type=int, default=4)
    parser.add_argument("--soak-steps", type=int, default=0, help="only the soak, so many steps")
    parser.add_argument("--soak-interval", type=int, default=20, help="steps between its saves")
    arguments = parser.parse_args()
    if arguments.soak_steps:
        _soak(arguments.soak_steps, arguments.soak_interval)
        return
    medians = {}
    for asynchronous in (False, True):
        blocked, step = _blocked(asynchronous, arguments.saves, arguments.steps_between)
        kind = "asynchronous" if asynchronous else "synchronous"
        medians[kind] = statistics.median(blocked[1:])  # the first one agrees on who writes what
        print(
            f"{kind}: a save keeps training waiting for {1000 * medians[kind]:.1f} ms (first "
            f"{1000 * blocked[0]:.1f} ms); a step takes {1000 * step:.1f} ms"
        )
    share = medians["asynchronous"] / medians["synchronous"]
    print(f"asynchronous over synchronous: {100 * share:.1f} %")


if __name__ == "__main__":
    main()
