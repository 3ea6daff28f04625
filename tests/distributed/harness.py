"""Runs of the real training program in pool workers, brought back whole for comparison.

    one = run(worker_pool, 1, FLAGS)
    two = run(worker_pool, 2, FLAGS + " --tensor-model-parallel-size 2")
    assert two.losses == pytest.approx(one.losses, rel=2e-6)
    assert relative_l2(two.gradient, one.gradient) < 1e-5

A run goes through the same calls as pretrain_gpt.py. Every rank answers with its shards of the
first step's gradient and of the weights; `run` joins them into the parameters of the whole model,
by global name, and checks on the way that all copies of a parameter agree bit for bit.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from tests.distributed.pool import DEFAULT_TIMEOUT, WorkerPools

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Shard:
    """One rank's part of a parameter (or of its gradient).

    Attributes:
        values: the part.
        dim: dimension along which tensor-parallel ranks split it; None for a full copy.
        gated: rows are this rank's gates, then this rank's up projections.
        tp_rank: rank among those that split it.
    """

    values: torch.Tensor
    dim: int | None
    gated: bool
    tp_rank: int


@dataclass
class RankResult:
    """What one rank saw. Losses are global already, so they agree on all ranks.

    Attributes:
        losses: mean loss of each iteration.
        loss_counts: supervised tokens of each iteration.
        reports: (sum, count) of whatever else each iteration reports, by name.
        grad_norms: before clipping; None where the update was skipped.
        updated: whether each iteration moved the weights.
        learning_rates: as logged for each iteration.
        validations: (loss, tokens) of every evaluation.
        gradient: of the first iteration, final (reduced and scaled), before clipping.
        initial_weights: before the first iteration.
        final_weights: after the last one.
        statistics: counts over all iterations and ranks.
        log: what this rank printed.
        extra: what the `inspect` hook returned.
    """

    losses: list[float] = field(default_factory=list)
    loss_counts: list[float] = field(default_factory=list)
    reports: list[dict[str, tuple[float, float]]] = field(default_factory=list)
    grad_norms: list[float | None] = field(default_factory=list)
    updated: list[bool] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    validations: list[tuple[float, int]] = field(default_factory=list)
    gradient: dict[str, Any] = field(default_factory=dict)
    initial_weights: dict[str, Any] = field(default_factory=dict)
    final_weights: dict[str, Any] = field(default_factory=dict)
    statistics: Any = None
    log: str = ""
    extra: Any = None


def run(
    pools: WorkerPools,
    world_size: int,
    flags: str,
    *,
    rows: Sequence[dict[str, Any]] | None = None,
    valid_rows: Sequence[dict[str, Any]] | None = None,
    prepare: Callable[[Any], None] | None = None,
    inspect: Callable[[Any], Any] | None = None,
    replace: Mapping[str, Callable[..., Any]] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    train_function: Callable[..., RankResult] | None = None,
) -> RankResult:
    """Train in `world_size` processes and join what the ranks bring back.

    Args:
        pools: the `worker_pool` fixture.
        world_size: processes.
        flags: the command line.
        rows: training samples in place of a corpus, see `sample`.
        valid_rows: validation samples in place of a corpus.
        prepare: module-level function, called with the Trainer before it trains.
        inspect: module-level function, called with the Trainer after it has trained.
        replace: module-level functions that stand in for those of these dotted names.
        timeout: seconds until the run counts as hanging.
        train_function: module-level function to run in place of `train`.

    Returns:
        Rank 0's result with whole parameters, and a list over ranks as `extra`.
    """
    results = pools(world_size).run(
        train_function or train,
        flags,
        timeout=timeout,
        rows=rows,
        valid_rows=valid_rows,
        prepare=prepare,
        inspect=inspect,
        replace=replace,
    )
    first = results[0]
    for other in results[1:]:
        for name in ("losses", "loss_counts", "reports", "grad_norms", "updated", "validations"):
            ours, theirs = repr(getattr(first, name)), repr(getattr(other, name))
            assert ours == theirs, f"ranks disagree on {name}: {ours} and {theirs}"
    for name in ("gradient", "initial_weights", "final_weights"):
        setattr(first, name, _join([getattr(result, name) for result in results]))
    first.extra = [result.extra for result in results]
    return first


def sample(ids: Sequence[int], seq_length: int, length: int | None = None) -> dict[str, Any]:
    """A dataset sample from raw ids.

    Args:
        ids: real ids, at most S + 1; the rest is tail padding of ids that no model has.
        seq_length: S.
        length: real ids, if not all of `ids`.
    """
    text = np.full(seq_length + 1, -7, dtype=np.int64)
    text[: len(ids)] = ids
    return {"text": text, "length": len(ids) if length is None else length}


def relative_l2(values: Weights, reference: Weights) -> float:
    """Norm of the difference over the norm of the reference, over all parameters together."""
    assert values.keys() == reference.keys()
    difference = reference_norm = 0.0
    for name, expected in reference.items():
        one, other = _without_vocabulary_padding(values[name], expected)
        difference += float((one.double() - other.double()).square().sum())
        reference_norm += float(other.double().square().sum())
    assert reference_norm > 0
    return math.sqrt(difference / reference_norm)


def assert_bitwise_equal(values: Weights, reference: Weights) -> None:
    """Equal in every bit, but for rows that only pad the vocabulary."""
    assert values.keys() == reference.keys()
    for name, expected in reference.items():
        one, other = _without_vocabulary_padding(values[name], expected)
        assert torch.equal(one, other), f"{name} differs"


def _without_vocabulary_padding(
    one: torch.Tensor, other: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Vocabularies are padded to different sizes by different layouts; compare what is common."""
    rows = min(one.shape[0], other.shape[0])
    return one[:rows], other[:rows]


