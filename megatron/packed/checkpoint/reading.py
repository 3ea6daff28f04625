"""Which checkpoint to go on from, whether it is intact, and its sharded part into memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import (
    dict_list_map_inplace,
    extract_matching_values,
    merge,
    nested_values,
)
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    apply_factory_merges,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from torch.distributed.checkpoint.api import CheckpointException

from megatron.packed.checkpoint.common import read_common
from megatron.packed.checkpoint.folder import TRACKER, CheckpointFolder
from megatron.packed.checkpoint.manifest import MANIFEST, Manifest, stays_inside
from megatron.packed.checkpoint.storage import FORMAT, INDEX
from megatron.packed.checkpoint.trust import read_index, weights_only
from megatron.packed.errors import DataError
from megatron.packed.json_text import read_json

PRODUCER = "megatron-packed"
# A weight in full precision, under the names that megatron-core's optimizers give it.
_MASTER_WEIGHTS = ("optimizer.state.param.", "optimizer.state.fp32_param.")


@dataclass(frozen=True)
class Intact:
    """A checkpoint that was looked at and found whole.

    Attributes:
        path: its folder.
        iteration: of the checkpoint.
        common: what every rank has alike.
    """

    path: Path
    iteration: int
    common: dict[str, Any]


def newest_intact(
    folder: CheckpointFolder,
    *,
    step: int | None,
    fall_back: bool,
    report: Callable[[str], None],
    contents: bool = True,
) -> Intact | None:
    """Find the checkpoint to load; a collective call.

    The tracker file decides, so that an older iteration can be chosen by editing it. What it
    names, or holds, may be damaged: then the newest intact checkpoint before it is taken.

    Args:
        folder: where to look.
        step: an iteration to load in place of the tracker's (`--ckpt-step`), damaged or not.
        fall_back: take an older checkpoint in place of a damaged one.
        report: told every damage found, on every rank.
        contents: read every file whole and compare digests; else only sizes.

    Returns:
        The checkpoint, or None where the folder holds none.

    Raises:
        DataError: damaged, and no other may be or can be taken.
    """
    damages: list[str] = []
    for iteration in _candidates(folder, step, damages):
        if damages and not fall_back:
            break  # the tracker is damaged: which checkpoint was meant is a guess
        found = _examine(folder.path(iteration), iteration, contents)
        if isinstance(found, Intact):
            for message in damages:
                report(f"damaged checkpoint: {message}")
            if damages:
                report(f"going on from the newest intact checkpoint, {found.path}")
            return found
        damages.extend(found)
        if step is not None or not fall_back:
            break
    if not damages:
        return None
    way_out = ""
    if step is not None:
        way_out = f"; without --ckpt-step {step} the one that {TRACKER} names is taken"
    elif not fall_back:
        way_out = "; --on-corrupt-checkpoint fallback takes the newest intact one"
    raise DataError(
        f"{folder.flag} {folder.root}: no intact checkpoint: {'; '.join(damages)}{way_out}"
    )


def _candidates(folder: CheckpointFolder, step: int | None, damages: list[str]) -> Iterator[int]:
    """Iterations to try in order; what is wrong with the tracker goes to `damages`."""
    if step is not None:
        yield step
        return
    existing = agree(folder.iterations)
    try:
        tracked = agree(folder.tracked)
    except DataError as error:
        damages.append(str(error))
        tracked = None
        yield from reversed(existing)
        return
    if tracked is None:
        if existing:
            damages.append(f"{folder.root}: has checkpoints but no tracker file")
        yield from reversed(existing)
        return
    yield tracked
    yield from (i for i in reversed(existing) if i < tracked)
    yield from (i for i in reversed(existing) if i > tracked)


def _examine(path: Path, iteration: int, contents: bool) -> Intact | list[str]:
    """Read a checkpoint's small parts and verify its files, each by one rank; collective."""
    try:
        manifest, common = agree(lambda: _read_small(path, iteration))
    except DataError as error:
        return [str(error)]
    if manifest is not None:
        names = sorted(manifest.files)
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        mine = manifest.damage(path, names[rank::size], contents=contents)
        gathered: list[Any] = [None] * size
        torch.distributed.all_gather_object(gathered, mine)
        damage = [message for messages in gathered for message in messages]
        if damage:
            return damage
    return Intact(path, iteration, common)


