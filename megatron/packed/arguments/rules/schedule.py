"""Rules on the length of a run and the sizes of its batches."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.packed.arguments.batch_sizes import BatchSizes, batch_sizes
from megatron.packed.arguments.config import Config
from megatron.packed.arguments.stages import known_stages, micro_batch_problems
from megatron.packed.errors import ConfigurationError

IN_SAMPLES = ("lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples")
IN_ITERATIONS = ("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")


def run_length(config: Config) -> Iterator[str]:
    """Everything is counted in iterations, or everything in samples."""
    samples = config.schedule.train_samples
    if samples is None:
        counted, others = "--train-iters", IN_SAMPLES
    else:
        counted, others = "--train-samples", IN_ITERATIONS
        yield from _warmup_in_samples(config, samples)
        if config.is_given("train_iters"):
            yield (
                f"--train-iters {config.training.train_iters} and --train-samples {samples}: "
                "exclude each other; keep one"
            )
        elif config.training.train_iters < 1:
            yield (
                f"--train-samples {samples}: are fewer than one global batch of "
                f"{config.training.global_batch_size}; train on more, or take smaller batches"
            )
    for dest in others:
        if config.is_given(dest) and config.get(dest):
            flag = "--" + dest.replace("_", "-")
            yield (
                f"{flag} {config.get(dest)}: the run is counted by {counted}, and so are its "
                f"schedules; use the flag that ends in {counted.removeprefix('--train')}"
            )


def sizes_of_batches(config: Config) -> Iterator[str]:
    schedule = config.schedule
    if schedule.step_batch_size_schedule is not None:
        flag, value = "--step-batch-size-schedule", schedule.step_batch_size_schedule
        for dest in ("global_batch_size", "rampup_batch_size"):
            if config.is_given(dest):
                yield f"{flag} and --{dest.replace('_', '-')}: exclude each other; keep one"
    elif schedule.rampup_batch_size is not None:
        flag, value = "--rampup-batch-size", " ".join(map(str, schedule.rampup_batch_size))
    else:
        return
    try:
        sizes: BatchSizes = batch_sizes(config)
    except ConfigurationError as error:
        yield f"{flag} {value}: {error}"
        return
    step = config.training.micro_batch_size * config.parallel.data_parallel_size
    odd = [size for size in sizes.sizes if step and size % step]
    if odd:
        yield (
            f"{flag} {value}: {odd[0]} samples must be a multiple of --micro-batch-size "
            f"{config.training.micro_batch_size} x {config.parallel.data_parallel_size} "
            f"data-parallel replicas = {step}"
        )
        return
    stages = known_stages(config)
    if stages is None or not step:
        return
    for size in sizes.sizes[:-1]:  # the last is --global-batch-size's, which has its own rule
        problems = list(micro_batch_problems(config, stages, size // step, f"{flag} {value}"))
        if problems:
            yield problems[0]
            return


def _warmup_in_samples(config: Config, samples: int) -> Iterator[str]:
    schedule, fraction = config.schedule, config.optimization.lr_warmup_fraction
    warmup, decay = schedule.lr_warmup_samples, schedule.lr_decay_samples or samples
    if fraction is not None and warmup:
        yield (
            f"--lr-warmup-fraction {fraction:g} and --lr-warmup-samples {warmup}: exclude each "
            "other; keep one"
        )
    if warmup >= decay:
        yield (
            f"--lr-warmup-samples {warmup}: must be fewer than --lr-decay-samples {decay} "
            "(default --train-samples)"
        )


RULES = (run_length, sizes_of_batches)