# --- in the ranks ---------------------------------------------------------------------------------


def train(
    flags: str,
    *,
    rows: Sequence[dict[str, Any]] | None = None,
    valid_rows: Sequence[dict[str, Any]] | None = None,
    prepare: Callable[[Any], None] | None = None,
    inspect: Callable[[Any], Any] | None = None,
    replace: Mapping[str, Callable[..., Any]] | None = None,
) -> RankResult:
    """Run the program on this rank; arguments as for `run`."""
    from megatron.packed.arguments import config_from_flags
    from megatron.packed.data.builders import Datasets
    from megatron.packed.training import environment, setup

    result = RankResult()
    log = io.StringIO()
    config = config_from_flags(flags, os.environ)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(log))
        # The peak only scales the MFU of the log, and takes half a second.
        stack.enter_context(mock.patch.object(setup, "measure_gemm_peak", lambda *a, **k: 1e9))
        for name, function in (replace or {}).items():
            stack.enter_context(mock.patch(name, function))
        if rows is not None:
            datasets = Datasets(train=rows, valid=valid_rows, test=None)  # type: ignore[arg-type]
            replaced = "megatron.packed.training.data.build_datasets"
            stack.enter_context(mock.patch(replaced, lambda *a, **k: datasets))
        this_process = environment.start(config)
        trainer = setup.build_trainer(config, this_process)
        if prepare is not None:
            prepare(trainer)
        result.initial_weights = parameter_shards(trainer.step.model, _copy)
        _record(trainer, result)
        trainer.train()
        trainer.evaluate_final()
        result.final_weights = parameter_shards(trainer.step.model, _copy)
        if inspect is not None:
            result.extra = inspect(trainer)
    result.log = log.getvalue()
    return result


def _record(trainer: Any, result: RankResult) -> None:
    """Listen to the reporter and to the moment when gradients are final."""
    reporter, config = trainer.reporter, trainer.step.transformer_config
    record, report = reporter.record, reporter.report
    report_evaluation = reporter.report_evaluation
    finalize = config.finalize_model_grads_func

    def on_record(step: Any, iteration: int, samples: int, learning_rate: float) -> None:
        result.losses.append(step.loss)
        result.loss_counts.append(step.loss_count)
        result.reports.append(step.reports)
        result.grad_norms.append(step.grad_norm)
        result.updated.append(step.updated)
        result.learning_rates.append(learning_rate)
        record(step, iteration, samples, learning_rate)

    def on_report(iteration: int, samples: int, rate: float, counts: Any, norm: Any) -> None:
        if result.statistics is None:
            result.statistics = type(counts)()
        result.statistics.add(counts)
        report(iteration, samples, rate, counts, norm)

    def on_evaluation(evaluation: Any, *args: Any) -> None:
        result.validations.append((evaluation.loss, evaluation.tokens))
        report_evaluation(evaluation, *args)

    def on_final_gradients(model: Any, *args: Any, **kwargs: Any) -> None:
        finalize(model, *args, **kwargs)
        if not result.gradient:
            result.gradient = _gradient_shards(model)

    reporter.record, reporter.report = on_record, on_report
    reporter.report_evaluation = on_evaluation
    config.finalize_model_grads_func = on_final_gradients


