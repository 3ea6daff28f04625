"""Put a run together: model, optimizer, data, log."""

from __future__ import annotations

import os

import torch

from megatron.packed.arguments import Config, config_report, replacement_report
from megatron.packed.data.blends import training_datasets
from megatron.packed.data.fim import add_fim_tokens
from megatron.packed.data.tokenizer_base import PackedTokenizer
from megatron.packed.data.tokenizers import build_tokenizer, padded_vocab_size
from megatron.packed.errors import ConfigurationError
from megatron.packed.loss.calculation import LossCalculationHelper
from megatron.packed.model.builder import build_model, count_parameters
from megatron.packed.model.transformer_config import params_dtype
from megatron.packed.training.checkpointing import (
    CheckpointSaver,
    find_resume_point,
    require_save_folder,
)
from megatron.packed.training.data import build_splits
from megatron.packed.training.document_losses import DocumentLosses, DocumentLossFile
from megatron.packed.training.environment import Environment, print_rank_0
from megatron.packed.training.flops import FlopsCounter, measure_gemm_peak
from megatron.packed.training.garbage import GarbageCollection
from megatron.packed.training.loop import (
    Trainer,
    start_microbatch_calculator,
    step_shape,
)
from megatron.packed.training.optimization import build_optimizer, build_scheduler
from megatron.packed.training.progress import Progress
from megatron.packed.training.reporting import Reporter
from megatron.packed.training.reruns import Reruns
from megatron.packed.training.signals import SignalWatch
from megatron.packed.training.step import ForwardStep, TrainStep
from megatron.packed.training.timers import start_timers
from megatron.packed.training.watch import RunWatch
from megatron.packed.training.writers import ScalarWriters, open_writers


def print_banner(config: Config, environment: Environment) -> None:
    """Print what runs where, what was asked for, and what is replaced on this hardware."""
    parallel = config.parallel
    print_rank_0(
        f"megatron-packed on {environment.accelerator.description}; world size "
        f"{parallel.world_size}: tensor {parallel.tensor_model_parallel_size}, pipeline "
        f"{parallel.pipeline_model_parallel_size}, context {parallel.context_parallel_size}, "
        f"data {parallel.data_parallel_size}"
    )
    for report in (config_report(config), replacement_report(config)):
        if report:
            print_rank_0(report)


def padded_vocab(config: Config, tokenizer: PackedTokenizer) -> int:
    """Rows of the embedding, over all tensor-parallel ranks.

    Raises:
        ConfigurationError: the rows that were asked for can't hold the tokenizer's ids.
    """
    tensor = config.parallel.tensor_model_parallel_size
    ids, asked = tokenizer.vocab_size, config.data.padded_vocab_size
    if asked is not None and asked < ids:
        raise ConfigurationError(
            f"--padded-vocab-size {asked}: must hold the {ids} ids of the tokenizer; raise it or "
            "leave it out"
        )
    if asked is None and not config.data.pad_vocab_size:
        asked = ids
        if ids % tensor:
            raise ConfigurationError(
                f"--no-pad-vocab-size: the tokenizer's {ids} ids must be a multiple of "
                f"--tensor-model-parallel-size {tensor}; leave it out"
            )
    if asked is not None:
        return asked
    return padded_vocab_size(ids, config.model.make_vocab_size_divisible_by, tensor)


def build_forward_step(config: Config) -> ForwardStep:
    """What a run makes of per-token losses, and which of them it keeps."""
    flags = config.loss
    return ForwardStep(
        loss=LossCalculationHelper(
            weighted=flags.is_weighted,
            datasets=training_datasets(config.data) if flags.loss_by_dataset else (),
            keep_document_sums=flags.log_document_losses > 0,
            mtp_depths=flags.mtp_depths,
        ),
        documents=DocumentLosses(flags.log_document_losses) if flags.log_document_losses else None,
    )


