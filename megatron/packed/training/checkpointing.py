"""When a run saves, how a save goes on beside training, and where a run goes on from."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess

from megatron.packed.arguments import Config
from megatron.packed.arguments.from_checkpoint import ARGUMENTS
from megatron.packed.checkpoint.folder import CheckpointFolder, superseded
from megatron.packed.checkpoint.reading import Intact, agree, newest_intact
from megatron.packed.checkpoint.snapshot import Snapshot, SnapshotBuffers
from megatron.packed.checkpoint.storage import (
    COMMON,
    SaveError,
    SavePlans,
    ShardedSave,
    on_rank_0,
)
from megatron.packed.data.files import require_writable_folder
from megatron.packed.errors import ConfigurationError, TrainingError
from megatron.packed.training import state
from megatron.packed.training.environment import print_rank_0
from megatron.packed.training.progress import Progress
from megatron.packed.training.replicas import gathered_parameters
from megatron.packed.training.step import TrainStep


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint that a run goes on from, or takes its weights from.

    Attributes:
        checkpoint: what was found intact.
        weights_only: start anew with its weights (`--finetune`, `--pretrained-checkpoint`).
    """

    checkpoint: Intact
    weights_only: bool

    @property
    def progress(self) -> Progress:
        """Where training goes on."""
        if self.weights_only:
            return Progress()
        common = self.checkpoint.common
        # Upstream's own checkpoints count them among the arguments.
        elsewhere = getattr(common.get("args"), "consumed_train_samples", 0)
        consumed = common.get("consumed_samples", elsewhere)
        return Progress(
            self.checkpoint.iteration,
            int(consumed),
            common.get("data"),
            bool(common.get("evaluation_pending", False)),
            int(common.get("bad_batches", 0)),
        )

    def restore(self, config: Config, step: TrainStep) -> None:
        """Put the state into a freshly built run; a collective call.

        Raises:
            DataError: the checkpoint is of another model.
            ConfigurationError: it is of another schedule.
        """
        flags, path, common = config.checkpoint, self.checkpoint.path, self.checkpoint.common
        strictness = flags.dist_ckpt_strictness
        has_optimizer = common.get("has_optimizer", True)
        if self.weights_only or flags.no_load_optim or not has_optimizer:
            state.restore_weights(step, path, strictness, print_rank_0)
        else:
            state.restore_training(step, path, common, strictness, print_rank_0)
        if self.weights_only:
            return
        if not flags.no_load_optim and "opt_param_scheduler" in common:
            state.restore_schedules(step, common)
        if flags.no_load_rng or not common.get("has_rng", False):
            return
        if common.get("layout") == state.layout_of(config):
            state.restore_generators(path)
            if step.reruns is not None and common.get("has_reruns", False):
                state.restore_reruns(step.reruns, path)
        else:
            print_rank_0(
                "random generators start anew: the checkpoint is of another parallel layout, so "
                "dropout won't draw what an uninterrupted run would"
            )


def find_resume_point(config: Config, restarts: int = 0) -> ResumePoint | None:
    """Find what a run goes on from; a collective call.

    Args:
        config: the run's configuration.
        restarts: how often the launcher restarted the job (TORCHELASTIC_RESTART_COUNT); then the
            checkpoints that the job itself has written come first, without a flag.

    Returns:
        None where the run starts from scratch.

    Raises:
        DataError: checkpoints are there, but damaged.
        ConfigurationError: `--exit-on-missing-checkpoint`, and there is none.
    """
    flags = config.checkpoint
    if restarts and flags.save:
        own = _find(config, CheckpointFolder(Path(flags.save), "--save"), step=None)
        if own is not None:
            print_rank_0(f"restart {restarts} of the job: going on from {own.path}")
            return ResumePoint(own, weights_only=False)
    if flags.load:
        folder = CheckpointFolder(Path(flags.load), "--load")
        found = _find(config, folder, step=flags.ckpt_step)
        if found is not None:
            print_rank_0(f"loading checkpoint {found.path} at iteration {found.iteration}")
            return ResumePoint(found, weights_only=flags.finetune)
        if flags.exit_on_missing_checkpoint:
            raise ConfigurationError(
                f"--load {flags.load}: holds no checkpoint, and --exit-on-missing-checkpoint is "
                "given; name a folder with iter_* folders, or drop that flag to start from scratch"
            )
        print_rank_0(f"--load {flags.load}: no checkpoint there, will start from random weights")
    if flags.pretrained_checkpoint:
        folder = CheckpointFolder(Path(flags.pretrained_checkpoint), "--pretrained-checkpoint")
        found = _find(config, folder, step=None)
        if found is None:
            raise ConfigurationError(
                f"--pretrained-checkpoint {flags.pretrained_checkpoint}: holds no checkpoint"
            )
        print_rank_0(f"taking weights from {found.path}")
        return ResumePoint(found, weights_only=True)
    return None


