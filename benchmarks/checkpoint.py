"""What saves cost: time that training waits for them, and what they leave behind in memory.

python benchmarks/checkpoint.py                      # the demo model, saves of both kinds
torchrun --nproc-per-node 2 benchmarks/checkpoint.py # the same on the demo's layout
python benchmarks/checkpoint.py --soak-steps 2000    # a tiny model, a save every 20 steps
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.packed.arguments import config_from_flags

if TYPE_CHECKING:
    from megatron.packed.training.loop import Trainer

DEMO = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 512 --vocab-size 8192 "
)
DEMO_LAYOUT = "--context-parallel-size 2 --use-distributed-optimizer "
TINY = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 64 --vocab-size 512 "
COMMON = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 1 "
    "--lr 1e-4 --lr-decay-style constant --eval-iters 0 --log-interval 1000000 --mock-data "
    "--tokenizer-type NullTokenizer --num-workers 0 --use-packed-sequence --accelerator cpu "
    "--save-interval 1000000 --save-retain-interval 1000000000 "
)


def _build(flags: str, folder: Path, steps: int) -> Trainer:
    from megatron.packed.training import environment, setup

    config = config_from_flags(
        f"{flags} {COMMON} --train-iters {steps} --save {folder}", os.environ
    )
    this_process = environment.start(config)
    return setup.build_trainer(config, this_process)


@dataclass
class Cost:
    """What one kind of saves has cost, in seconds, one entry a save.

    Attributes:
        blocked: the training loop waited for the save: in it, before the update that follows, and
            for its end.
        added: the save and the steps until the next one took longer than as many other steps.
    """

    blocked: list[float] = field(default_factory=list)
    added: list[float] = field(default_factory=list)


def _measure(saves: int, steps_between: int) -> tuple[dict[str, Cost], float]:
    """Costs of saves of both kinds, taking turns, and the median seconds of a step without."""
    from megatron.packed.training import environment
    from megatron.packed.training.checkpointing import CheckpointSaver

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    folder = Path(tempfile.gettempdir()) / f"saves-{os.environ.get('MASTER_PORT', os.getpid())}"
    costs = {"synchronous": Cost(), "asynchronous": Cost()}
    steps: list[float] = []
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            layout = DEMO_LAYOUT if world_size > 1 else ""
            count = 2 * (saves + 1) * steps_between + 3
            trainer = _build(f"{DEMO} {layout}", folder, count)
            config, splits = trainer.config, trainer.splits
            savers = {
                kind: CheckpointSaver(
                    replace(config, checkpoint=replace(config.checkpoint, async_save=is_async)),
                    trainer.step,
                    splits.state_dict,
                )
                for kind, is_async in (("synchronous", False), ("asynchronous", True))
            }
            for _ in range(3):
                trainer._train_one()
            for _ in range(saves + 1):  # the first one of each kind agrees on who writes what
                for kind, saver in savers.items():
                    trainer.saver, trainer.step.before_update = saver, saver.release
                    before, start = saver.blocked_seconds, time.perf_counter()
                    trainer._save(saver)
                    for number in range(steps_between):
                        if number == steps_between - 1:
                            spent = time.perf_counter() - start
                            start = time.perf_counter()
                        trainer._train_one()
                        trainer._asked_to_end()
                    steps.append(time.perf_counter() - start)
                    assert not saver.in_flight, "the last step is to be one without a save"
                    costs[kind].blocked.append(saver.blocked_seconds - before)
                    costs[kind].added.append(spent)
    finally:
        environment.stop()
        shutil.rmtree(folder, ignore_errors=True)
    step = statistics.median(steps)
    for cost in costs.values():
        cost.added = [spent - (steps_between - 1) * step for spent in cost.added]
    return costs, step


def _held() -> str:
    """What this process holds: resident memory, what is allocated of it, files, threads."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident = pages * resource.getpagesize() / (1 << 20)
    objects = gc.get_objects()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in objects
        if type(tensor).__module__ == "torch" and type(tensor).__name__ in ("Tensor", "Parameter")
    }
    files, threads = (len(os.listdir(f"/proc/self/{each}")) for each in ("fd", "task"))
    return (
        f"{resident:.1f} | {sum(storages.values()) / (1 << 20):.3f} | {len(objects)} | "
        f"{sys.getallocatedblocks()} | {files} | {threads}"
    )


def _soak(steps: int, interval: int) -> None:
    """A long run with saves: what the process holds over its course."""
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    print(
        "| step | resident memory (MiB) | tensors (MiB) | Python objects | Python memory blocks | "
        "open files | threads |\n|---|---|---|---|---|---|---|"
    )
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            trainer = _build(f"{TINY} --async-save", folder, steps)
        for number in range(1, steps + 1):
            with contextlib.redirect_stdout(io.StringIO()):
                trainer._train_one()
                trainer._asked_to_end()
                if number % interval == 0:
                    trainer._save(trainer.saver)
            if number % max(steps // 5, 1) == 0 or number == 2 * interval:
                with contextlib.redirect_stdout(io.StringIO()):
                    trainer.saver.wait()
                print(f"| {number} | {_held()} |", flush=True)
    finally:
        shutil.rmtree(folder)


def main() -> None:
    """Measure and print."""
    warnings.simplefilter("ignore")  # about optional packages, on import
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--saves", type=int, default=6, help="saves of each kind")
    parser.add_argument("--steps-between", type=int, default=8)
    parser.add_argument("--soak-steps", type=int, default=0, help="only the soak, so many steps")
    parser.add_argument("--soak-interval", type=int, default=20, help="steps between its saves")
    arguments = parser.parse_args()
    if arguments.soak_steps:
        _soak(arguments.soak_steps, arguments.soak_interval)
        return
    costs, step = _measure(arguments.saves, arguments.steps_between)
    if int(os.environ.get("RANK", "0")):
        return
    print(f"a step without a save takes {1000 * step:.1f} ms; a save, median (first):")
    medians = {}
    for kind, cost in costs.items():
        medians[kind] = [statistics.median(times[1:]) for times in (cost.blocked, cost.added)]
        blocked, added = (
            f"{1000 * median:.1f} ms ({1000 * times[0]:.1f})"
            for median, times in zip(medians[kind], (cost.blocked, cost.added), strict=True)
        )
        print(f"{kind:>13}: keeps training waiting for {blocked}, adds {added} to its steps")
    shares = [b / a for a, b in zip(*medians.values(), strict=True)]
    print(f"asynchronous over synchronous: {100 * shares[0]:.1f} %, {100 * shares[1]:.1f} %")


if __name__ == "__main__":
    main()
