"""Where scalars go: TensorBoard and Weights & Biases, on rank 0."""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron.packed.arguments import Config
from megatron.packed.errors import ConfigurationError, DataError


class ScalarWriter(Protocol):
    """Something that keeps named curves."""

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Add a point."""

    def close(self) -> None:
        """Write out what is held back."""


class _WandbWriter:
    """A Weights & Biases run."""

    def __init__(self, config: Config) -> None:
        import wandb

        logging = config.logging
        settings = {
            name: dataclasses.asdict(getattr(config, name))
            for name in ("model", "parallel", "training", "optimization", "data", "packing")
        }
        self._run = wandb.init(
            project=logging.wandb_project,
            name=logging.wandb_exp_name,
            entity=logging.wandb_entity or None,
            dir=logging.wandb_save_dir or None,
            config=settings,
        )

    def add_scalar(self, name: str, value: float, step: int) -> None:
        # Steps of a run must not fall, and all curves share them: iterations, never samples.
        if not name.endswith(" vs samples"):
            self._run.log({name: value}, step=step)

    def close(self) -> None:
        self._run.finish()


@dataclass
class ScalarWriters:
    """Every open writer of this process; does nothing where none is open."""

    writers: list[Any] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.writers)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Add a point to a curve everywhere."""
        for writer in self.writers:
            writer.add_scalar(name, value, step)

    def add_text(self, name: str, text: str, step: int) -> None:
        """Keep a text, where that is possible."""
        for writer in self.writers:
            if hasattr(writer, "add_text"):
                writer.add_text(name, text, step)

    def close(self) -> None:
        """Write out what is held back."""
        for writer in self.writers:
            writer.close()


def check_writers(config: Config) -> None:
    """Check, on every rank and before training, that the writers of rank 0 can be opened.

    Raises:
        ConfigurationError: the wandb package is missing.
    """
    if config.logging.wandb_project and importlib.util.find_spec("wandb") is None:
        raise ConfigurationError(
            f"--wandb-project {config.logging.wandb_project}: the package wandb isn't installed; "
            "install megatron-packed[wandb] or leave the flag out"
        )


def open_writers(config: Config, rank: int) -> ScalarWriters:
    """Open what the flags ask for, on rank 0.

    Raises:
        ConfigurationError: a package is missing.
        DataError: the TensorBoard folder can't be written.
    """
    check_writers(config)
    opened = ScalarWriters()
    if rank != 0:
        return opened
    folder = config.logging.tensorboard_dir
    if folder is not None:
        from torch.utils.tensorboard import SummaryWriter

        try:
            writer = SummaryWriter(log_dir=folder, max_queue=config.logging.tensorboard_queue_size)
        except OSError as error:
            raise DataError(
                f"--tensorboard-dir {folder}: can't be written ({error.strerror}); choose another "
                "folder or leave the flag out"
            ) from error
        opened.writers.append(writer)
    if config.logging.wandb_project:
        opened.writers.append(_WandbWriter(config))
    return opened
