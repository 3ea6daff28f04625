"""How far a run is, and the data it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.packed.arguments import Config
from megatron.packed.training.batches import MicroBatchIterator


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        iteration: finished iterations.
        consumed_samples: samples trained on by all ranks.
        data: `Splits.state_dict()` at that point, where training goes on; None plans what was
            consumed again.
        evaluation_pending: the run was ended before the evaluation that was due.
        bad_batches: those left out for a NaN or Inf (`--skip-bad-batches`).
    """

    iteration: int = 0
    consumed_samples: int = 0
    data: dict[str, Any] | None = None
    evaluation_pending: bool = False
    bad_batches: int = 0


@dataclass(frozen=True)
class HeldOut:
    """Micro-batches to evaluate on.

    Attributes:
        key: in saved states, such as `valid`.
        name: in logs, such as `validation`.
        batches: micro-batches of this rank.
        iterations: global batches of one evaluation.
    """

    key: str
    name: str
    batches: MicroBatchIterator
    iterations: int


@dataclass(frozen=True)
class Splits:
    """Micro-batches of each split.

    Attributes:
        train: of training.
        valid: sets to validate on, one by one; empty where there is none.
        test: for the test after training; empty where there is none.
    """

    train: MicroBatchIterator
    valid: tuple[HeldOut, ...] = ()
    test: tuple[HeldOut, ...] = ()

    def iterators(self) -> dict[str, MicroBatchIterator]:
        """All micro-batches, by the key of their state."""
        held_out = {each.key: each.batches for each in (*self.valid, *self.test)}
        return {"train": self.train, **held_out}

    def state_dict(self) -> dict[str, Any]:
        """Where each split goes on, for `Progress.data`: small, plain, the same for any layout.

        Take it between steps. Ranks that read no data lack the packers' states: save rank 0's.
        """
        return {name: batches.state_dict() for name, batches in self.iterators().items()}


def evaluation_config(config: Config) -> Config:
    """What evaluations run with: the configuration with their batch sizes for training's."""
    evaluation = config.evaluation
    return config.with_values(
        {
            "global_batch_size": evaluation.eval_global_batch_size,
            "micro_batch_size": evaluation.eval_micro_batch_size,
        }
    )
