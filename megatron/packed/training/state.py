"""A run's whole state: taken for a checkpoint, and put back under any layout."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model

from megatron.packed.arguments import Config
from megatron.packed.arguments.config import all_specs
from megatron.packed.checkpoint.manifest import FORMAT_VERSION
from megatron.packed.checkpoint.reading import PRODUCER, load_sharded
from megatron.packed.checkpoint.snapshot import storage_of
from megatron.packed.errors import ConfigurationError, DataError
from megatron.packed.training.optimizer_shards import sharded_optimizer_state
from megatron.packed.training.reruns import Reruns
from megatron.packed.training.step import TrainStep

_GENERATORS = "rng_state"
_RERUNS = "rerun_state"


def _metadata() -> dict[str, Any]:
    """Whole parameters, named alike by every optimizer class, so that any layout can load them.

    A new one each time: megatron-core writes this moment's process groups into it.
    """
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
    }


def flat_arguments(config: Config) -> dict[str, Any]:
    """Every field of a config by name, as plain values."""
    values = {}
    for dest in all_specs():
        value = config.get(dest)
        values[dest] = list(value) if isinstance(value, tuple) else value
    return values


def layout_of(config: Config) -> dict[str, int]:
    """What decides which rank holds what: generators can only be restored under the same."""
    parallel = config.parallel
    return {
        "world_size": parallel.world_size,
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "context_parallel_size": parallel.context_parallel_size,
    }


def sharded_state(config: Config, step: TrainStep) -> ShardedStateDict:
    """What ranks hold different parts of: weights, optimizer, generators; a collective call.

    Args:
        config: the run's configuration.
        step: model and optimizer.
    """
    model = model_state(step)
    state: ShardedStateDict = dict(model)
    if not config.checkpoint.no_save_optim:
        initialize_optimizer(step.optimizer)
        state["optimizer"] = sharded_optimizer_state(
            members(step.optimizer), step.optimizer, model, _metadata()
        )
    if not config.checkpoint.no_save_rng:
        state[_GENERATORS] = _of_this_rank(_GENERATORS, _generators())
    if step.reruns is not None:
        state[_RERUNS] = _of_this_rank(_RERUNS, step.reruns.state_dict())
    return state


def changed_by_updates_alone(step: TrainStep) -> frozenset[int]:
    """Storages of weights and optimizer states, which nothing but an update changes.

    None with `--overlap-param-gather`: there the next forward pass writes weights, too.
    """
    if any(chunk.ddp_config.overlap_param_gather for chunk in step.model):
        return frozenset()
    tensors = [parameter for chunk in step.model for parameter in chunk.parameters()]
    for member in members(step.optimizer):
        inner = getattr(member, "optimizer", None)
        for group in inner.param_groups if inner is not None else ():
            tensors.extend(group["params"])
        for each in inner.state.values() if inner is not None else ():
            tensors.extend(value for value in each.values() if isinstance(value, torch.Tensor))
    return frozenset(storage_of(tensor) for tensor in tensors) - {0}


def _of_this_rank(name: str, value: Any) -> ShardedObject:
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    return ShardedObject(name, value, (size,), (rank,))


def common_state(
    config: Config,
    arguments: dict[str, Any],
    step: TrainStep,
    iteration: int,
    consumed_samples: int,
    data: dict[str, Any],
) -> dict[str, Any]:
    """What every rank has alike, under upstream's names where it has one.

    Args:
        config: the run's configuration.
        arguments: the same as plain values.
        step: its schedules are saved.
        iteration: finished iterations.
        consumed_samples: samples trained on.
        data: `Splits.state_dict()`.
    """
    progress = {"iteration": iteration, "consumed_train_samples": consumed_samples}
    return {
        "producer": PRODUCER,
        "format_version": FORMAT_VERSION,
        "args": argparse.Namespace(**arguments | progress),
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "consumed_samples": consumed_samples,
        "opt_param_scheduler": step.scheduler.state_dict(),
        "optimizer_step": optimizer_step(step.optimizer),
        "grad_scaler": grad_scaler_state(step.optimizer),
        "layout": layout_of(config),
        "has_optimizer": not config.checkpoint.no_save_optim,
        "has_rng": not config.checkpoint.no_save_rng,
        "has_reruns": step.reruns is not None,
        "data": data,
    }


def model_state(step: TrainStep) -> ShardedStateDict:
    """Sharded weights of this rank's chunks: `model`, or `model0`, `model1`, ..."""
    chunks = unwrap_model(step.model)
    if len(chunks) == 1:
        return {"model": chunks[0].sharded_state_dict(metadata=_metadata())}
    return {f"model{i}": c.sharded_state_dict(metadata=_metadata()) for i, c in enumerate(chunks)}


