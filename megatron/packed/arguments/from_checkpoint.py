"""`--use-checkpoint-args`: the model's flags as a checkpoint recorded them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.packed.arguments.config import Config, all_specs, build_config
from megatron.packed.checkpoint.folder import CheckpointFolder
from megatron.packed.errors import ConfigurationError, DataError

ARGUMENTS = "arguments.json"
CHECKPOINT = "checkpoint"
_GROUPS = ("model", "attention", "moe")
_TOKENIZER = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "vocab_size")
_OTHERS = ("seq_length", "mtp_num_layers", "make_vocab_size_divisible_by")
_PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size")


def with_checkpoint_arguments(config: Config) -> Config:
    """Take the model's shape and the tokenizer from the checkpoint in `--load`, as upstream does.

    Args:
        config: as parsed.

    Returns:
        A config of the same values but for those fields, to be validated; unchanged without
        `--use-checkpoint-args`.

    Raises:
        ConfigurationError: there is no such checkpoint, or it doesn't say.
    """
    flags = config.checkpoint
    if not flags.use_checkpoint_args:
        return config
    if not flags.load:
        raise ConfigurationError("--use-checkpoint-args needs --load, the checkpoint to read")
    stored = _read(CheckpointFolder(Path(flags.load), "--load"), flags.ckpt_step)
    wanted = {d for d, spec in all_specs().items() if spec.group in _GROUPS}
    wanted |= {*_TOKENIZER, *_OTHERS}
    if flags.use_mp_args_from_checkpoint_args:
        wanted |= set(_PARALLEL)
    taken = {}
    for dest in wanted & stored.keys() & all_specs().keys():
        if stored[dest] is not None and not all_specs()[dest].environment:
            value = stored[dest]
            taken[dest] = tuple(value) if isinstance(value, list) else value
    values = {**config.given, **taken}
    sources = {**config.sources, **dict.fromkeys(taken, CHECKPOINT)}
    return build_config(values, sources)


def _read(folder: CheckpointFolder, step: int | None) -> dict[str, Any]:
    try:
        iteration = folder.tracked() if step is None else step
    except DataError as error:
        raise ConfigurationError(f"--use-checkpoint-args: {error}") from error
    if iteration is None:
        raise ConfigurationError(
            f"--use-checkpoint-args: {folder.flag} {folder.root} has no tracker file; name a "
            "folder that holds checkpoints, or pass --ckpt-step"
        )
    path = folder.path(iteration) / ARGUMENTS
    try:
        stored = json.loads(path.read_bytes())
        if not isinstance(stored, dict):
            raise ValueError("not a mapping")
        return stored
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"--use-checkpoint-args: {path} is missing; give the model's flags themselves"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--use-checkpoint-args: {path}: damaged ({error})") from error
