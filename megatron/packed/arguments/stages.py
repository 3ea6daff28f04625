"""Which layers every pipeline stage holds, from the flags alone: no torch, no process group.

A stage of a process is a chunk of the model. With interleaving a process holds several, and
stages go around the processes: chunk v of process p is stage v * pipeline size + p.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.packed.arguments.config import Config

EMBEDDING, LAYER, PREDICTION, LOSS = "E", "t", "m", "L"
_REPEATED_GROUP = re.compile(r"\(([^)]+)\)\*(\d+)")
_REPEATED_LETTER = re.compile(r"(.)\*(\d+)")


class LayoutError(ValueError):
    """Flags that lay no model out; the message says which and why."""


@dataclass(frozen=True)
class Stages:
    """The chunks of a model.

    Attributes:
        processes: pipeline processes.
        virtual: chunks of each process.
        layers: decoder layers of each stage, in the order that tokens pass them.
        predictions: multi-token-prediction layers of each stage, in the same order.
    """

    processes: int
    virtual: int
    layers: tuple[int, ...]
    predictions: tuple[int, ...]

    def stage(self, process: int, chunk: int) -> int:
        """The place of a chunk in the order that tokens pass."""
        return chunk * self.processes + process

    @property
    def first_prediction(self) -> int | None:
        """The stage that predicts further tokens, where that isn't left to the last one."""
        holders = [stage for stage, count in enumerate(self.predictions) if count]
        return holders[0] if holders and holders[0] < len(self.layers) - 1 else None


def parse_layout(text: str) -> list[str]:
    """The letters of every stage, in the order that tokens pass them.

    Args:
        text: `--pipeline-model-parallel-layout`; commas only separate for the eye.

    Raises:
        LayoutError: another letter than E, t, m, L.

    Source: megatron.core.transformer.pipeline_parallel_layer_layout, whose syntax it is.
    """
    unrolled = text.replace(",", "")
    for pattern in (_REPEATED_GROUP, _REPEATED_LETTER):
        unrolled = pattern.sub(lambda match: match[1] * int(match[2]), unrolled)
    if unknown := set(unrolled) - set(EMBEDDING + LAYER + PREDICTION + LOSS + "|"):
        raise LayoutError(
            f"holds {''.join(sorted(unknown))!r}; stages are made of E, t, m and L, with | "
            "between them and x*n or (x)*n for n times x"
        )
    return unrolled.split("|")


def stages_of(config: Config) -> Stages:
    """Lay the model out.

    Args:
        config: flags as asked for.

    Raises:
        LayoutError: they contradict each other or don't add up.
    """
    _refuse_contradictions(config)
    if config.pipeline.pipeline_model_parallel_layout is not None:
        return _explicit(config)
    return _even(config)


def virtual_size(config: Config) -> int | None:
    """Chunks of each process, or None without interleaving, as megatron-core wants it."""
    count = stages_of(config).virtual
    return count if count > 1 else None


def known_stages(config: Config) -> Stages | None:
    """The layout, or None where a rule of its own says why there is none.

    Args:
        config: flags as asked for.
    """
    try:
        return stages_of(config)
    except LayoutError:
        return None


def micro_batch_problems(config: Config, stages: Stages, count: int, flag: str) -> Iterator[str]:
    """What is wrong with a number of micro-batches a step, if anything.

    Args:
        config: flags as asked for.
        stages: the layout.
        count: micro-batches of a replica in one step.
        flag: the flag that it comes from.
    """
    if stages.virtual == 1:
        return
    size = stages.processes
    group = config.pipeline.microbatch_group_size_per_vp_stage or size
    rest = count % group
    if not size <= group <= count:
        yield (
            f"{flag}: gives {count} micro-batches a step, and virtual stages take {group} in a "
            f"row (--microbatch-group-size-per-virtual-pipeline-stage): that must be at least "
            f"--pipeline-model-parallel-size {size} and at most the micro-batches of a step"
        )
    elif 0 < rest < size:
        yield (
            f"{flag}: gives {count} micro-batches a step, of which virtual stages take {group} in "
            f"a row (--microbatch-group-size-per-virtual-pipeline-stage): the last {rest} must "
            f"be at least --pipeline-model-parallel-size {size}; {count - rest} or "
            f"{count - rest + group} micro-batches would do"
        )


def _refuse_contradictions(config: Config) -> None:
    pipeline = config.pipeline
    per_stage = pipeline.num_layers_per_virtual_pipeline_stage
    per_rank = pipeline.num_virtual_stages_per_pipeline_rank
    layout = pipeline.pipeline_model_parallel_layout
    given = {
        "--num-layers-per-virtual-pipeline-stage": per_stage is not None,
        "--num-virtual-stages-per-pipeline-rank": per_rank is not None,
        **_shares(config),
    }
    others = [name for name, is_given in given.items() if is_given]
    if layout is not None and others:
        raise LayoutError(
            f"--pipeline-model-parallel-layout {layout}: says all there is to say about stages; "
            f"leave {', '.join(others)} out"
        )
    if per_stage is not None and per_rank is not None:
        raise LayoutError(
            f"--num-layers-per-virtual-pipeline-stage {per_stage} and "
            f"--num-virtual-stages-per-pipeline-rank {per_rank}: exclude each other; keep one"
        )
    uneven = [name for name in _UNEVEN if given[name]]
    counted = [name for name in _COUNTED if given[name]]
    if uneven and counted:
        raise LayoutError(
            f"{uneven[0]} and {counted[0]}: exclude each other; both change the share of the "
            "first or last process"
        )
    if uneven and per_stage is not None:
        raise LayoutError(
            f"{uneven[0]}: with interleaving, give --num-virtual-stages-per-pipeline-rank instead "
            "of --num-layers-per-virtual-pipeline-stage, since virtual stages differ in size"
        )