# --- putting it back ------------------------------------------------------------------------------


def restore_weights(
    step: TrainStep, path: Path, strictness: str, report: Callable[[str], None]
) -> None:
    """Load the weights alone; the optimizer's master copies follow them; a collective call.

    Raises:
        DataError: the checkpoint is of another model.
    """
    loaded = load_sharded(model_state(step), path, strictness=strictness, report=report)
    _load_model(step, loaded.state)
    step.optimizer.reload_model_params()


def restore_training(
    step: TrainStep,
    path: Path,
    common: dict[str, Any],
    strictness: str,
    report: Callable[[str], None],
) -> None:
    """Load weights and optimizer, saved under any layout; a collective call.

    Raises:
        DataError: the checkpoint is of another model or optimizer.
    """
    initialize_optimizer(step.optimizer)
    model = model_state(step)
    template: ShardedStateDict = dict(model)
    template["optimizer"] = step.optimizer.sharded_state_dict(
        model, is_loading=True, metadata=_metadata()
    )
    loaded = load_sharded(template, path, strictness=strictness, report=report)
    _load_model(step, loaded.state)
    optimizer_state = loaded.state["optimizer"]
    _set_step(optimizer_state, _stored_step(common))
    _set_grad_scaler(optimizer_state, common)
    if not loaded.weights_stand_in:
        _load_optimizer(step.optimizer, optimizer_state)
        return
    # In fp32 the distributed optimizer's master weights are views of the weights themselves.
    parameters = [p for chunk in step.model for p in chunk.parameters()]
    weights = [parameter.detach().clone() for parameter in parameters]
    _load_optimizer(step.optimizer, optimizer_state)
    with torch.no_grad():
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.copy_(weight)
    step.optimizer.reload_model_params()


def restore_schedules(step: TrainStep, common: dict[str, Any]) -> None:
    """Load learning-rate and weight-decay schedules.

    Raises:
        ConfigurationError: the command line asks for another schedule than the checkpoint's.
        DataError: the checkpoint's is none.
    """
    try:
        step.scheduler.load_state_dict(dict(common["opt_param_scheduler"]))
    except AssertionError as error:
        raise ConfigurationError(
            f"schedules of the command line and the checkpoint differ ({error}); pass "
            "--override-opt_param-scheduler to follow the command line, or "
            "--use-checkpoint-opt_param-scheduler to follow the checkpoint"
        ) from error
    except (KeyError, TypeError) as error:
        raise DataError(
            f"the checkpoint's opt_param_scheduler can't be read ({type(error).__name__}: "
            f"{error}); --finetune takes its weights alone"
        ) from error


def restore_generators(path: Path) -> None:
    """Load this rank's random generators, saved under the same layout; a collective call."""
    state = _load_of_this_rank(_GENERATORS, path)
    if state is None:
        return
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def restore_reruns(reruns: Reruns, path: Path) -> None:
    """Load what was known about suspicious results, under the same layout; a collective call."""
    state = _load_of_this_rank(_RERUNS, path)
    if state is not None:
        reruns.load_state_dict(state)


def _load_of_this_rank(name: str, path: Path) -> Any:
    wanted = {name: _of_this_rank(name, None)}
    loaded = load_sharded(wanted, path, strictness="ignore_all", report=lambda _: None)
    return loaded.state[name]


def _generators() -> dict[str, Any]:
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert isinstance(keys, np.ndarray)
    state = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "tracker": dict(tensor_parallel.get_cuda_rng_tracker().get_states()),
    }
    if torch.cuda.is_available():
        state["device"] = torch.cuda.get_rng_state()
    return state


