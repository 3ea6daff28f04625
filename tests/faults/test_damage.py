"""Checkpoints that were cut, changed, lost or forged: found, named, and an intact one is taken."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.packed.checkpoint.folder import TRACKER, CheckpointFolder
from megatron.packed.checkpoint.manifest import MANIFEST, Manifest, record_of
from megatron.packed.checkpoint.reading import Intact, newest_intact
from megatron.packed.errors import DataError
from tests.distributed.pool import WorkerPools
from tests.faults.conftest import Reference
from tests.faults.fleet import Fleet, assert_same_run
from tests.faults.table import FaultTable

OLD, NEW = 4, 8


@dataclass(frozen=True)
class Found:
    """What a search for a checkpoint came to.

    Attributes:
        iteration: of the one taken; None where there is none.
        messages: what it reported.
        error: its DataError, if that is how it ended.
    """

    iteration: int | None
    messages: tuple[str, ...]
    error: str | None = None


def search(folder: Path, *, fall_back: bool = True, step: int | None = None) -> Found:
    """Look for the newest intact checkpoint of a folder."""
    messages: list[str] = []
    flagged = CheckpointFolder(folder, "--load")
    try:
        found = newest_intact(flagged, step=step, fall_back=fall_back, report=messages.append)
    except DataError as error:
        return Found(None, tuple(messages), str(error))
    return Found(found.iteration if isinstance(found, Intact) else None, tuple(messages))


@pytest.fixture(scope="module")
def saved(fault_flags: str, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """A run of ten iterations that left checkpoints of 4 and 8."""
    folder = tmp_path_factory.mktemp("saved")
    flags = f"{fault_flags} --save {folder / 'checkpoints'} --save-interval 4 --exit-interval 8"
    fleet = Fleet(1, flags, folder / "records")
    assert fleet.run() == [0], fleet.output()
    return fleet


@pytest.fixture
def checkpoints(saved: Fleet, tmp_path: Path) -> Path:
    """A copy of those checkpoints, to be damaged."""
    return Path(shutil.copytree(saved.folder.parent / "checkpoints", tmp_path / "copy"))


# --- damage ---------------------------------------------------------------------------------------


def _damages(path: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """Ways to damage a file, by name."""
    content = path.read_bytes()
    generator = random.Random(path.name)

    def flip(place: int, bit: int) -> None:
        changed = bytearray(content)
        changed[place] ^= 1 << bit
        path.write_bytes(changed)

    yield "deleted", path.unlink
    yield "emptied", lambda: path.write_bytes(b"") and None
    for share in (0.5, 1.0):
        size = max(int(share * len(content)) - 1, 0)
        yield "truncated", lambda size=size: path.write_bytes(content[:size]) and None
    yield "lengthened", lambda: path.write_bytes(content + b"\0") and None
    for _ in range(3):
        place, bit = generator.randrange(len(content)), generator.randrange(8)
        yield "bit flipped", lambda place=place, bit=bit: flip(place, bit)


def _damage_everything(folder: Path) -> list[tuple[str, str, Found]]:
    """Damage every file of the newest checkpoint in turn, and search each time."""
    outcomes = []
    for path in sorted(CheckpointFolder(folder).path(NEW).iterdir()):
        content = path.read_bytes()
        for name, apply in _damages(path):
            apply()
            outcomes.append((str(path), name, search(folder)))
            path.write_bytes(content)
    assert search(folder) == Found(NEW, ())
    return outcomes


def test_any_damage_to_any_file_is_found(
    checkpoints: Path, worker_pool: WorkerPools, table: FaultTable
) -> None:
    (outcomes,) = worker_pool(1).run(_damage_everything, checkpoints)
    files = {Path(path).name for path, _, _ in outcomes}
    assert {".metadata", "common.pt", "metadata.json", MANIFEST, "__0_0.distcp"} <= files
    for path, name, found in outcomes:
        assert found.iteration == OLD, (path, name, found)
        assert path in found.messages[0], (path, name, found)
        assert found.messages[1].startswith("going on from the newest intact checkpoint")
        table.add(f"checkpoint file {name}")


def _tracker(folder: Path, content: bytes | None) -> tuple[Found, Found]:
    path = folder / TRACKER
    path.unlink() if content is None else path.write_bytes(content)
    return search(folder), search(folder, fall_back=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds '', where the number of an iteration should be"),
        (b"\xff\x00garbage", "should be; write that of an existing iter_"),
        (b"-3", "holds '-3'"),
        (b"9" * 30, "where the number"),
        (b"release", "holds 'release'"),
        (None, "has checkpoints but no tracker file"),
        (b"7", "iter_0000007: missing"),
    ],
)
def test_garbage_in_the_tracker(
    content: bytes | None,
    message: str,
    checkpoints: Path,
    worker_pool: WorkerPools,
    table: FaultTable,
) -> None:
    ((found, strict),) = worker_pool(1).run(_tracker, checkpoints, content)
    assert found.iteration == (OLD if content == b"7" else NEW)
    assert message in found.messages[0]
    assert strict.iteration is None and message in str(strict.error)
    assert "--on-corrupt-checkpoint fallback takes the newest intact one" in str(strict.error)
    table.add("garbage in the tracker file")


def _all_damaged(folder: Path) -> Found:
    for iteration in (OLD, NEW):
        (CheckpointFolder(folder).path(iteration) / "common.pt").write_bytes(b"x")
    return search(folder)


def test_nothing_intact_is_an_error_that_names_all(
    checkpoints: Path, worker_pool: WorkerPools
) -> None:
    (found,) = worker_pool(1).run(_all_damaged, checkpoints)
    assert found.iteration is None
    for part in ("no intact checkpoint", "iter_0000008/common.pt", "iter_0000004/common.pt"):
        assert part in str(found.error)


def test_a_run_goes_on_from_the_intact_one(
    saved: Fleet, checkpoints: Path, fault_flags: str, reference: Reference, tmp_path: Path
) -> None:
    shard = CheckpointFolder(checkpoints).path(NEW) / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    shutil.copytree(saved.folder, tmp_path / "records")
    fleet = Fleet(1, f"{fault_flags} --load {checkpoints}", tmp_path / "records")
    assert fleet.run() == [0], fleet.output()
    assert f"WARNING: damaged checkpoint: {shard}: content has changed" in fleet.output()
    assert assert_same_run(fleet, reference(1)) == NEW - OLD


# --- forged checkpoints: every digest is right ----------------------------------------------------


class _Attack:
    """Unpickling it would run a command."""

    def __init__(self, proof: str) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return os.mkdir, (self.proof,)


def _sign(path: Path) -> None:
    """Write a manifest that fits whatever is there."""
    manifest = Manifest.read(path)
    assert manifest is not None
    files = {name: record_of(path / name) for name in manifest.files}
    dataclasses.replace(manifest, files=files).write(path)


def _forge(folder: Path, name: str, content: bytes) -> Found:
    path = CheckpointFolder(folder).path(NEW)
    (path / name).write_bytes(content)
    _sign(path)
    return search(folder)


def _saved_by_torch(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_code_in_a_pickle_is_not_run(
    name: str, checkpoints: Path, worker_pool: WorkerPools, table: FaultTable, tmp_path: Path
) -> None:
    proof = tmp_path / "was-run"
    value = {"iteration": NEW, "x": _Attack(str(proof))}
    content = pickle.dumps(value) if name == ".metadata" else _saved_by_torch(value)
    (found,) = worker_pool(1).run(_forge, checkpoints, name, content)
    assert found.iteration == OLD
    assert f"iter_0000008/{name}: " in found.messages[0]
    assert "mkdir" in found.messages[0] or "not plain data" in found.messages[0]
    assert not proof.exists()
    pickle.loads(pickle.dumps(_Attack(str(proof))))
    assert proof.exists()  # it would have worked
    table.add("code in a pickle of the checkpoint")


def _forge_shards(folder: Path, proof: str) -> None:
    """Put an attack into every object among the shards, and sign."""
    path = CheckpointFolder(folder).path(NEW)
    from megatron.packed.checkpoint.trust import read_index

    index = read_index(path / ".metadata")
    content, forged, objects = _saved_by_torch(_Attack(proof)), "__9_9.distcp", 0
    for key, info in index.storage_data.items():
        if type(index.state_dict_metadata[key.fqn]).__name__ == "BytesStorageMetadata":
            index.storage_data[key] = dataclasses.replace(
                info, relative_path=forged, offset=0, length=len(content)
            )
            objects += 1
    assert objects
    (path / forged).write_bytes(content)
    (path / ".metadata").write_bytes(pickle.dumps(index))
    manifest = Manifest.read(path)
    assert manifest is not None
    files = {**manifest.files, forged: record_of(path / forged)}
    dataclasses.replace(manifest, files=files).write(path)
    _sign(path)


def test_code_in_a_shard_is_not_run(
    saved: Fleet,
    checkpoints: Path,
    fault_flags: str,
    worker_pool: WorkerPools,
    table: FaultTable,
    tmp_path: Path,
) -> None:
    proof = tmp_path / "was-run"
    worker_pool(1).run(_forge_shards, checkpoints, str(proof))
    fleet = Fleet(1, f"{fault_flags} --load {checkpoints}", tmp_path / "records")
    assert fleet.run() == [1]
    assert "iter_0000008: its tensors can't be read: rank 0: UnpicklingError: " in fleet.output()
    assert "mkdir" in fleet.output() and "Traceback" not in fleet.output()
    assert not proof.exists()
    table.add("code in a pickle of the checkpoint")


def _forge_manifest(folder: Path, change: str, value: Any) -> Found:
    path = CheckpointFolder(folder).path(NEW)
    manifest = Manifest.read(path)
    assert manifest is not None
    if change == "name":
        record = next(iter(manifest.files.values()))
        dataclasses.replace(manifest, files={**manifest.files, value: record}).write(path)
    elif change == "version":
        dataclasses.replace(manifest, format_version=value).write(path)
    else:
        (path / MANIFEST).write_text(value)
    return search(folder)


@pytest.mark.parametrize(
    ("change", "value", "message"),
    [
        ("name", "../../../etc/passwd", "names '../../../etc/passwd', which lies outside"),
        ("name", "/etc/passwd", "names '/etc/passwd', which lies outside the checkpoint"),
        ("name", "a/../../b", "which lies outside the checkpoint"),
        ("name", "", "names '', which lies outside the checkpoint"),
        ("version", 99, "format version 99, but this program reads version 1"),
        ("text", "", "manifest.json: damaged (JSONDecodeError"),
        ("text", "[]", "manifest.json: damaged (TypeError"),
        ("text", "{}", "manifest.json: damaged (KeyError"),
        ("text", json.dumps({"format_version": 1, "iteration": 8, "files": {}, "sha256": ""}),
         "its digest doesn't match its content"),
    ],
)  # fmt: skip
def test_a_manifest_that_was_tampered_with(
    change: str, value: Any, message: str, checkpoints: Path, worker_pool: WorkerPools
) -> None:
    (found,) = worker_pool(1).run(_forge_manifest, checkpoints, change, value)
    assert found.iteration == OLD
    assert message in found.messages[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "metadata.json: damaged"),
        ("[]", "metadata.json: damaged"),
        ('{"sharded_backend": "zarr"}', "format 'zarr'; only torch_dist is read"),
    ],
)
def test_a_format_that_is_not_read(
    text: str, message: str, checkpoints: Path, worker_pool: WorkerPools
) -> None:
    (found,) = worker_pool(1).run(_forge, checkpoints, "metadata.json", text.encode())
    assert found.iteration == OLD and message in found.messages[0]


def _unlisted(folder: Path) -> Found:
    """A manifest that leaves files out can't vouch for them."""
    path = CheckpointFolder(folder).path(NEW)
    manifest = Manifest.read(path)
    assert manifest is not None
    kept = {n: r for n, r in manifest.files.items() if not n.endswith(".distcp")}
    dataclasses.replace(manifest, files=kept).write(path)
    return search(folder)