def _find(config: Config, folder: CheckpointFolder, step: int | None) -> Intact | None:
    flags = config.checkpoint
    return newest_intact(
        folder,
        step=step,
        fall_back=flags.on_corrupt_checkpoint == "fallback",
        report=lambda message: print_rank_0(f"WARNING: {message}"),
        contents=flags.checkpoint_verification == "full",
    )


def require_save_folder(config: Config) -> None:
    """Refuse a `--save` that can't be written before any work is done; a collective call.

    Raises:
        DataError: on every rank.
    """
    folder = config.checkpoint.save
    if folder is not None:
        agree(lambda: require_writable_folder(Path(folder), "--save"))


# --- saving ---------------------------------------------------------------------------------------


@dataclass
class _InFlight:
    """A save that goes on beside training.

    Attributes:
        save: the save.
        thread: what this rank does for it; None where only rank 0 has still to do.
        written: every rank has written its files.
    """

    save: ShardedSave
    thread: threading.Thread | None
    written: bool = False


@dataclass
class CheckpointSaver:
    """Writes a run's checkpoints.

    All methods are collective calls.

    Attributes:
        config: the run's configuration.
        step: model, optimizer and schedules.
        data_state: gives `Splits.state_dict()` at this moment.
        report: told about saves, on every rank.
        saved_iteration: of the last checkpoint that was begun; None before the first.
        blocked_seconds: time that saves have kept training waiting.
    """

    config: Config
    step: TrainStep
    data_state: Callable[[], dict[str, Any]]
    report: Callable[[str], None] = print_rank_0
    saved_iteration: int | None = None
    blocked_seconds: float = 0.0
    _plans: SavePlans = field(default_factory=SavePlans)
    _buffers: SnapshotBuffers = field(default_factory=SnapshotBuffers)
    _validated: bool = False
    _in_flight: _InFlight | None = None

    def __post_init__(self) -> None:
        self.step.before_update = self.release

    @property
    def folder(self) -> CheckpointFolder:
        """Where checkpoints go."""
        assert self.config.checkpoint.save is not None
        return CheckpointFolder(Path(self.config.checkpoint.save))

    @property
    def in_flight(self) -> bool:
        """Whether an asynchronous save is to be settled; the same on every rank."""
        return self._in_flight is not None

    @property
    def is_writing(self) -> bool:
        """Whether this rank still writes files of an asynchronous save."""
        thread = self._in_flight.thread if self._in_flight is not None else None
        return thread is not None and thread.is_alive()

    def save(self, progress: Progress) -> None:
        """Save the run as it is after a step.

        Raises:
            TrainingError: it can't be written, with `--on-save-failure stop`.
        """
        self.wait()  # counts its own time
        start = time.perf_counter()
        asynchronous = self.config.checkpoint.async_save
        iteration = progress.iteration
        try:
            on_rank_0(self.folder.prepare, iteration)
            with gathered_parameters(self.step.model):
                save = self._begin(progress)
            if asynchronous:
                self._in_flight = _InFlight(save, _started(save.write))
            else:
                save.write()
                save.gather()
                if torch.distributed.get_rank() == 0:
                    save.complete(self._publish)
                save.settle()
        except SaveError as error:
            self._failed(iteration, error)
        self.saved_iteration = iteration
        seconds = time.perf_counter() - start
        self.blocked_seconds += seconds
        if asynchronous:
            self.report(f"  saving checkpoint at iteration {iteration} in the background")
        else:
            self.report(f"  saved checkpoint at iteration {iteration} in {seconds:.2f} s")

    def release(self) -> None:
        """Return once weights and optimizer may change."""
        if self._in_flight is None or self._in_flight.save.snapshot is None:
            return
        start = time.perf_counter()
        self._in_flight.save.snapshot.wait()
        self.blocked_seconds += time.perf_counter() - start

    def wait(self) -> None:
        """End an asynchronous save, however long it takes."""
        while self._in_flight is not None:
            self.advance()

    def advance(self) -> None:
        """Take an asynchronous save on, once no rank writes: to its name, then to its end."""
        in_flight = self._in_flight
        if in_flight is None:
            return
        start = time.perf_counter()
        save = in_flight.save
        if in_flight.thread is not None:
            in_flight.thread.join()
        if not in_flight.written:
            save.gather()
            first = torch.distributed.get_rank() == 0
            thread = _started(save.complete, self._publish) if first else None
            self._in_flight = _InFlight(save, thread, written=True)
        else:
            self._in_flight = None
            try:
                save.settle()
                self.report(f"  saved checkpoint at iteration {save.iteration}")
            except SaveError as error:
                self._failed(save.iteration, error)
        self.blocked_seconds += time.perf_counter() - start

    def _begin(self, progress: Progress) -> ShardedSave:
        flags = self.config.checkpoint
        sharded, alike = save_preprocess(
            state.sharded_state(self.config, self.step), not self._validated
        )
        self._validated = True
        if flags.ckpt_fully_parallel_save and self._plans.parallel_group is None:
            self._plans.parallel_group = parallel_state.get_data_parallel_group(
                with_context_parallel=True
            )
        save = ShardedSave(
            self.folder.temporary(progress.iteration),
            progress.iteration,
            self._small(progress, alike),
            self._snapshot() if flags.async_save else None,
        )
        save.begin(sharded, self._plans)
        return save

    def _snapshot(self) -> Snapshot:
        return Snapshot(self._buffers, state.changed_by_updates_alone(self.step))

    def _small(self, progress: Progress, alike: dict[str, Any]) -> dict[str, bytes]:
        """Contents of the files that rank 0 writes."""
        data = self.data_state()
        if torch.distributed.get_rank() != 0:
            return {}
        arguments = state.flat_arguments(self.config)
        common = alike | state.common_state(
            self.config, arguments, self.step, progress.iteration, progress.consumed_samples, data
        )
        common["evaluation_pending"] = progress.evaluation_pending
        common["bad_batches"] = progress.bad_batches
        buffer = io.BytesIO()
        torch.save(common, buffer)
        return {COMMON: buffer.getvalue(), ARGUMENTS: json.dumps(arguments, indent=1).encode()}

    def _publish(self, iteration: int) -> None:
        folder = self.folder
        folder.publish(iteration)
        interval = self.config.checkpoint.save_retain_interval
        for old in superseded(folder.iterations(), iteration, interval):
            folder.remove(old)

    def _failed(self, iteration: int, error: SaveError) -> None:
        if torch.distributed.get_rank() == 0:
            self.folder.discard(iteration)
        message = f"checkpoint of iteration {iteration} could not be written: {error}"
        if self.config.checkpoint.on_save_failure == "stop":
            raise TrainingError(
                f"{message}; make room or give the folder to this user, and restart; "
                "--on-save-failure continue would have trained on"
            )
        self.report(f"WARNING: {message}; training goes on (--on-save-failure continue)")


def _started(action: Callable[..., None], *args: Any) -> threading.Thread:
    """A thread that does something and holds no process back from its end."""
    thread = threading.Thread(target=action, args=args, name="checkpoint", daemon=True)
    thread.start()
    return thread
