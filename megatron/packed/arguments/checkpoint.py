"""What is saved, when, and how a run goes on from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.packed.arguments.declare import Replaced, flag

EVERYWHERE = ("cpu", "cuda")
OWN_FORMAT = "torch_dist"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is saved, when, and how a run goes on from it."""

    SECTION: ClassVar[str] = "checkpointing"

    save: str | None = flag("Folder that checkpoints are written to.")
    save_interval: int | None = flag(
        "Iterations between checkpoints.",
        "--save-interval",
        "--persistent-save-interval",
        at_least=1,
    )
    save_retain_interval: int | None = flag(
        "Iterations between checkpoints that are kept; others go once a newer one is whole. "
        "By default all are kept.",
        at_least=1,
    )
    no_save_optim: bool = flag("Save no optimizer state.", default=False)
    no_save_rng: bool = flag("Save no states of random generators.", default=False)
    load: str | None = flag("Folder to go on from; without checkpoints the run starts anew.")
    no_load_optim: bool = flag("Load no optimizer state.", default=False)
    no_load_rng: bool = flag("Load no states of random generators.", default=False)
    pretrained_checkpoint: str | None = flag(
        "Folder to take weights from when --load has no checkpoint yet."
    )
    ckpt_step: int | None = flag(
        "Iteration to load, in place of the one the tracker file names.", at_least=0
    )
    finetune: bool = flag(
        "Take weights only: iteration, optimizer, generators and data start anew.", default=False
    )
    exit_on_missing_checkpoint: bool = flag(
        "End with an error when --load has no checkpoint.", default=False
    )
    use_checkpoint_args: bool = flag(
        "Take the model's flags from the checkpoint in --load.", default=False
    )
    use_tokenizer_model_from_checkpoint_args: bool = flag(
        "Keep --tokenizer-model with --use-checkpoint-args, whatever the checkpoint says.",
        "--no-use-tokenizer-model-from-checkpoint-args",
        "--disable-use-tokenizer-model-from-checkpoint-args",
        default=True,
        negative=True,
    )
    use_mp_args_from_checkpoint_args: bool = flag(
        "Take tensor- and pipeline-parallel sizes from the checkpoint, too.", default=False
    )
    override_opt_param_scheduler: bool = flag(
        "Schedules follow the command line, not the checkpoint.",
        "--override-opt_param-scheduler",
        "--override-opt-param-scheduler",
        default=False,
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        "Schedules follow the checkpoint, not the command line.",
        "--use-checkpoint-opt_param-scheduler",
        "--use-checkpoint-opt-param-scheduler",
        default=False,
    )
    ckpt_format: str = flag(
        "Format of checkpoints.",
        default=OWN_FORMAT,
        choices=("torch", OWN_FORMAT, "zarr", "torch_dcp", "fsdp_dtensor"),
        replaced=Replaced(
            "one format that any layout loads", OWN_FORMAT, OWN_FORMAT, accelerators=EVERYWHERE
        ),
    )
    auto_detect_ckpt_format: bool = flag(
        "Look at a checkpoint to learn its format; always so.", default=False
    )
    async_save: bool = flag("Write checkpoints while training goes on.", default=False)
    async_strategy: str = flag(
        "Who writes asynchronous checkpoints.",
        default="nvrx",
        choices=("nvrx", "mcore"),
        replaced=Replaced("a thread of the rank writes", "a thread", accelerators=EVERYWHERE),
    )
    use_persistent_ckpt_worker: bool = flag(
        "Keep the writing process between checkpoints.",
        default=False,
        replaced=Replaced(
            "a thread of the rank writes", "a thread", False, accelerators=EVERYWHERE
        ),
    )
    async_ckpt_use_cpu_shm: bool = flag(
        "Hand tensors to the writing process through shared memory.",
        default=False,
        replaced=Replaced(
            "a thread of the rank writes", "its own memory", False, accelerators=EVERYWHERE
        ),
    )
    ckpt_fully_parallel_save: bool = flag(
        "Do not divide the writing among data-parallel ranks.",
        "--no-ckpt-fully-parallel-save",
        default=True,
        negative=True,
    )
    ckpt_fully_parallel_save_deprecated: bool = flag(
        "Divide the writing among data-parallel ranks; the default.",
        "--ckpt-fully-parallel-save",
        default=False,
    )
    ckpt_fully_parallel_load: bool = flag(
        "Divide the reading among data-parallel ranks.",
        default=False,
        replaced=Replaced(
            "every rank reads its own shards", "direct reads", False, accelerators=EVERYWHERE
        ),
    )
    ckpt_assume_constant_structure: bool = flag(
        "Agree on who writes what once; always so, and checked at every save.", default=False
    )
    dist_ckpt_strictness: str = flag(
        "What to do when model and checkpoint hold different tensors.",
        default="assume_ok_unexpected",
        choices=(
            "assume_ok_unexpected",
            "log_unexpected",
            "log_all",
            "raise_unexpected",
            "raise_all",
            "ignore_all",
        ),
    )
    dist_ckpt_optim_fully_reshardable: bool = flag(
        "Save the distributed optimizer for any layout; always so.", default=False
    )
    verify_integrity: bool = flag(
        "Read checkpoints whole and compare digests before loading; the default.", default=False
    )
    checkpoint_verification: str = flag(
        "What is compared with the manifest before a checkpoint is loaded: every byte, or sizes.",
        default="full",
        choices=("full", "sizes"),
    )
    on_corrupt_checkpoint: str = flag(
        "When a checkpoint is damaged: take the newest intact one, or end.",
        default="fallback",
        choices=("fallback", "error"),
    )
    on_save_failure: str = flag(
        "When a checkpoint can't be written: train on, or end.",
        default="stop",
        choices=("continue", "stop"),
    )