_UNEVEN = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
_COUNTED = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")


def _shares(config: Config) -> dict[str, bool]:
    pipeline = config.pipeline
    return {
        _UNEVEN[0]: pipeline.decoder_first_pipeline_num_layers is not None,
        _UNEVEN[1]: pipeline.decoder_last_pipeline_num_layers is not None,
        _COUNTED[0]: pipeline.account_for_embedding_in_pipeline_split,
        _COUNTED[1]: pipeline.account_for_loss_in_pipeline_split,
    }


def _explicit(config: Config) -> Stages:
    text = config.pipeline.pipeline_model_parallel_layout
    assert text is not None
    processes = config.parallel.pipeline_model_parallel_size
    name = f"--pipeline-model-parallel-layout {text}"
    try:
        stages = parse_layout(text)
    except LayoutError as error:
        raise LayoutError(f"{name}: {error}") from None
    if len(stages) % processes:
        raise LayoutError(
            f"{name}: has {len(stages)} stages, which must be a multiple of "
            f"--pipeline-model-parallel-size {processes}"
        )
    flat = "".join(stages)
    if not stages[0].startswith(EMBEDDING) or flat.count(EMBEDDING) != 1:
        raise LayoutError(f"{name}: must start with its only E, the embedding")
    if not stages[-1].endswith(LOSS) or flat.count(LOSS) != 1:
        raise LayoutError(f"{name}: must end with its only L, the loss")
    layers = tuple(stage.count(LAYER) for stage in stages)
    if sum(layers) != config.model.num_layers:
        raise LayoutError(
            f"{name}: places {sum(layers)} layers (t), and --num-layers is "
            f"{config.model.num_layers}; make them equal"
        )
    predictions = tuple(stage.count(PREDICTION) for stage in stages)
    holders = sum(count > 0 for count in predictions)
    if holders > 1 or (holders and LAYER in flat[flat.index(PREDICTION) :]):
        raise LayoutError(f"{name}: must hold every m in one stage, after the last t")
    place = next((stage for stage, count in enumerate(predictions) if count), 0)
    if place and place % processes == 0:
        raise LayoutError(
            f"{name}: must not hold m on the first process, where its copy of the embedding would "
            "drift apart from the embedding itself; move it to a neighbouring stage"
        )
    return Stages(processes, len(stages) // processes, layers, predictions)


def _even(config: Config) -> Stages:
    """Equal shares, but for what the flags count in or say of the first and last process."""
    pipeline, layers = config.pipeline, config.model.num_layers
    processes = config.parallel.pipeline_model_parallel_size
    shares = _process_shares(config)
    virtual = pipeline.num_virtual_stages_per_pipeline_rank or 1
    per_stage = pipeline.num_layers_per_virtual_pipeline_stage
    if per_stage is not None:
        if shares[0] % per_stage:
            raise LayoutError(
                f"--num-layers-per-virtual-pipeline-stage {per_stage}: must divide the "
                f"{shares[0]} layers of a process ({_described(config)})"
            )
        virtual = shares[0] // per_stage
    for share in shares:
        if share % virtual:
            raise LayoutError(
                f"--num-virtual-stages-per-pipeline-rank {virtual}: must divide the {share} "
                f"layers of every process ({_described(config)})"
            )
    counts = [share // virtual for share in shares] * virtual
    counts[0] -= pipeline.account_for_embedding_in_pipeline_split
    counts[-1] -= pipeline.account_for_loss_in_pipeline_split
    assert sum(counts) == layers
    if min(counts) < 0:
        raise LayoutError(
            f"{' and '.join(_COUNTED)}: leave a stage less than no layer; use fewer stages"
        )
    return Stages(processes, virtual, tuple(counts), (0,) * len(counts))


def _process_shares(config: Config) -> list[int]:
    """Layers of every process, the counted embedding and loss included."""
    pipeline, layers = config.pipeline, config.model.num_layers
    processes = config.parallel.pipeline_model_parallel_size
    first, last = (
        pipeline.decoder_first_pipeline_num_layers,
        pipeline.decoder_last_pipeline_num_layers,
    )
    counted = (
        layers
        + pipeline.account_for_embedding_in_pipeline_split
        + pipeline.account_for_loss_in_pipeline_split
    )
    given = [count for count in (first, last) if count is not None]
    left, others = counted - sum(given), processes - len(given)
    if given and processes < 2:
        raise LayoutError(
            f"{' and '.join(_UNEVEN)}: need --pipeline-model-parallel-size of 2 or more"
        )
    if left < 0 or (left % others if others else left):
        rule = f"must be a multiple of --pipeline-model-parallel-size {processes}"
        if given:
            rule = f"leaves {left}, which {others} other processes can't share equally"
        raise LayoutError(f"--num-layers {layers}: {_described(config)} {rule}; change one of them")
    shares = [left // others] * others if others else []
    return ([first] if first is not None else []) + shares + ([last] if last is not None else [])


def _described(config: Config) -> str:
    pipeline = config.pipeline
    parts = [f"{config.model.num_layers} layers"]
    if pipeline.account_for_embedding_in_pipeline_split:
        parts.append("the embedding")
    if pipeline.account_for_loss_in_pipeline_split:
        parts.append("the loss")
    text = " and ".join(parts)
    for name, count in (
        (_UNEVEN[0], pipeline.decoder_first_pipeline_num_layers),
        (_UNEVEN[1], pipeline.decoder_last_pipeline_num_layers),
    ):
        if count is not None:
            text += f" less {count} ({name})"
    return text
