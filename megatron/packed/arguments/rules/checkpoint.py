"""Rules of checkpointing."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.packed.arguments.config import Config


def retention_keeps_what_is_saved(config: Config) -> Iterator[str]:
    """Only iterations that are saved can be kept."""
    retain, save = config.checkpoint.save_retain_interval, config.checkpoint.save_interval
    if retain is not None and (save is None or retain % save):
        saved = "not given" if save is None else save
        yield (
            f"--save-retain-interval {retain}: must be a multiple of --save-interval ({saved}), "
            "since only saved iterations can be kept"
        )


def one_source_of_schedules(config: Config) -> Iterator[str]:
    """Schedules follow the checkpoint or the command line."""
    flags = config.checkpoint
    if flags.override_opt_param_scheduler and flags.use_checkpoint_opt_param_scheduler:
        yield (
            "--override-opt_param-scheduler follows the command line, "
            "--use-checkpoint-opt_param-scheduler the checkpoint: give one of them"
        )


def a_step_needs_a_folder(config: Config) -> Iterator[str]:
    """--ckpt-step is an iteration of --load."""
    flags = config.checkpoint
    if flags.ckpt_step is not None and not flags.load:
        yield f"--ckpt-step {flags.ckpt_step}: needs --load, the folder to look in"


RULES = (retention_keeps_what_is_saved, one_source_of_schedules, a_step_needs_a_folder)
