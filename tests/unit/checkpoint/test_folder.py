"""Names of checkpoints, what retention gives up, and what a manifest vouches for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.packed.arguments import parse_arguments, with_checkpoint_arguments
from megatron.packed.checkpoint.folder import CheckpointFolder, superseded
from megatron.packed.checkpoint.manifest import FileRecord, Manifest, record_of, stays_inside
from megatron.packed.errors import ConfigurationError, DataError


@pytest.mark.parametrize(
    ("iterations", "newest", "interval", "given_up"),
    [
        ([2, 4, 6, 8], 8, 4, [2, 6]),
        ([2, 4, 6, 8], 8, None, []),
        ([2], 2, 4, []),  # the only one
        ([2, 4, 6], 4, 6, [2]),  # later ones, of a run that went back, stay
        ([4, 8, 9], 9, 4, []),
        ([1, 2, 3], 3, 100, [1, 2]),
    ],
)
def test_what_retention_gives_up(
    iterations: list[int], newest: int, interval: int | None, given_up: list[int]
) -> None:
    assert superseded(iterations, newest, interval) == given_up
    assert newest not in given_up


def _write(folder: CheckpointFolder, iteration: int, content: str) -> None:
    path = folder.prepare(iteration)
    (path / "file").write_text(content)
    folder.publish(iteration)


def test_checkpoints_appear_whole_and_replace_each_other(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "new")
    assert folder.iterations() == [] and folder.tracked() is None
    _write(folder, 3, "one")
    _write(folder, 12345678, "two")
    assert folder.iterations() == [3, 12345678] and folder.tracked() == 12345678
    _write(folder, 3, "three")
    assert (folder.path(3) / "file").read_text() == "three" and folder.tracked() == 3
    folder.remove(3)
    folder.remove(3)  # of another run that was quicker
    assert folder.iterations() == [12345678]
    assert sorted(entry.name for entry in folder.root.iterdir()) == [
        "iter_12345678",
        "latest_checkpointed_iteration.txt",
    ]


def test_leftovers_of_a_crash_are_cleared_and_never_read(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for name in (".iter_0000004.tmp", ".iter_0000002.replaced", "iter_4", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / "iter_0000009").write_text("a file, not a folder")
    assert folder.iterations() == []
    assert list(folder.prepare(4).iterdir()) == []
    left = {entry.name for entry in tmp_path.iterdir()}
    assert left == {".iter_0000004.tmp", "iter_4", "other", "iter_0000009"}
    folder.discard(4)
    assert not folder.temporary(4).exists()


def test_a_tracker_that_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").mkdir()
    with pytest.raises(DataError, match="latest_checkpointed_iteration.txt: can't be read"):
        CheckpointFolder(tmp_path).tracked()


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("common.pt", True),
        ("a/b", True),
        ("..", False),
        ("../a", False),
        ("a/../../b", False),
        ("/etc/passwd", False),
        ("", False),
        (".", False),
    ],
)
def test_names_that_leave_the_folder(name: str, inside: bool) -> None:
    assert stays_inside(name) is inside


def test_a_manifest_compares_sizes_and_contents(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    Manifest(5, {"file": record_of(tmp_path / "file")}).write(tmp_path)
    manifest = Manifest.read(tmp_path)
    assert manifest is not None and manifest.iteration == 5
    assert manifest.files["file"] == FileRecord(
        3, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )
    assert manifest.damage(tmp_path, ["file"]) == []
    (tmp_path / "file").write_bytes(b"abd")
    assert manifest.damage(tmp_path, ["file"], contents=False) == []
    assert "content has changed" in manifest.damage(tmp_path, ["file"])[0]
    (tmp_path / "file").write_bytes(b"ab")
    assert "2 bytes, 3 were written" in manifest.damage(tmp_path, ["file"], contents=False)[0]
    (tmp_path / "file").unlink()
    assert manifest.damage(tmp_path, ["file"])[0].endswith("file: missing")


# --- --use-checkpoint-args ------------------------------------------------------------------------

FLAGS = "--micro-batch-size 1 --train-iters 3 --lr 1e-3 --mock-data --use-checkpoint-args "


def _taken(folder: Path, flags: str = "") -> object:
    command = f"{FLAGS} --load {folder} {flags}".split()
    return with_checkpoint_arguments(parse_arguments(command, {}))


def _store(folder: Path, text: str, tracker: str = "4") -> None:
    path = CheckpointFolder(folder).path(4)
    path.mkdir()
    (path / "arguments.json").write_text(text)
    (folder / "latest_checkpointed_iteration.txt").write_text(tracker)


def test_the_models_shape_comes_from_the_checkpoint(tmp_path: Path) -> None:
    stored = {
        "num_layers": 3,
        "hidden_size": 48,
        "num_attention_heads": 4,
        "lr": 7.0,
        "tensor_model_parallel_size": 2,
        "seq_length": 77,
        "no_such_field": 1,
    }
    _store(tmp_path, json.dumps(stored))
    config = _taken(tmp_path, "--num-layers 8")
    assert config.model.num_layers == 3 and config.model.hidden_size == 48  # type: ignore[attr-defined]
    assert config.data.seq_length == 77 and config.optimization.lr == 1e-3  # type: ignore[attr-defined]
    assert config.parallel.tensor_model_parallel_size == 1  # type: ignore[attr-defined]
    parallel = _taken(tmp_path, "--use-mp-args-from-checkpoint-args").parallel  # type: ignore[attr-defined]
    assert parallel.tensor_model_parallel_size == 2


@pytest.mark.parametrize(
    ("text", "tracker", "message"),
    [
        ("", "4", "arguments.json: damaged"),
        ("[1]", "4", r"arguments.json: damaged \(not a mapping\)"),
        ("{", "4", "arguments.json: damaged"),
        ("{}", "x", "--use-checkpoint-args: .*holds 'x', where the number"),
        ("{}", "5", "iter_0000005/arguments.json is missing; give the model's flags themselves"),
    ],
)
def test_arguments_that_cannot_be_taken(
    text: str, tracker: str, message: str, tmp_path: Path
) -> None:
    _store(tmp_path, text, tracker)
    with pytest.raises(ConfigurationError, match=message):
        _taken(tmp_path)


def test_the_tokenizer_comes_from_the_checkpoint_but_for_its_model_on_request(
    tmp_path: Path,
) -> None:
    stored = {
        "num_layers": 3,
        "hidden_size": 48,
        "num_attention_heads": 4,
        "tokenizer_type": "TikTokenizer",
        "tokenizer_model": "theirs",
        "special_tokens": ["a", "b"],
        "padded_vocab_size": 96,
        "seq_length": 77,
    }
    _store(tmp_path, json.dumps(stored))
    taken = _taken(tmp_path, "--tokenizer-model ours").data  # type: ignore[attr-defined]
    assert (taken.tokenizer_model, taken.special_tokens) == ("theirs", ("a", "b"))
    assert (taken.tokenizer_type, taken.padded_vocab_size) == ("TikTokenizer", 96)
    kept = "--tokenizer-model ours --no-use-tokenizer-model-from-checkpoint-args"
    assert _taken(tmp_path, kept).data.tokenizer_model == "ours"  # type: ignore[attr-defined]


def test_no_checkpoint_to_take_arguments_from(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="has no tracker file; name a folder"):
        _taken(tmp_path)
    with pytest.raises(ConfigurationError, match="--use-checkpoint-args needs --load"):
        with_checkpoint_arguments(parse_arguments(FLAGS.split(), {}))
