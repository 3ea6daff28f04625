"""Folders of checkpoints that were cut, mixed up, forged, or are of another model."""

from __future__ import annotations

import argparse
import dataclasses
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint.metadata import Metadata

from megatron.packed.arguments import parse_arguments, with_checkpoint_arguments
from megatron.packed.checkpoint.folder import TRACKER, CheckpointFolder
from megatron.packed.checkpoint.manifest import MANIFEST, FileRecord, Manifest, record_of
from megatron.packed.checkpoint.reading import load_sharded, newest_intact
from megatron.packed.checkpoint.storage import COMMON, FORMAT, INDEX
from megatron.packed.checkpoint.trust import read_index

from .table import Malformed, assert_refused, cases_of, each, written

SHARD = "__0_0.distcp"
NAME = "iter_0000008"
ARGUMENTS = "arguments.json"


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """This process as a job of one rank: looking for checkpoints is a collective call."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def _tensor(*shape: int, key: str = "weight") -> Any:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    return ShardedTensor.from_rank_offsets(key, torch.arange(32.0).view(*shape))


@pytest.fixture(scope="module")
def saved(alone: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one checkpoint, of iteration 8, that holds a matrix of 4 by 8."""
    folder = tmp_path_factory.mktemp("saved")
    path = folder / NAME
    weight = {"weight": torch.arange(32.0).view(4, 8)}
    torch.distributed.checkpoint.save(weight, checkpoint_id=path)
    common = {"producer": "megatron-packed", "iteration": 8, "consumed_samples": 32, "data": None}
    torch.save(common, path / COMMON)
    written(path / FORMAT, '{"sharded_backend": "torch_dist"}')
    written(path / ARGUMENTS, '{"num_layers": 4}')
    _sign(path)
    written(folder / TRACKER, "8")
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of that folder, to be spoilt."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def _sign(path: Path) -> None:
    """Write a manifest that fits whatever is there."""
    names = sorted(entry.name for entry in path.iterdir() if entry.name != MANIFEST)
    Manifest(8, {name: record_of(path / name) for name in names}).write(path)


def _look(folder: Path, step: int | None = None) -> Any:
    flagged = CheckpointFolder(folder, "--load")
    return newest_intact(flagged, step=step, fall_back=False, report=lambda message: None)


def test_the_checkpoint_is_fine_before_it_is_spoilt(folder: Path) -> None:
    found = _look(folder)
    assert found.iteration == 8 and found.common["consumed_samples"] == 32


# --- what anyone can do to files ------------------------------------------------------------------


def _put(name: str, content: str | bytes) -> Callable[[Path], object]:
    return lambda folder: written(folder / NAME / name, content)


def _track(content: str | bytes) -> Callable[[Path], object]:
    return lambda folder: written(folder / TRACKER, content)