def _read_small(path: Path, iteration: int) -> tuple[Manifest | None, dict[str, Any]]:
    if not os.path.isdir(path):
        raise DataError(f"{path}: missing")
    manifest = Manifest.read(path)
    try:
        described = read_json(path / FORMAT)
        backend = described["sharded_backend"]
    except FileNotFoundError as error:
        raise DataError(f"{path / FORMAT}: missing") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path / FORMAT}: damaged ({error})") from error
    if backend != "torch_dist":
        raise DataError(
            f"{path / FORMAT}: format {backend!r}; only torch_dist is read, convert it with "
            "the program that wrote it"
        )
    common = read_common(path)
    if common["iteration"] != iteration:
        raise DataError(
            f"{path}: holds iteration {common['iteration']}, so it was renamed, or copied over "
            "another; give the folder the name that fits"
        )
    if manifest is None and common.get("producer") == PRODUCER:
        raise DataError(f"{path / MANIFEST}: missing, so the files can't be verified")
    _check_places(path, read_index(path / INDEX), manifest)
    return manifest, common


def _check_places(path: Path, index: Any, manifest: Manifest | None) -> None:
    """Every file that the index reads from lies in the checkpoint, and is vouched for.

    Raises:
        DataError: one doesn't, or isn't.
    """
    places = getattr(index, "storage_data", None)
    tensors = getattr(index, "state_dict_metadata", None)
    if not isinstance(places, dict) or not isinstance(tensors, dict):
        raise DataError(f"{path / INDEX}: damaged (it is no index of tensors)")
    names = {getattr(place, "relative_path", None) for place in places.values()}
    if not all(isinstance(name, str) for name in names):
        raise DataError(f"{path / INDEX}: damaged (it has tensors that are in no file)")
    for name in sorted(map(str, names)):
        if not stays_inside(name):
            raise DataError(f"{path / INDEX}: names {name!r}, which lies outside the checkpoint")
        if manifest is not None and name not in manifest.files:
            raise DataError(f"{path / MANIFEST}: doesn't list {name}, which tensors are read from")


def agree(action: Callable[[], Any]) -> Any:
    """Do something on rank 0 and give every rank its result or its DataError; collective."""
    outcome: list[Any] = [None, None]
    if torch.distributed.get_rank() == 0:
        try:
            outcome = [action(), None]
        except DataError as error:
            outcome = [None, str(error)]
        except OSError as error:
            outcome = [None, f"{error.filename}: {error.strerror}"]
    torch.distributed.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise DataError(outcome[1])
    return outcome[0]


# --- sharded state --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loaded:
    """What came out of a checkpoint.

    Attributes:
        state: the template with tensors in place of shards.
        weights_stand_in: the checkpoint has no master weights, since its weights were in full
            precision: the caller copies the weights.
    """

    state: dict[str, Any]
    weights_stand_in: bool


def load_sharded(
    template: ShardedStateDict,
    path: Path,
    *,
    strictness: str,
    report: Callable[[str], None],
) -> Loaded:
    """Fill a state with what a checkpoint of any layout holds; a collective call.

    Args:
        template: sharded state of this run, as `sharded_state_dict` gives it.
        path: the checkpoint.
        strictness: `--dist-ckpt-strictness`.
        report: told what keeps its initial value, with a strictness that lets it.

    Raises:
        DataError: the checkpoint is of another model.
    """
    index = read_index(path / INDEX)
    prepared, kept, factories = load_preprocess(template)
    sharded, result = extract_sharded_base(prepared)
    stored = index.state_dict_metadata
    stand_ins = _master_weights_without(sharded, stored)
    absent = stand_ins | _match(sharded, stored, stand_ins, path, strictness, report)
    without, sharded = extract_matching_values(sharded, lambda shard: id(shard) in absent)
    try:
        with weights_only():
            loaded = TorchDistLoadShardedStrategy().load(sharded, path)
    except CheckpointException as error:  # on every rank, with what each of them met
        raise DataError(f"{path}: its tensors can't be read: {_first_failure(error)}") from error
    merge(result, kept)
    merge(result, loaded)
    merge(result, dict_list_map_inplace(lambda shard: shard.data, without))
    return Loaded(apply_factory_merges(result, factories), bool(stand_ins))


