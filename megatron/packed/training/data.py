"""Datasets to micro-batch iterators of this rank, for training, validation and test."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core import parallel_state

from megatron.packed.arguments import Config
from megatron.packed.data.builders import Datasets, build_datasets
from megatron.packed.data.loader import build_loader
from megatron.packed.data.samplers import build_sampler
from megatron.packed.data.tokenizers import PackedTokenizer
from megatron.packed.data.validation import SampleCounts
from megatron.packed.packing.sequence import PackSequence
from megatron.packed.training.batches import BatchSource, MicroBatchIterator, build_collator
from megatron.packed.training.environment import Environment, print_rank_0
from megatron.packed.training.loop import Progress, Splits
from megatron.packed.training.packs import (
    DocumentCollator,
    ReplicaShare,
    build_pack_batches,
    build_packer,
    describe,
)
from megatron.packed.training.sharing import HostBatch


def sample_counts(config: Config) -> SampleCounts:
    """Rows or packs that a run reads from each split, counted as upstream counts them."""
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

    def batches(split: str, dataloader_type: str = "repeated") -> MicroBatchIterator | None:
        dataset = getattr(datasets, split)
        if dataset is None:
            return None
        state = (progress.data or {}).get(split, {})
        consumed = progress.consumed_samples if split == "train" else 0
        consumed = state.get("consumed_samples", consumed)
        share = _share(config)
        loader: Iterator[HostBatch] | None = None
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            collator = build_collator(config, tokenizer.eod)
            pinned = environment.accelerator.name == "cuda"
            workers = config.data.num_workers
            if isinstance(collator, DocumentCollator):
                packer = build_packer(config, dataset, tokenizer.vocab_size)
                print_rank_0(f"{split}: {describe(packer)}")
                packing = state.get("packing")
                sequence = PackSequence(packer, start=consumed, state=packing)
                loader = build_pack_batches(dataset, sequence, collator, share, workers, pinned)
            else:
                sampler = build_sampler(
                    dataloader_type,
                    len(dataset),
                    seed=config.training.seed,
                    consumed_samples=consumed,
                    micro_batch_size=share.micro_batch_size,
                    data_parallel_rank=share.data_parallel_rank,
                    data_parallel_size=share.data_parallel_size,
                )
                loader = build_loader(dataset, sampler, collator, workers, pinned)
        return MicroBatchIterator(
            BatchSource(loader, environment, block_diagonal=config.data.reset_attention_mask),
            samples_per_micro_batch=share.group_size,
            consumed_samples=consumed,
        )

    train = batches("train", config.data.dataloader_type)
    assert train is not None  # build_datasets refuses a run without one
    evaluates = config.evaluation.eval_iters > 0
    return Splits(
        train=train,
        valid=batches("valid") if evaluates else None,
        test=batches("test") if evaluates else None,
    )


def _share(config: Config) -> ReplicaShare:
    return ReplicaShare(
        micro_batch_size=config.training.micro_batch_size,
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
    )
