"""A large run made small enough for a look on a CPU, with the same features switched on.

`shrink` is a pure function of a case's flags: two to four layers, hidden size 64, rows of 64
tokens, a few samples a step, three steps, at most four processes. Sizes that hang together shrink
together; switches stay as they are. What could not be kept is said in the notes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron.packed.cases.blocks import shrink_description, widths
from megatron.packed.cases.case import Case, Value
from megatron.packed.cases.layers import DESCRIPTION_TEXT, GROUP, STAGE_FLAGS, shrink_layers
from megatron.packed.cases.parallel import (
    CONTEXT,
    EXPERT,
    EXPERT_TENSOR,
    INSTANCES,
    PIPELINE,
    PROCESSES,
    TENSOR,
    ParallelSizes,
    exchanges_heads,
    shrink_parallel_sizes,
    size,
)
from megatron.packed.errors import ConfigurationError

STEPS = 3
HIDDEN = 64
HEADS = 4
ROW = 64
VOCABULARY = 512
LEARNING_RATE = 5e-3
RARELY = 10**9

# At most these; a smaller value stays.
_LIMITS: Mapping[str, int] = {
    "--kv-channels": HIDDEN // HEADS,
    "--ffn-hidden-size": 2 * HIDDEN,
    "--moe-ffn-hidden-size": HIDDEN // 2,
    "--moe-shared-expert-intermediate-size": HIDDEN // 2,
    "--moe-latent-size": HIDDEN // 2,
    "--q-lora-rank": 32,
    "--kv-lora-rank": 16,
    "--qk-head-dim": 16,
    "--qk-pos-emb-head-dim": 8,
    "--v-head-dim": 16,
    "--linear-key-head-dim": 16,
    "--linear-value-head-dim": 16,
    "--linear-num-key-heads": 2,
    "--linear-num-value-heads": 4,
    "--dsa-indexer-n-heads": 4,
    "--dsa-indexer-head-dim": 16,
    "--dsa-indexer-topk": ROW // 4,
    "--mtp-num-layers": 2,
    "--recompute-num-layers": 1,
    "--make-vocab-size-divisible-by": 64,
    "--max-position-embeddings": ROW,
    "--seq-length": ROW,
    "--micro-batch-size": 2,
    "--eval-interval": STEPS,
    "--save-interval": STEPS,
    "--save-retain-interval": STEPS,
    "--manual-gc-interval": 1,
    "--check-weight-hash-across-dp-replicas-interval": 1,
    "--num-workers": 1,
    "--packing-window": 16,
    "--packed-sequence-capacity": 4 * ROW,
    "--cuda-graph-warmup-steps": 1,
}
# A schedule in proportion to three steps would end in them; these leave the rate where it shows.
_SCHEDULE_LENGTH = 4 * STEPS
_NO_WARMUP = ("--lr-warmup-iters", "--lr-warmup-samples")
_RATES = ("--min-lr", "--decoupled-lr", "--decoupled-min-lr", "--lr-warmup-init")
_LENGTHS = ("--lr-decay-iters", "--lr-decay-samples")
_LAST_LENGTHS = ("--lr-wsd-decay-iters", "--lr-wsd-decay-samples")
# What is set for three steps to show in the loss; the notes list each change.
SCHEDULE = (
    *("--lr", *_RATES, *_NO_WARMUP, *_LENGTHS, *_LAST_LENGTHS),
    *("--initial-loss-scale", "--exit-interval"),
)


@dataclass(frozen=True)
class SmallRun:
    """A case that fits a CPU.

    Attributes:
        case: What it was made from.
        args: Value of each flag.
        processes: How many to start.
        notes: What could not be kept, in words.
    """

    case: Case
    args: Mapping[str, Value] = field(hash=False)
    processes: int
    notes: tuple[str, ...]


def shrink(case: Case) -> SmallRun:
    """Make a run small.

    Args:
        case: As somebody wrote it for a cluster.
    """
    args, notes = dict(case.args), []
    sizes = shrink_parallel_sizes(args)
    notes += [
        f"{name} {args.get(name, 'of experts')} doesn't fit {PROCESSES} processes"
        for name in sizes.dropped
    ]
    if sizes.alone:
        notes.append(f"replicas for {', '.join(sizes.alone)} don't fit {PROCESSES} processes")
    args |= shrink_layers(case.args, sizes.pipeline)
    args |= _model(case.args, sizes)
    for name, limit in _LIMITS.items():
        if name in args:
            args[name] = min(size(args, name), limit)
    _set_parallel_sizes(args, sizes, notes)
    _set_batches(args, case.args, sizes)
    _set_schedule(args)
    _describe_layers(args, case.args)
    notes += _changes_of_schedule(case.args, args)
    if "--error-injection-rate" in args:
        # Once in so many checks: three steps have too many for a rate of long runs.
        args["--error-injection-rate"] = RARELY
        notes.append("--error-injection-rate is lowered, an injected error would end the steps")
    args["--log-interval"] = 1
    args["--eval-iters"] = min(size(args, "--eval-iters", 1), 1)
    return SmallRun(case, args, sizes.processes, tuple(notes))


def _model(args: Mapping[str, Value], sizes: ParallelSizes) -> dict[str, Value]:
    """Widths, heads and experts that go with each other."""
    values: dict[str, Value] = {"--hidden-size": HIDDEN}
    heads = min(size(args, "--num-attention-heads", HEADS), HEADS)
    # Exchanging heads for sequence needs a head on every rank.
    heads = max(heads, sizes.tensor * sizes.context)
    values["--num-attention-heads"] = heads
    if "--num-query-groups" in args and size(args, "--num-query-groups") > 1:
        fewest = sizes.tensor * sizes.context if exchanges_heads(args) else 2
        values["--num-query-groups"] = min(max(2, fewest), heads)
    if "--vocab-size" in args:
        values["--vocab-size"] = VOCABULARY
    if "--mup-base-hidden-size" in args:
        ratio = size(args, "--hidden-size") / size(args, "--mup-base-hidden-size")
        values["--mup-base-hidden-size"] = max(1, round(HIDDEN / ratio))
    if "--num-experts" in args:
        values |= _experts(args)
    if "--window-size" in args:
        values["--window-size"] = re.sub(
            r"\d+", lambda number: str(min(int(number[0]), ROW // 4)), str(args["--window-size"])
        )
    return values


def _experts(args: Mapping[str, Value]) -> dict[str, Value]:
    """Eight experts in up to four groups where routing is limited to groups, else four."""
    experts = min(size(args, "--num-experts"), 4)
    chosen = min(size(args, "--moe-router-topk", 2), 2)
    values: dict[str, Value] = {}
    if "--moe-router-num-groups" in args:
        groups = min(size(args, "--moe-router-num-groups"), 4)
        experts = 2 * groups
        of_groups = min(size(args, "--moe-router-group-topk", 1), groups // 2)
        chosen = max(chosen, of_groups)
        values |= {"--moe-router-num-groups": groups, "--moe-router-group-topk": of_groups}
    return {**values, "--num-experts": experts, "--moe-router-topk": chosen}


def _set_parallel_sizes(args: dict[str, Value], sizes: ParallelSizes, notes: list[str]) -> None:
    for name, new in ((TENSOR, sizes.tensor), (CONTEXT, sizes.context), (PIPELINE, sizes.pipeline)):
        if name in args:
            args[name] = new
    if "--num-experts" not in args:
        for name in (EXPERT, EXPERT_TENSOR):
            if name in args:
                args[name] = 1 if name == EXPERT else sizes.tensor
    else:
        if EXPERT in args:
            args[EXPERT] = sizes.expert
        if EXPERT_TENSOR in args or sizes.expert_tensor != sizes.tensor:
            args[EXPERT_TENSOR] = sizes.expert_tensor
    if sizes.pipeline == 1 and size(args, PIPELINE) == 1:
        for name in STAGE_FLAGS:
            if args.pop(name, None) is not None:
                notes.append(f"{name} needs pipeline stages")
    if "--hierarchical-context-parallel-sizes" in args:
        args["--hierarchical-context-parallel-sizes"] = ["2", str(sizes.context // 2)]
    if INSTANCES in args:
        args[INSTANCES] = min(size(args, INSTANCES), sizes.data)


def _set_batches(args: dict[str, Value], large: Mapping[str, Value], sizes: ParallelSizes) -> None:
    """A few micro-batches a step: as many as there are stages, twice that for virtual ones."""
    micro = size(args, "--micro-batch-size")
    step = micro * sizes.data
    micro_batches = max(2, sizes.pipeline)
    if GROUP in args:
        args[GROUP] = sizes.pipeline + 1
        micro_batches = 2 * (sizes.pipeline + 1)
    batch = step * micro_batches
    samples = STEPS * batch
    if "--global-batch-size" in args:
        args["--global-batch-size"] = batch
    if "--eval-global-batch-size" in args:
        args["--eval-global-batch-size"] = batch
    if "--rampup-batch-size" in args:
        args["--rampup-batch-size"] = [str(step), str(step), str(step)]
        args["--global-batch-size"] = 2 * step
        samples = 5 * step
    if "--step-batch-size-schedule" in args:
        # 2, 3, 4 ... steps' worth, each for one step; thresholds are in tokens.
        count = len(str(large["--step-batch-size-schedule"]).split())
        sizes_of_steps = [batch * (index + 1) for index in range(count)]
        starts = [ROW * sum(sizes_of_steps[:index]) for index in range(count)]
        args["--step-batch-size-schedule"] = " ".join(
            f"{start}:{samples_of_step}"
            for start, samples_of_step in zip(starts, sizes_of_steps, strict=True)
        )
        samples = sum(sizes_of_steps[:STEPS]) + max(0, STEPS - count) * sizes_of_steps[-1]
    if "--train-samples" in args:
        args["--train-samples"] = samples
    else:
        args["--train-iters"] = STEPS
    if "--exit-interval" in args:
        args["--exit-interval"] = STEPS
    for name in ("--lr-decay-samples", "--lr-wsd-decay-samples"):
        if name in args:
            args[name] = _SCHEDULE_LENGTH * batch


def _set_schedule(args: dict[str, Value]) -> None:
    """A learning rate that shows within three steps, and others in proportion."""
    ratio = LEARNING_RATE / float(str(args["--lr"]))
    args["--lr"] = LEARNING_RATE
    for name in _RATES:
        if name in args:
            args[name] = float(f"{float(str(args[name])) * ratio:.3g}")
    for name in _NO_WARMUP:
        if name in args:
            args[name] = 0
    if "--lr-decay-iters" in args:
        args["--lr-decay-iters"] = _SCHEDULE_LENGTH
    if "--lr-wsd-decay-iters" in args:
        args["--lr-wsd-decay-iters"] = STEPS
    if "--fp16" in args and "--loss-scale" not in args:
        # From 2**32 down, upstream's start skips more steps than there are.
        args["--initial-loss-scale"] = 4096


def _changes_of_schedule(large: Mapping[str, Value], small: Mapping[str, Value]) -> list[str]:
    """A note on what learns at another rate or scale, and when; none if nothing does."""
    changes = [
        f"{name} {large.get(name, 'unset')} -> {small[name]}"
        for name in SCHEDULE
        if name in small and not _same(large.get(name), small[name])
    ]
    return [", ".join(changes)] if changes else []


def _same(before: Value | None, after: Value) -> bool:
    return before is not None and float(str(before)) == float(str(after))


def _describe_layers(args: dict[str, Value], large: Mapping[str, Value]) -> None:
    """Layers that differ, as many as there are now; what can't be read, the run itself reports."""
    if DESCRIPTION_TEXT in args:
        with contextlib.suppress(ConfigurationError):
            args[DESCRIPTION_TEXT] = shrink_description(
                str(args[DESCRIPTION_TEXT]), size(args, "--num-layers"), widths(large), widths(args)
            )
