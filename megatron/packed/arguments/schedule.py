"""Lengths of a run counted in samples, batches that grow, and when to exit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.packed.arguments.declare import flag


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Lengths of a run counted in samples, batches that grow, and when to exit."""

    SECTION: ClassVar[str] = "schedule"

    train_samples: int | None = flag(
        "Samples of the whole run, in place of --train-iters.", at_least=1
    )
    step_batch_size_schedule: str | None = flag(
        "Global batch sizes from numbers of tokens on, as in '0:384 200B:768'; in place of "
        "--global-batch-size."
    )
    rampup_batch_size: tuple[int, ...] | None = flag(
        "First global batch size, increment, and samples until --global-batch-size is reached.",
        at_least=1,
    )
    decrease_batch_size_if_needed: bool = flag(
        "Take smaller batches where the replicas don't divide them.",
        default=False,
        refused="a run's batches don't depend on its processes here; choose a batch size that the "
        "replicas divide",
    )
    lr_decay_samples: int | None = flag(
        "Samples the decay stretches over, with --train-samples.",
        section="learning rate",
        at_least=1,
    )
    lr_warmup_samples: int = flag(
        "Samples of linear warm-up, with --train-samples.",
        default=0,
        section="learning rate",
        at_least=0,
    )
    lr_wsd_decay_samples: int | None = flag(
        "Samples of WSD's final phase, with --train-samples.",
        section="learning rate",
        at_least=1,
    )
    exit_duration_in_mins: int | None = flag(
        "Stop, with a checkpoint, once the program has run this many minutes.", at_least=0
    )
    manual_gc: bool = flag(
        "Collect Python's garbage on all processes at the same moments.",
        default=False,
        section="training",
    )
    manual_gc_interval: int = flag(
        "Iterations between collections with --manual-gc; 0 only at its start.",
        default=0,
        section="training",
        at_least=0,
    )
    manual_gc_eval: bool = flag(
        "With --manual-gc, do not collect before and after evaluations.",
        "--no-manual-gc-eval",
        "--disable-manual-gc-eval",
        default=True,
        negative=True,
        section="training",
    )