def _change(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    def act(folder: Path) -> None:
        path = folder / NAME / name
        path.write_bytes(change(path.read_bytes()))

    return act


def _flip(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


LOAD = "--load"

# Given: what is done to the folder.
DAMAGES = cases_of(
    ("an empty tracker", _track(""), LOAD, f"{TRACKER}: holds ''", "--on-corrupt-checkpoint"),
    ("a word in the tracker", _track("release"), f"{TRACKER}: holds 'release'", "--ckpt-step"),
    ("bytes in the tracker", _track(b"\xff\xfe\0"), f"{TRACKER}: holds '\\xff\\xfe\\x00'"),
    ("a number without end in the tracker", _track("9" * 30), f"{TRACKER}: holds '999"),
    ("a tracker of no checkpoint", _track("7"), "iter_0000007: missing", "fallback takes"),
    ("a tracker that is a folder", lambda f: (os.remove(f / TRACKER), (f / TRACKER).mkdir()),
     f"{TRACKER}: can't be read (Is a directory)"),
    ("no tracker", lambda f: os.remove(f / TRACKER), "has checkpoints but no tracker file"),
    ("a renamed checkpoint", lambda f: (os.rename(f / NAME, f / "iter_0000009"),
     written(f / TRACKER, "9")), "iter_0000009: holds iteration 8", "renamed"),
    ("no manifest", lambda f: os.remove(f / NAME / MANIFEST), f"{MANIFEST}: missing", "verified"),
    ("an empty manifest", _put(MANIFEST, ""), f"{MANIFEST}: damaged (JSONDecodeError"),
    ("a manifest nested too deeply", _put(MANIFEST, "[" * 100_000), "damaged (ValueError: nested"),
    ("a manifest of another form", _put(MANIFEST, "{}"), f"{MANIFEST}: damaged (KeyError"),
    ("a manifest that was edited", _change(MANIFEST, lambda c: c.replace(b": 8", b": 9")),
     f"{MANIFEST}: damaged", "digest doesn't match"),
    ("a shard that is gone", lambda f: os.remove(f / NAME / SHARD), f"{SHARD}: missing"),
    ("a shard cut short", _change(SHARD, lambda c: c[:-1]), f"{SHARD}: ", "bytes", "were written"),
    ("a shard with a flipped bit", _change(SHARD, _flip), f"{SHARD}: content has changed"),
    ("arguments that were edited", _put(ARGUMENTS, '{"num_layers": 5}'), f"{ARGUMENTS}: content"),
    ("no common part", lambda f: os.remove(f / NAME / COMMON), f"{COMMON}: missing"),
    ("a common part cut short", _change(COMMON, lambda c: c[:-9]), f"{COMMON}: damaged, or not"),
    ("no index", lambda f: os.remove(f / NAME / INDEX), f"{INDEX}: can't be read (No such file"),
    ("half an index", _change(INDEX, lambda c: c[:-9]), f"{INDEX}: "),
    ("no format", lambda f: os.remove(f / NAME / FORMAT), f"{FORMAT}: missing"),
    ("a format that is a list", _put(FORMAT, "[]"), f"{FORMAT}: damaged ("),
    ("another format", _put(FORMAT, '{"sharded_backend": "zarr"}'), "format 'zarr'", "torch_dist"),
)  # fmt: skip


@each(DAMAGES)
def test_a_damaged_checkpoint_is_refused(case: Malformed, folder: Path) -> None:
    case.given(folder)
    assert_refused(case, lambda: _look(folder))


def test_a_step_that_is_not_there_says_what_to_do(folder: Path) -> None:
    case = Malformed("", None, ("iter_0000007: missing", "without --ckpt-step 7 the one that"))
    assert_refused(case, lambda: _look(folder, step=7))


# --- forged, with every digest right --------------------------------------------------------------


class _Attack:
    """Unpickling it would make a folder."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("was-run",)


def _common(**changes: Any) -> Callable[[Path], object]:
    def act(path: Path) -> None:
        value = torch.load(path / COMMON, weights_only=False)  # of this test
        torch.save({**value, **changes}, path / COMMON)

    return act


def _other_program(**arguments: Any) -> Callable[[Path], object]:
    def act(path: Path) -> None:
        torch.save({"iteration": 8, "args": argparse.Namespace(**arguments)}, path / COMMON)

    return act


def _index(change: Callable[[Any], Any]) -> Callable[[Path], object]:
    def act(path: Path) -> None:
        index = read_index(path / INDEX)
        changed = change(index)
        (path / INDEX).write_bytes(pickle.dumps(index if changed is None else changed))

    return act


def _read_from(place: Any) -> Callable[[Any], None]:
    def act(index: Any) -> None:
        for key, info in list(index.storage_data.items()):
            index.storage_data[key] = (
                dataclasses.replace(info, relative_path=place) if isinstance(place, str) else place
            )

    return act


FORGED = cases_of(
    ("code in the common part", lambda p: torch.save(_Attack(), p / COMMON), f"{COMMON}: damaged",
     "not plain data"),
    ("code in the index", lambda p: (p / INDEX).write_bytes(pickle.dumps(_Attack())), INDEX,
     "posix.mkdir"),
    ("a common part that is a list", lambda p: torch.save([8], p / COMMON), COMMON, "no iteration"),
    ("an iteration in words", _common(iteration="eight"), COMMON, "its iteration is 'eight'"),
    ("samples before the first", _common(consumed_samples=-4), "its consumed_samples is '-4'"),
    ("arguments in a dictionary", _common(args={}), COMMON, "its args is '{}'"),
    ("samples counted in words", _other_program(consumed_train_samples="many"),
     "its consumed_samples is 'many'"),
    ("schedules in a list", _common(opt_param_scheduler=[1]), "opt_param_scheduler is '[1]'"),
    ("data in words", _common(data="all"), COMMON, "its data is 'all'"),
    ("an index of nothing", _index(lambda index: {}), f"{INDEX}: damaged", "no index of tensors"),
    ("an index without tensors", _index(lambda index: Metadata(None, storage_data={})), INDEX,
     "damaged (it is no index"),
    ("an index of another folder", _index(_read_from("../iter_0000004/" + SHARD)), INDEX,
     "names '../iter_0000004/__0_0.distcp', which lies outside"),
    ("an index of the root", _index(_read_from("/etc/passwd")), "names '/etc/passwd', which lies"),
    ("an index with a zero byte", _index(_read_from("a\0b")), "names 'a\\x00b', which lies"),
    ("an index of unlisted files", _index(_read_from("x.distcp")), MANIFEST, "doesn't list x.dist"),
    ("tensors in no file", _index(_read_from(7)), INDEX, "has tensors that are in no file"),
)  # fmt: skip


@each(FORGED)
def test_a_forged_checkpoint_is_refused(
    case: Malformed, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    case.given(folder / NAME)
    _sign(folder / NAME)
    assert_refused(case, lambda: _look(folder))
    assert not (folder / "was-run").exists()


def _resign(path: Path, **changes: Any) -> None:
    manifest = Manifest.read(path)
    assert manifest is not None
    dataclasses.replace(manifest, **changes).write(path)


# Given: what the manifest says instead.
MANIFESTS = cases_of(
    ("an unknown version", {"format_version": 99}, MANIFEST, "format version 99", "reads"),
    ("a manifest's iteration in words", {"iteration": "x"}, MANIFEST, "invalid literal"),
    ("a file above the checkpoint", {"files": {"../x": FileRecord(1, "")}}, "names '../x', which"),
    ("a file of the root", {"files": {"/etc/passwd": FileRecord(1, "")}}, "names '/etc/passwd', w"),
    ("a file without a name", {"files": {"": FileRecord(1, "")}}, "names '', which lies outside"),
    ("a name with a zero byte", {"files": {"a\0": FileRecord(1, "")}}, "names 'a\\x00', which"),
    ("a manifest of no files", {"files": {}}, MANIFEST, f"doesn't list {SHARD}"),
)  # fmt: skip


@each(MANIFESTS)
def test_a_forged_manifest_is_refused(case: Malformed, folder: Path) -> None:
    _resign(folder / NAME, **case.given)
    assert_refused(case, lambda: _look(folder))


# --- of another model -----------------------------------------------------------------------------


def _object(key: str) -> Any:
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    return ShardedObject(key, None, (1,), (0,))


# Given: what this run's model has, and --dist-ckpt-strictness.
MODELS = cases_of(
    ("another hidden size", (lambda: {"w": _tensor(2, 16)}, "assume_ok_unexpected"), NAME,
     "weight has shape [4, 8], this run's model has [2, 16]", "--use-checkpoint-args"),
    ("another number of dimensions", (lambda: {"w": _tensor(32)}, "assume_ok_unexpected"), NAME,
     "this run's model has [32]"),
    ("a layer more", (lambda: {"w": _tensor(4, 8, key="layer.9")}, "raise_unexpected"), NAME,
     "lacks layer.9, which this run's model", "--dist-ckpt-strictness log_all"),
    ("a layer less", (lambda: {}, "raise_all"), NAME, "holds weight, which this run doesn't have"),
    ("no generators", (lambda: {"g": _object("rng_state")}, "raise_all"), "lacks rng_state"),
)  # fmt: skip


@each(MODELS)
def test_a_checkpoint_of_another_model_is_refused(case: Malformed, folder: Path) -> None:
    template, strictness = case.given
    assert_refused(
        case,
        lambda: load_sharded(
            template(), folder / NAME, strictness=strictness, report=lambda message: None
        ),
    )


# --- --use-checkpoint-args ------------------------------------------------------------------------

FLAG = "--use-checkpoint-args"

# Given: contents of the tracker file and of arguments.json.
STORED = cases_of(
    ("stored arguments nested too deeply", ("8", "[" * 100_000), FLAG, ARGUMENTS, "nested too"),
    ("stored arguments in a list", ("8", "[1]"), FLAG, ARGUMENTS, "damaged (not a mapping)"),
    ("a stored argument twice", ("8", '{"num_layers": 1, "num_layers": 2}'), FLAG, "twice"),
    ("a stored number in words", ("8", '{"num_layers": "four"}'), FLAG, ARGUMENTS,
     "num_layers is 'four', which must be of type int"),
    ("stored arguments of nothing", ("7", "{}"), FLAG, "iter_0000007/arguments.json is missing"),
    ("no number to read them from", ("x", "{}"), FLAG, f"{TRACKER}: holds 'x'"),
)  # fmt: skip


@each(STORED)
def test_stored_arguments_are_refused(case: Malformed, tmp_path: Path) -> None:
    tracker, arguments = case.given
    written(tmp_path / TRACKER, tracker)
    written(tmp_path / NAME / ARGUMENTS, arguments)
    flags = f"--micro-batch-size 1 --train-iters 3 --lr 1e-3 --mock-data {FLAG} --load {tmp_path}"
    assert_refused(case, lambda: with_checkpoint_arguments(parse_arguments(flags.split(), {})))


CASES = (*DAMAGES, *FORGED, *MANIFESTS, *MODELS, *STORED)
