"""Where a run goes on from, by its flags: what is loaded, what starts anew, what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.packed.checkpoint.folder import CheckpointFolder
from megatron.packed.errors import ConfigurationError, DataError
from tests.distributed.harness import RankResult, assert_bitwise_equal, run
from tests.distributed.pool import WorkerPools

COMMON = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 64 "
    "--position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 "
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 6 --lr 1e-3 "
    "--lr-decay-style constant --eval-iters 0 --log-interval 1 --threads 1 --use-packed-sequence "
)
Train = Callable[[str], RankResult]


@pytest.fixture(scope="module")
def train(worker_pool: WorkerPools, data_flags: str) -> Train:
    """Train in one process with the flags of this module and some more."""
    return lambda flags: run(worker_pool, 1, f"{COMMON} {data_flags} {flags}")


@pytest.fixture(scope="module")
def whole(train: Train) -> RankResult:
    """All six iterations."""
    return train("")


@pytest.fixture(scope="module")
def saved(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of iterations 2 and 4."""
    folder = tmp_path_factory.mktemp("saved")
    train(f"--save {folder} --save-interval 2 --exit-interval 4")
    return folder


def test_another_iteration_than_the_trackers(train: Train, whole: RankResult, saved: Path) -> None:
    result = train(f"--load {saved} --ckpt-step 2")
    assert result.losses == whole.losses[2:]
    assert_bitwise_equal(result.final_weights, whole.final_weights)


@pytest.mark.parametrize("flags", ["--load {} --finetune", "--pretrained-checkpoint {}"])
def test_weights_alone(flags: str, train: Train, whole: RankResult, saved: Path) -> None:
    """All iterations, the data from its start, the optimizer's moments at zero."""
    result = train(flags.format(saved))
    loaded = train(f"--load {saved}")
    assert len(result.losses) == 6 and loaded.losses == whole.losses[4:]
    assert_bitwise_equal(result.initial_weights, loaded.initial_weights)
    assert result.losses[0] < whole.losses[0] and result.losses[0] != loaded.losses[0]


def test_a_missing_load_falls_back_to_pretrained_weights(
    train: Train, saved: Path, tmp_path: Path
) -> None:
    result = train(f"--load {tmp_path} --pretrained-checkpoint {saved}")
    assert f"taking weights from {saved / 'iter_0000004'}" in result.log
    assert len(result.losses) == 6
    both = train(f"--load {saved} --pretrained-checkpoint {tmp_path}")
    assert len(both.losses) == 2


@pytest.mark.parametrize(("flags", "same"), [("--no-load-optim", False), ("--no-load-rng", True)])
def test_parts_that_are_left_out(
    flags: str, same: bool, train: Train, whole: RankResult, saved: Path
) -> None:
    """Without dropout no generator is drawn from."""
    result = train(f"--load {saved} {flags}")
    assert result.losses[0] == whole.losses[4]
    weights = zip(result.final_weights.values(), whole.final_weights.values(), strict=True)
    assert all(torch.equal(one, other) for one, other in weights) is same


def test_what_is_not_saved_is_not_missed(train: Train, whole: RankResult, tmp_path: Path) -> None:
    train(f"--save {tmp_path} --exit-interval 4 --no-save-optim --no-save-rng")
    result = train(f"--load {tmp_path}")
    assert result.losses[0] == whole.losses[4] and len(result.losses) == 2


def test_retention_keeps_multiples_and_the_newest(
    train: Train, whole: RankResult, tmp_path: Path
) -> None:
    flags = f"--save {tmp_path} --save-interval 1 --save-retain-interval 4"
    result = train(f"{flags} --exit-interval 5 --async-save")
    folder = CheckpointFolder(tmp_path)
    assert folder.iterations() == [4, 5] and folder.tracked() == 5
    assert result.losses == whole.losses[:5]
    # The newest is damaged: retention must not have cost the one before, nor does the next save.
    (folder.path(5) / "common.pt").write_bytes(b"")
    again = train(f"{flags} --load {tmp_path}")
    assert again.losses == whole.losses[4:]
    assert folder.iterations() == [4, 6]


@pytest.mark.parametrize(
    ("flags", "error", "message"),
    [
        ("--load {saved} --ckpt-step 3", DataError, "iter_0000003: missing"),
        (
            "--load {empty} --exit-on-missing-checkpoint",
            ConfigurationError,
            "holds no checkpoint, and --exit-on-missing-checkpoint is given",
        ),
        (
            "--pretrained-checkpoint {empty}",
            ConfigurationError,
            "--pretrained-checkpoint .*: holds no checkpoint",
        ),
        ("--load {saved} --hidden-size 64", DataError, "iter_0000004"),
        ("--load {saved} --num-layers 4", DataError, "iter_0000004"),
        (
            "--load {saved} --num-layers 1 --dist-ckpt-strictness raise_all",
            DataError,
            "iter_0000004",
        ),
        (
            "--load {saved} --train-iters 9",
            ConfigurationError,
            "pass --override-opt_param-scheduler to follow the command line",
        ),
        (
            "--load {damaged} --on-corrupt-checkpoint error",
            DataError,
            "common.pt: .*--on-corrupt-checkpoint fallback takes the newest intact one",
        ),
        ("--load {damaged} --ckpt-step 4", DataError, "iter_0000004/common.pt"),
        ("--save {file}", DataError, "--save"),
    ],
)
def test_what_is_refused(
    flags: str, error: type[Exception], message: str, train: Train, saved: Path, tmp_path: Path
) -> None:
    places = {name: tmp_path / name for name in ("empty", "damaged", "file")}
    places["empty"].mkdir()
    places["file"].write_text("")
    shutil.copytree(saved, places["damaged"])
    (places["damaged"] / "iter_0000004" / "common.pt").write_bytes(b"x" * 100)
    with pytest.raises(error, match=message):
        train(flags.format(saved=saved, **places))
