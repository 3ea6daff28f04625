"""megatron-core's own timers of the phases of an iteration: `--timing-log-level`."""

from __future__ import annotations

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.timers import Timers
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.packed.arguments import Config

# Every rank asks for all of them, in one order: each has only those of its pipeline stage.
PHASES = (
    "forward-backward",
    "forward-compute",
    "backward-compute",
    "all-grads-sync",
    "conditional-embedder-grads-all-reduce",
    "non-tensor-parallel-grads-all-reduce",
    "embedding-grads-all-reduce",
    "params-all-gather",
    "optimizer-copy-to-main-grad",
    "optimizer-unscale-and-check-inf",
    "optimizer-clip-main-grad",
    "optimizer-count-zeros",
    "optimizer-inner-step",
    "optimizer-copy-main-to-model-params",
)


def start_timers(
    config: Config, transformer_config: TransformerConfig, optimizer: MegatronOptimizer
) -> None:
    """Let megatron-core's schedules and optimizer time themselves, where a level asks for it.

    Args:
        config: the run's configuration.
        transformer_config: what schedules read their timers from.
        optimizer: reads them from its own configuration.
    """
    level = config.logging.timing_log_level
    if not level:
        return
    timers = Timers(level, config.logging.timing_log_option)
    transformer_config.timers = timers
    for member in getattr(optimizer, "chained_optimizers", [optimizer]):
        member.config.timers = timers


def timers_report(transformer_config: TransformerConfig, iterations: int) -> str | None:
    """Return what was timed since the last report, per iteration; a collective call.

    Args:
        transformer_config: holds the timers, or None.
        iterations: of the report.
    """
    timers = transformer_config.timers
    if timers is None:
        return None
    return timers.get_all_timers_string(list(PHASES), normalizer=float(iterations))
