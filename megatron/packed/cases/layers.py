"""Fewer layers that are laid out over pipeline stages, and differ among each other, as before."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from megatron.packed.arguments.patterns import parse_pattern
from megatron.packed.cases.case import Value
from megatron.packed.cases.parallel import size

T = TypeVar("T")

LAYOUT = "--pipeline-model-parallel-layout"
LAYERS_PER_STAGE = "--num-layers-per-virtual-pipeline-stage"
STAGES_PER_RANK = "--num-virtual-stages-per-pipeline-rank"
FIRST = "--decoder-first-pipeline-num-layers"
LAST = "--decoder-last-pipeline-num-layers"
ACCOUNTED = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
STAGE_FLAGS = (LAYOUT, LAYERS_PER_STAGE, STAGES_PER_RANK, FIRST, LAST, *ACCOUNTED, GROUP)

# Which layers are of a kind: a whole number n (every n-th) or a list with one entry a layer.
PATTERNS = (
    "--moe-layer-freq",
    "--linear-attention-freq",
    "--window-attn-skip-freq",
    "--no-rope-freq",
)
PER_LAYER = "--cp-comm-type"
# Where every layer has its own description; four layers can be of four kinds.
DESCRIPTION_FILE = "--heterogeneous-layers-config-path"
DESCRIPTION_TEXT = "--heterogeneous-layers-config-encoded-json"


def shrink_layers(args: Mapping[str, Value], pipeline: int) -> dict[str, Value]:
    """Return new values of the flags that say how many layers there are and where.

    Args:
        args: The large run's flags.
        pipeline: Pipeline stages of the small run.
    """
    values: dict[str, Value] = {}
    stages_of_large_run = size(args, "--pipeline-model-parallel-size")
    described = DESCRIPTION_FILE in args or DESCRIPTION_TEXT in args
    if pipeline == 1:
        layers = min(4, size(args, "--num-layers", 4)) if described else 2
    elif LAYOUT in args:
        layout = shrink_layout(str(args[LAYOUT]), pipeline, stages_of_large_run)
        values[LAYOUT] = layout
        layers = layout.count("t")
    elif LAYERS_PER_STAGE in args:
        values[LAYERS_PER_STAGE] = 1
        rounds = size(args, "--num-layers") // stages_of_large_run // size(args, LAYERS_PER_STAGE)
        layers = pipeline * (2 if rounds > 1 else 1)
    elif STAGES_PER_RANK in args:
        rounds = min(2, size(args, STAGES_PER_RANK))
        values[STAGES_PER_RANK] = rounds
        layers = pipeline * rounds - sum(name in args for name in ACCOUNTED)
    elif FIRST in args or LAST in args:
        values |= {name: 1 for name in (FIRST, LAST) if name in args}
        layers = 3
        if FIRST in args and LAST in args:
            values[LAST] = layers - 1  # two stages, uneven
    else:
        layers = pipeline
        taken = sum(name in args for name in ACCOUNTED)
        layers = 2 * pipeline - taken if taken or described else layers
    if FIRST in args or LAST in args or pipeline > 1 or layers > 1:
        values["--num-layers"] = layers
    for name in PATTERNS:
        if name in args:
            values[name] = shrink_pattern(str(args[name]), layers)
    if isinstance(per_layer := args.get(PER_LAYER), list) and len(per_layer) > 1:
        values[PER_LAYER] = resample(per_layer, layers)
    return values


def shrink_layout(layout: str, pipeline: int, stages_of_large_run: int) -> str:
    """Return a layout of fewer stages whose first and last hold the same kinds of layers.

    Args:
        layout: Upstream's notation: E embedding, t layer, m prediction depth, L loss, | between
            stages, `(...)*n` and `x*n` repeated.
        pipeline: Pipeline stages of the small run.
        stages_of_large_run: Those of the large one.
    """
    stages = _expand(layout).split("|")
    rounds = 2 if len(stages) > stages_of_large_run else 1
    count = pipeline * rounds

    def one_of_each(stage: str) -> str:
        return "".join(kind for kind in "EtmL" if kind in stage)

    middle = [one_of_each(stage) for stage in stages[1:-1] if stage] or ["t"]
    kept = [one_of_each(stages[0]), *resample(middle, count - 2), one_of_each(stages[-1])]
    return "|".join(kept)


def _expand(layout: str) -> str:
    text = layout.replace(",", "").replace(" ", "")
    pattern = re.compile(r"(\([^()]*\)|[EtmL|])\*(\d+)")
    while match := pattern.search(text):
        repeated = match[1].strip("()") * int(match[2])
        text = text[: match.start()] + repeated + text[match.end() :]
    return text.replace("(", "").replace(")", "")


def shrink_pattern(text: str, layers: int) -> str:
    """Return a pattern over fewer layers in which every kind of layer is left.

    Args:
        text: Whole number or list expression.
        layers: Layers of the small run.
    """
    pattern = parse_pattern(text)
    if isinstance(pattern, int):
        return str(min(pattern, layers))
    kept = resample(pattern, layers)
    return "[" + ",".join(map(str, kept)) + "]"


def resample(items: Sequence[T], count: int) -> list[T]:
    """Return `count` items in order, from all over the list, every distinct one if they fit.

    Args:
        items: What to choose from; not empty.
        count: How many to return.
    """
    kept = [items[index * len(items) // count] for index in range(count)]
    missing = [item for item in dict.fromkeys(items) if item not in kept]
    for item in missing:
        repeated = [index for index, other in enumerate(kept) if kept.count(other) > 1]
        if not repeated:
            break
        # Put it on the side where the long list has it.
        late = list(items).index(item) >= len(items) / 2
        kept[repeated[-1] if late else repeated[0]] = item
    return kept
