"""Corpus, tokenizer, packing, and what is logged where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.packed.arguments.declare import Replaced, derived, flag, required
from megatron.packed.arguments.fim import FimFields
from megatron.packed.arguments.tokenizer import TokenizerFields

STRATEGIES = (
    "rows",
    "next_fit",
    "best_fit_decreasing",
    "windowed_best_fit",
    "greedy_workload",
)

_CHECKED_CACHE = Replaced(
    why="index files are mapped in milliseconds, and checked against the corpora",
    used="the usual start",
    value=False,
    accelerators=("cpu", "cuda"),
)


@dataclass(frozen=True, kw_only=True)
class DataConfig(TokenizerFields, FimFields):
    """Where tokens come from and how a row is cut from them."""

    SECTION: ClassVar[str] = "data and dataloader"

    seq_length: int = required("Input tokens of one row.", at_least=1)
    data_path: tuple[str, ...] | None = flag(
        "Prefix of a preprocessed corpus (without .bin/.idx), several, or weight prefix pairs; "
        "--split cuts them into training, validation and test."
    )
    split: str | None = derived(
        "969,30,1 with --data-path, 1,1,1 with --mock-data",
        "Proportions of training, validation and test, as in 90,5,5.",
    )
    train_data_path: tuple[str, ...] | None = flag("Like --data-path, for training alone.")
    valid_data_path: tuple[str, ...] | None = flag("Like --data-path, for validation alone.")
    test_data_path: tuple[str, ...] | None = flag("Like --data-path, for the test alone.")
    data_args_path: str | None = flag("File that holds what --data-path would be given.")
    per_split_data_args_path: str | None = flag(
        "JSON file with keys train, valid and test: lists of what --train-data-path and its "
        "companions would be given."
    )
    per_dataset_sequences_path: str | None = flag(
        "JSON file of prefix to [sequences, document boundaries], which the corpora must have."
    )
    data_cache_path: str | None = flag("Folder for index files, kept between runs.")
    num_dataset_builder_threads: int = flag(
        "Threads that build the index files of a blend's corpora.", default=1, at_least=1
    )
    mid_level_dataset_surplus: float = flag(
        "Share of rows that a weighted blend builds beyond what it asks of each corpus.",
        default=0.005,
        at_least=0.0,
    )
    dataloader_fast_cache_load: bool = flag(
        "Trust index files in --data-cache-path without looking at the corpora.",
        default=False,
        replaced=_CHECKED_CACHE,
    )
    dataloader_defer_npy_index_mmap: bool = flag(
        "Map index files when they are first read.", default=False, replaced=_CHECKED_CACHE
    )
    object_storage_cache_path: str | None = flag(
        "Folder for index files of corpora in object storage.",
        refused="corpora are read from file systems alone; copy or mount them, and give the "
        "files' prefix as --data-path",
    )
    allow_ambiguous_pad_tokens: bool = flag(
        "Train on tokens that equal the pad id; always so, since padding is told by position.",
        default=False,
    )
    mock_data: bool = flag("Train on generated tokens.", default=False)
    mmap_bin_files: bool = flag(
        "Read .bin files instead of mapping them.",
        "--no-mmap-bin-files",
        default=True,
        negative=True,
    )
    num_workers: int = flag(
        "Data-loading processes; 0 loads in the training process.", default=2, at_least=0
    )
    dataloader_type: str = derived(
        "single",
        "single: every sample once, in order; cyclic: shuffled epochs.",
        choices=("single", "cyclic", "external"),
    )
    data_sharding: bool = flag(
        "Shuffle over all samples, not within a part of them for each rank; always so.",
        "--no-data-sharding",
        default=True,
        negative=True,
    )
    reset_position_ids: bool = flag(
        "Restart positions after each end of document; always so with --use-packed-sequence.",
        default=False,
    )
    reset_attention_mask: bool = flag(
        "No attention across documents; always so with --use-packed-sequence.", default=False
    )
    eod_mask_loss: bool = flag(
        "No loss at end-of-document positions; always so with --use-packed-sequence.",
        default=False,
    )

    @property
    def has_per_split_paths(self) -> bool:
        """Whether each split has a blend of its own."""
        paths = (self.train_data_path, self.valid_data_path, self.test_data_path)
        return any(paths) or self.per_split_data_args_path is not None

    @property
    def has_one_blend(self) -> bool:
        """Whether `--split` cuts one blend."""
        return bool(self.data_path) or self.data_args_path is not None


@dataclass(frozen=True, kw_only=True)
class PackingConfig:
    """Online packing of a micro-batch's documents into one sequence."""

    SECTION: ClassVar[str] = "packing"

    use_packed_sequence: bool = flag(
        "Cut the rows of each micro-batch at document ends and train on the segments as one pack.",
        default=False,
    )
    packing_alignment: str = flag(
        "Padding of packs: default pads only what the parallel layout needs, segment pads every "
        "segment, pack the pack's end alone. None changes the loss.",
        default="default",
        choices=("default", "segment", "pack"),
    )
    packing_strategy: str = flag(
        "What a pack is made of: rows of the corpus cut at document ends, or whole documents of "
        "at most --seq-length tokens, chosen by next_fit (in order), best_fit_decreasing (over a "
        "whole epoch), windowed_best_fit (over --packing-window documents) or greedy_workload "
        "(packs of equal work).",
        default="rows",
        choices=STRATEGIES,
    )
    packing_window: int = flag(
        "Documents that windowed_best_fit looks ahead.", default=4096, at_least=1
    )
    overlong_documents: str = flag(
        "What becomes of documents longer than --seq-length when documents are packed whole.",
        default="split",
        choices=("split", "truncate", "drop", "error"),
    )
    packed_sequence_capacity: int | None = flag(
        "Pad every pack to this many tokens, for static shapes; by default to the slots of a "
        "micro-batch.",
        at_least=1,
    )
    document_boundaries: str = derived(
        "eod with --packing-strategy rows, index otherwise",
        "Where documents end: at end-of-document tokens, or where the corpus's index says.",
        choices=("eod", "index"),
    )
    check_packing_metadata: bool = flag(
        "Before each step, compare packs' boundaries over all ranks of a model; for debugging.",
        default=False,
    )

    @property
    def packs_documents(self) -> bool:
        """Whether packs are made of whole documents instead of rows."""
        return self.use_packed_sequence and self.packing_strategy != "rows"


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What is reported, how often and to where."""

    SECTION: ClassVar[str] = "logging"

    log_interval: int = flag("Iterations between log lines.", default=100, at_least=1)
    log_throughput: bool = flag("Log model FLOP/s.", default=False)
    log_params_norm: bool = flag("Log the norm of the parameters.", default=False)
    log_num_zeros_in_grad: bool = flag("Log how many gradient entries are zero.", default=False)
    tensorboard_dir: str | None = flag("Folder for TensorBoard events.")
    tensorboard_log_interval: int = flag(
        "Iterations between TensorBoard entries.", default=1, at_least=1
    )
    tensorboard_queue_size: int = flag(
        "Entries TensorBoard holds before it writes.", default=1000, at_least=1
    )
    timing_log_level: int = flag(
        "0: no timers but the iteration's; 1: phases of an iteration; 2: forward and backward of "
        "every micro-batch, too.",
        default=0,
        at_least=0,
        at_most=2,
    )
    timing_log_option: str = flag(
        "Which ranks' timers are reported: the slowest, fastest and slowest, or all.",
        default="minmax",
        choices=("max", "minmax", "all"),
    )
    logging_level: int | None = flag(
        "Level of Python's logging, as in 10 for DEBUG, 40 for ERROR.", at_least=0
    )
    log_timers_to_tensorboard: bool = flag("Write timers to TensorBoard.", default=False)
    log_validation_ppl_to_tensorboard: bool = flag(
        "Write validation perplexity to TensorBoard.", default=False
    )
    log_memory_to_tensorboard: bool = flag("Write memory use to TensorBoard.", default=False)
    log_learning_rate_to_tensorboard: bool = flag(
        "Do not write the learning rate to TensorBoard.",
        "--no-log-learning-rate-to-tensorboard",
        default=True,
        negative=True,
    )
    log_world_size_to_tensorboard: bool = flag(
        "Write the world size to TensorBoard.", default=False
    )
    wandb_project: str = flag("Weights & Biases project; empty logs nothing there.", default="")
    wandb_entity: str = flag("Weights & Biases entity.", default="")
    wandb_exp_name: str = flag("Weights & Biases run name.", default="")
    wandb_save_dir: str = flag("Folder for Weights & Biases files.", default="")