def _copy(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().clone()


def _gradient_shards(model: list[Any]) -> dict[str, Shard]:
    """Gradients; those that the distributed optimizer spreads over replicas are put together."""
    saved = []
    for chunk in model:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            saved.append((buffer.grad_data, buffer.grad_data.clone()))
            if not buffer.ddp_config.use_distributed_optimizer:
                continue
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                shards = list(bucket.grad_data.chunk(group.size()))
                mine = shards[group.rank()].clone()
                dist.all_gather(shards, mine, group=group)
    shards = parameter_shards(model, lambda parameter: parameter.main_grad.clone())
    for grad_data, values in saved:
        grad_data.copy_(values)  # the optimizer goes on from what it had
    return shards


def parameter_shards(
    model: list[Any], read: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Shard]:
    """This rank's shards by global parameter name.

    Args:
        model: wrapped chunks.
        read: what to take of a parameter.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
    from megatron.core.utils import unwrap_model

    shards = {}
    for chunk in unwrap_model(model):
        offset = get_transformer_layer_offset(chunk.config, chunk.vp_stage)
        for name, parameter in chunk.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(int(parts[2]) + offset)
            rank = parallel_state.get_tensor_model_parallel_rank()
            if "local_experts" in parts:
                rank = parallel_state.get_expert_tensor_parallel_rank()
                experts = chunk.config.num_moe_experts // chunk.config.expert_model_parallel_size
                number = parts.index("local_experts") + 1
                first = parallel_state.get_expert_model_parallel_rank() * experts
                parts[number] = str(int(parts[number]) + first)
            is_tied_copy = name == "output_layer.weight" and getattr(parameter, "shared", False)
            split = getattr(parameter, "tensor_model_parallel", False)
            shards["tied copy" if is_tied_copy else ".".join(parts)] = Shard(
                values=read(parameter),
                dim=parameter.partition_dim if split else None,
                gated=chunk.config.gated_linear_unit and "linear_fc1" in name,
                tp_rank=rank,
            )
    return shards


# --- putting shards together ----------------------------------------------------------------------


def _join(ranks: list[dict[str, Shard]]) -> Weights:
    """Whole parameters from the shards of all ranks; copies must agree bit for bit."""
    by_name: dict[str, dict[int, Shard]] = {}
    for shards in ranks:
        for name, shard in shards.items():
            known = by_name.setdefault(name, {})
            place = 0 if shard.dim is None else shard.tp_rank
            if place in known:
                same = _same_bits(known[place].values, shard.values)
                assert same, f"copies of {name} differ between ranks"
            known[place] = shard
    joined = {name: _join_one(shards) for name, shards in by_name.items()}
    copy = joined.pop("tied copy", None)
    if copy is not None:
        same = _same_bits(copy, joined["embedding.word_embeddings.weight"])
        assert same, "the last stage's copy of the tied embedding differs from the first stage's"
    return joined


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.nan_to_num(nan=1e30), other.nan_to_num(nan=1e30))


def _join_one(shards: dict[int, Shard]) -> torch.Tensor:
    parts = [shards[rank] for rank in sorted(shards)]
    dim, values = parts[0].dim, [part.values for part in parts]
    if dim is None:
        return values[0]
    if not parts[0].gated or dim != 0:
        return torch.cat(values, dim=dim)
    gates, ups = zip(*(part.chunk(2) for part in values), strict=True)
    return torch.cat((*gates, *ups))