def _first_failure(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    lines = [line for line in str(cause).splitlines() if line]
    # torch tells first how to load what it refused to load.
    named = [line for line in lines if "GLOBAL" in line] or lines or [type(cause).__name__]
    return f"rank {rank}: {type(cause).__name__}: {named[0][:200]}"


def _master_weights_without(sharded: ShardedStateDict, stored: dict[str, Any]) -> set[int]:
    """Shards of master weights that the checkpoint holds as weights only."""
    found = set()
    for shard in nested_values(sharded):
        for prefix in _MASTER_WEIGHTS:
            name = shard.key.removeprefix(prefix)
            has_masters = any(each + name in stored for each in _MASTER_WEIGHTS)
            if name != shard.key and name in stored and not has_masters:
                found.add(id(shard))
    return found


def _match(
    sharded: ShardedStateDict,
    stored: dict[str, Any],
    stand_ins: set[int],
    path: Path,
    strictness: str,
    report: Callable[[str], None],
) -> set[int]:
    """Point every shard at what the checkpoint calls it, and refuse what doesn't fit.

    Returns:
        Identities of the shards that the checkpoint lacks, where the strictness allows that.
    """
    absent: dict[int, str] = {}
    used: set[str] = set()
    for shard in nested_values(sharded):
        if id(shard) in stand_ins:
            continue
        named = shard.unique_key if isinstance(shard, ShardedObject) else shard.key
        key = named if named in stored else _other_name(named, stored)
        if key is None:
            absent[id(shard)] = named
            continue
        used.add(key)
        if isinstance(shard, ShardedTensor):
            shard.key = key
            _check_shape(shard, tuple(getattr(stored[key], "size", ())), path)
    _report_mismatch(sorted(absent.values()), sorted(set(stored) - used), path, strictness, report)
    return set(absent)


def _report_mismatch(
    absent: list[str],
    unused: list[str],
    path: Path,
    strictness: str,
    report: Callable[[str], None],
) -> None:
    if absent and strictness not in ("log_unexpected", "log_all", "ignore_all"):
        raise DataError(
            f"{path}: lacks {_some(absent)}, which this run's model or optimizer has; give the "
            "flags that the checkpoint was trained with, or --finetune/--no-load-optim to take "
            "only weights, or --dist-ckpt-strictness log_all to leave these as initialised"
        )
    if unused and strictness == "raise_all":
        raise DataError(f"{path}: holds {_some(unused)}, which this run doesn't have")
    if absent and strictness != "ignore_all":
        report(f"{path}: keep their initial values: {_some(absent)}")
    if unused and strictness == "log_all":
        report(f"{path}: not used: {_some(unused)}")


def _other_name(key: str, stored: dict[str, Any]) -> str | None:
    """The stored name of a master weight that was saved by another kind of optimizer."""
    for prefix in _MASTER_WEIGHTS:
        if key.startswith(prefix):
            names = (other + key.removeprefix(prefix) for other in _MASTER_WEIGHTS)
            return next((name for name in names if name in stored), None)
    return None


def _check_shape(shard: ShardedTensor, stored: tuple[int, ...], path: Path) -> None:
    if shard.allow_shape_mismatch or stored == tuple(shard.global_shape):
        return
    raise DataError(
        f"{path}: {shard.key} has shape {list(stored)}, this run's model has "
        f"{list(shard.global_shape)}; give the flags that the checkpoint was trained with, or "
        "--use-checkpoint-args"
    )


def _some(names: list[str], shown: int = 4) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(sorted(names)[:shown]) + more