def build_step(config: Config, environment: Environment, tokenizer: PackedTokenizer) -> TrainStep:
    """Build this rank's model and optimizer, ready to step.

    Args:
        config: a validated configuration.
        environment: what this process stands on.
        tokenizer: gives the size of the vocabulary.
    """
    model, transformer_config = build_model(
        config,
        environment.accelerator,
        vocab_size=tokenizer.vocab_size,
        padded_vocab_size=padded_vocab(config, tokenizer),
    )
    print_rank_0(f"parameters: {count_parameters(model, environment.accelerator.device):,}")
    optimizer = build_optimizer(config, model, environment.accelerator)
    start_timers(config, transformer_config, optimizer)
    return TrainStep(
        model=model,
        optimizer=optimizer,
        scheduler=build_scheduler(config, optimizer),
        transformer_config=transformer_config,
        shape=step_shape(config, transformer_config),
        device=environment.accelerator.device,
        check_for_nan=config.training.check_for_nan_in_loss_and_grad,
        forward=build_forward_step(config),
        error_on_empty=config.loss.on_empty_batch == "error",
        reruns=Reruns.of(config, model),
        adapts_loss_scale=config.training.fp16 and config.optimizer_options.loss_scale is None,
    )


def _build_reporter(
    config: Config,
    environment: Environment,
    writers: ScalarWriters,
    tokenizer: PackedTokenizer,
    documents: DocumentLosses | None,
) -> Reporter:
    size = 8192 if environment.accelerator.name == "cuda" else 1024
    # All ranks measure at once: they share the machine in training too.
    torch.distributed.barrier()
    peak = measure_gemm_peak(environment.accelerator.device, params_dtype(config), size=size)
    return Reporter(
        config=config,
        flops=FlopsCounter.from_config(config, padded_vocab(config, tokenizer)),
        gemm_peak=peak,
        writers=writers,
        device=environment.accelerator.device,
        documents=documents,
        document_file=_document_file(config, environment) if documents is not None else None,
    )


def _document_file(config: Config, environment: Environment) -> DocumentLossFile:
    path = config.loss.document_losses_path
    if path is None:
        assert config.logging.tensorboard_dir is not None  # by a rule on flags
        path = os.path.join(config.logging.tensorboard_dir, "document_losses.jsonl")
    file = DocumentLossFile(path, training_datasets(config.data))
    if environment.is_first_rank:
        file.check()
    return file


def build_trainer(
    config: Config, environment: Environment, signals: SignalWatch | None = None
) -> Trainer:
    """Build everything a run needs, checking all input before the first step.

    Args:
        config: a validated configuration.
        environment: what this process stands on.
        signals: knows whether the run was asked to end; None where signals end it at once.

    Returns:
        A trainer, ready to train.

    Raises:
        ConfigurationError: flags that can't be honoured.
        DataError: corpora, tokenizer or folders that can't be used.
    """
    writers = open_writers(config, environment.rank)
    tokenizer, added = add_fim_tokens(config, build_tokenizer(config.data))
    if added:
        print_rank_0(f"--fim-data adds to the vocabulary: {' '.join(added)}")
    print_rank_0(f"vocabulary: {tokenizer.vocab_size}, padded to {padded_vocab(config, tokenizer)}")
    start_microbatch_calculator(config)
    require_save_folder(config)
    resume = find_resume_point(config, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
    progress = resume.progress if resume else Progress()
    splits = build_splits(config, environment, tokenizer, progress)
    step = build_step(config, environment, tokenizer)
    if resume is not None:
        resume.restore(config, step)
    step.skips_left = max(config.faults.skip_bad_batches - progress.bad_batches, 0)
    reporter = _build_reporter(config, environment, writers, tokenizer, step.forward.documents)
    saver = None
    if config.checkpoint.save:
        saved = progress.iteration if resume and not resume.weights_only else None
        saver = CheckpointSaver(config, step, splits.state_dict, saved_iteration=saved)
    garbage = GarbageCollection.from_config(config)
    return Trainer(
        config,
        environment,
        step,
        splits,
        reporter,
        progress,
        saver,
        signals,
        garbage,
        RunWatch.of(config, environment.accelerator.device),
    )