def test_shards_that_the_manifest_does_not_list(
    checkpoints: Path, worker_pool: WorkerPools
) -> None:
    (found,) = worker_pool(1).run(_unlisted, checkpoints)
    assert found.iteration == OLD
    assert "__0_0.distcp" in found.messages[0]


def _escape(folder: Path, place: str, *, signed: bool) -> Found:
    """An index that reads tensors from elsewhere."""
    from megatron.packed.checkpoint.trust import read_index

    path = CheckpointFolder(folder).path(NEW)
    index = read_index(path / ".metadata")
    key, info = next(iter(index.storage_data.items()))
    index.storage_data[key] = dataclasses.replace(info, relative_path=place)
    (path / ".metadata").write_bytes(pickle.dumps(index))
    if signed:
        _sign(path)
        return search(folder)
    common = torch.load(path / "common.pt", weights_only=False)  # of this test
    torch.save({**common, "producer": "another"}, path / "common.pt")
    (path / MANIFEST).unlink()
    return search(folder)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("place", ["../iter_0000004/__0_0.distcp", "/etc/passwd"])
def test_an_index_that_leaves_its_folder(
    place: str, signed: bool, checkpoints: Path, worker_pool: WorkerPools
) -> None:
    (found,) = worker_pool(1).run(_escape, checkpoints, place, signed=signed)
    assert found.iteration == OLD
    assert f"names '{place}', which lies outside the checkpoint" in found.messages[0]
