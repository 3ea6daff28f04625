"""Datasets to micro-batch iterators of this rank, for training, validation and test."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state

from megatron.packed.arguments import Config
from megatron.packed.data.builders import Datasets, build_datasets
from megatron.packed.data.loader import build_loader
from megatron.packed.data.samplers import build_sampler
from megatron.packed.data.tokenizers import PackedTokenizer
from megatron.packed.data.validation import SampleCounts
from megatron.packed.training.batches import BatchSource, MicroBatchIterator, build_collator
from megatron.packed.training.environment import Environment
from megatron.packed.training.loop import Progress, Splits


def sample_counts(config: Config) -> SampleCounts:
    """Rows that a run reads from each split, counted as upstream counts them."""
    training, evaluation = config.training, config.evaluation
    batch = training.global_batch_size
    # One evaluation each interval, and one after training.
    evaluations = training.train_iters // evaluation.eval_interval + 1
    return SampleCounts(
        train=training.train_iters * batch,
        valid=evaluations * evaluation.eval_iters * batch,
        test=evaluation.eval_iters * batch,
    )


def build_splits(
    config: Config,
    environment: Environment,
    tokenizer: PackedTokenizer,
    progress: Progress,
) -> Splits:
    """Build this rank's micro-batches of every split.

    Args:
        config: the run's configuration.
        environment: what this process stands on.
        tokenizer: the run's tokenizer.
        progress: where training goes on.

    Raises:
        DataError: the corpora don't fit the run.
    """
    datasets: Datasets = build_datasets(config, tokenizer, sample_counts(config))

    def iterator(dataset: Any, consumed: int, dataloader_type: str) -> MicroBatchIterator:
        return _micro_batches(config, environment, tokenizer, dataset, consumed, dataloader_type)

    evaluates = config.evaluation.eval_iters > 0
    return Splits(
        train=iterator(datasets.train, progress.consumed_samples, config.data.dataloader_type),
        valid=iterator(datasets.valid, 0, "single") if datasets.valid and evaluates else None,
        test=iterator(datasets.test, 0, "single") if datasets.test and evaluates else None,
    )


def _micro_batches(
    config: Config,
    environment: Environment,
    tokenizer: PackedTokenizer,
    dataset: Any,
    consumed_samples: int,
    dataloader_type: str,
) -> MicroBatchIterator:
    loader = None
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        sampler = build_sampler(
            dataloader_type,
            len(dataset),
            seed=config.training.seed,
            consumed_samples=consumed_samples,
            micro_batch_size=config.training.micro_batch_size,
            data_parallel_rank=parallel_state.get_data_parallel_rank(),
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
        )
        loader = build_loader(
            dataset,
            sampler,
            build_collator(config, tokenizer.eod),
            num_workers=config.data.num_workers,
            pin_memory=environment.accelerator.name == "cuda",
        )
    return MicroBatchIterator(
        BatchSource(loader, environment, block_diagonal=config.data.reset_attention_mask),
        consumed_samples=consumed_samples,
    )