def _load_model(step: TrainStep, loaded: dict[str, Any]) -> None:
    chunks = unwrap_model(step.model)
    names = ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]
    for name, chunk in zip(names, chunks, strict=True):
        chunk.load_state_dict(loaded[name], strict=False)


# --- the parts of an optimizer that megatron-core keeps in different places ----------------------


def members(optimizer: MegatronOptimizer) -> list[Any]:
    """The optimizers that a chained one consists of, or the optimizer itself."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def initialize_optimizer(optimizer: MegatronOptimizer) -> None:
    """Give an optimizer that hasn't stepped the state it would start from."""
    step = optimizer_step(optimizer)
    for member in members(optimizer):
        inner = getattr(member, "optimizer", None)
        if inner is not None and not any(group["params"] for group in inner.param_groups):
            # A stage without experts has nothing for their optimizer to update, and megatron-core
            # asks each of its optimizers how many updates it has made.
            inner.state["no parameters"] = {"step": torch.tensor(float(step))}
            continue
        if inner is None or inner.state or member.init_state_fn is None:
            continue
        member.init_state_fn(inner, member.config)
        if isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)):
            for parameter, state in inner.state.items():  # core leaves the step to the first one
                state["step"] = torch.zeros((), device=parameter.device)


def optimizer_step(optimizer: MegatronOptimizer) -> int:
    """Updates so far, by which Adam corrects its moments."""
    for member in members(optimizer):
        inner = getattr(member, "optimizer", None)
        for state in inner.state.values() if inner is not None else ():
            if "step" in state:
                return int(state["step"])
        for group in inner.param_groups if inner is not None else ():
            if "step" in group:
                return int(group["step"])
    return 0


def grad_scaler_state(optimizer: MegatronOptimizer) -> dict[str, Any] | None:
    """State of the dynamic loss scale; None without one."""
    for member in members(optimizer):
        scaler = getattr(member, "grad_scaler", None)
        if scaler is not None:
            return scaler.state_dict()
    return None


def _parts(state: Any) -> Iterator[dict[str, Any]]:
    """Each member's part of a chained optimizer's state."""
    if isinstance(state, dict) and state and all(isinstance(key, int) for key in state):
        yield from state.values()
    else:
        yield state


def _load_optimizer(optimizer: MegatronOptimizer, state: Any) -> None:
    """Load a whole optimizer state.

    Without TransformerEngine and apex, megatron-core expects the step of torch's Adam among the
    sharded tensors, where its own saving never puts it; so the step stands aside meanwhile.
    """
    parts = list(_parts(state))
    sharded = [part.pop("param_state", None) for part in parts]
    whole = parts[0] if len(parts) == 1 else dict(enumerate(parts))
    optimizer.load_state_dict(whole)
    for member, param_state in zip(members(optimizer), sharded, strict=True):
        if param_state is None:
            continue
        steps = [(each, each.pop("step", None)) for each in member.optimizer.state.values()]
        member.load_parameter_state_from_fully_reshardable(param_state)
        for each, value in steps:
            if value is not None:
                each["step"] = value.clone()  # core hands the same tensor to all parameters


def _set_step(state: Any, step: int) -> None:
    for part in _parts(state):
        inner = part.get("optimizer", part)
        for group in inner.get("param_groups", ()):
            if "step" in group:
                group["step"] = step
        if inner.get("state"):
            inner["state"]["common_step"] = torch.tensor(float(step))


def _set_grad_scaler(state: Any, common: dict[str, Any]) -> None:
    stored = common.get("grad_scaler")
    for part in _parts(state):
        if "grad_scaler" in part and stored:
            part["grad_scaler"] = stored


def _stored_step(common: dict[str, Any]) -> int:
    """The number of updates, also where upstream's own checkpoints keep it."""
    if "optimizer_step" in common:
        return int(common["optimizer_step"])
    for part in _parts(common.get("optimizer", {})):
        inner = part.get("optimizer", part)
        if "common_step" in inner.get("state", {}):
            return int(inner["state"]["common_step"])
        for group in inner.get("param_groups", ()):
            if "step" in group:
                return int(group["step"])
    return int(common["iteration"])
