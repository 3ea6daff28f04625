"""`--use-checkpoint-args`: the model's flags as a checkpoint recorded them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.packed.arguments.config import Config, all_specs, build_config
from megatron.packed.arguments.declare import FlagSpec
from megatron.packed.checkpoint.folder import CheckpointFolder
from megatron.packed.errors import ConfigurationError, DataError
from megatron.packed.json_text import read_json

ARGUMENTS = "arguments.json"
CHECKPOINT = "checkpoint"
_GROUPS = ("model", "attention", "moe")
_TOKENIZER = (
    *("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "vocab_size"),
    *("special_tokens", "null_tokenizer_eod_id", "tokenizer_hf_no_include_special_tokens"),
    *("tiktoken_pattern", "tiktoken_num_special_tokens", "tiktoken_special_tokens"),
    "vocab_extra_ids",
)
_OTHERS = (
    *("seq_length", "mtp_num_layers", "make_vocab_size_divisible_by"),
    *("padded_vocab_size", "pad_vocab_size"),
)
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
    path = _path_of(CheckpointFolder(Path(flags.load), "--load"), flags.ckpt_step)
    stored = _read(path)
    wanted = {d for d, spec in all_specs().items() if spec.group in _GROUPS}
    wanted |= {*_TOKENIZER, *_OTHERS}
    if flags.use_mp_args_from_checkpoint_args:
        wanted |= set(_PARALLEL)
    if not flags.use_tokenizer_model_from_checkpoint_args:
        wanted.discard("tokenizer_model")
    taken = {}
    for dest in wanted & stored.keys() & all_specs().keys():
        if stored[dest] is not None and not all_specs()[dest].environment:
            taken[dest] = _checked(path, all_specs()[dest], stored[dest])
    values = {**config.given, **taken}
    sources = {**config.sources, **dict.fromkeys(taken, CHECKPOINT)}
    return build_config(values, sources)


def _checked(path: Path, spec: FlagSpec, value: Any) -> Any:
    """A value as the field has it, if it is of the field's type and within its bounds."""
    items = value if spec.is_list and isinstance(value, list) else [value]
    types = (int, float) if spec.value_type is float else (spec.value_type,)
    fitting = tuple(items) if spec.is_list else value
    if not all(type(item) in types for item in items):
        rule: str | None = f"must be of type {spec.value_type.__name__}"
    else:
        rule = spec.violated_by(fitting)
    if rule:
        raise ConfigurationError(
            f"--use-checkpoint-args: {path}: {spec.dest} is {value!r}, which {rule}; give the "
            "model's flags themselves"
        )
    return fitting


def _path_of(folder: CheckpointFolder, step: int | None) -> Path:
    try:
        iteration = folder.tracked() if step is None else step
    except DataError as error:
        raise ConfigurationError(f"--use-checkpoint-args: {error}") from error
    if iteration is None:
        raise ConfigurationError(
            f"--use-checkpoint-args: {folder.flag} {folder.root} has no tracker file; name a "
            "folder that holds checkpoints, or pass --ckpt-step"
        )
    return folder.path(iteration) / ARGUMENTS


def _read(path: Path) -> dict[str, Any]:
    try:
        stored = read_json(path)
        if not isinstance(stored, dict):
            raise ValueError("not a mapping")
        return stored
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"--use-checkpoint-args: {path} is missing; give the model's flags themselves"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--use-checkpoint-args: {path}: damaged ({error})") from error
