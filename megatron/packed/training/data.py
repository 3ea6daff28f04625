"""Datasets to micro-batch iterators of this rank, for training, validation and test."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core import parallel_state

from megatron.packed.arguments import Config
from megatron.packed.arguments.batch_sizes import batch_sizes
from megatron.packed.attention.magi import MagiEngine
from megatron.packed.data.builders import Datasets, build_datasets
from megatron.packed.data.document_corpus import DocumentCorpus
from megatron.packed.data.loader import build_loader
from megatron.packed.data.samplers import MicroBatchSampler, build_sampler
from megatron.packed.data.tokenizer_base import PackedTokenizer
from megatron.packed.data.validation import SampleCounts
from megatron.packed.errors import ConfigurationError
from megatron.packed.model.attention_engine import magi_engine
from megatron.packed.packing import DocumentPack, DocumentPacker
from megatron.packed.packing.sequence import PackSequence
from megatron.packed.training.batches import BatchSource, MicroBatchIterator
from megatron.packed.training.collation import Collator, build_collator
from megatron.packed.training.environment import Environment, print_rank_0
from megatron.packed.training.packs import (
    PackReader,
    PaddedReader,
    ReplicaShare,
    WholePackSampler,
    build_pack_batches,
    build_packer,
    describe,
)
from megatron.packed.training.progress import HeldOut, Progress, Splits, evaluation_config
from megatron.packed.training.sharing import HostBatch, first_on_rank_0


def sample_counts(config: Config) -> SampleCounts:
    """Rows or packs that a run reads from each split, counted as upstream counts them."""
    training, evaluation = config.training, config.evaluation
    batch = evaluation.eval_global_batch_size
    # One evaluation each interval, and one after training.
    evaluations = training.train_iters // evaluation.eval_interval + 1
    wanted = evaluations * evaluation.eval_iters * batch
    return SampleCounts(
        train=batch_sizes(config).samples(training.train_iters),
        valid=None if evaluation.full_validation else wanted,
        test=evaluation.eval_iters * batch,
    )


@dataclass(frozen=True)
class _SplitBuilder:
    """Builds this rank's micro-batches of one dataset after the other.

    Attributes:
        config: the run's configuration.
        environment: what this process stands on.
        tokenizer: the run's tokenizer.
        saved: where splits go on, by the key of their state.
        magi: cuts packs by the package of that name; None where workers cut them.
    """

    config: Config
    environment: Environment
    tokenizer: PackedTokenizer
    saved: dict[str, Any]
    magi: MagiEngine | None = None

    def train(self, dataset: Any, consumed: int) -> MicroBatchIterator:
        """Micro-batches of training, from the consumed samples on."""
        kind = self.config.data.dataloader_type
        return self._batches(self.config, "train", dataset, kind, consumed)

    def held_out(self, key: str, name: str, dataset: Any) -> HeldOut:
        """Micro-batches that go on from one evaluation to the next."""
        config = evaluation_config(self.config)
        batches = self._batches(config, key, dataset, "repeated", 0)
        return HeldOut(key, name, batches, config.evaluation.eval_iters)

    def whole(self, key: str, name: str, dataset: Any) -> HeldOut:
        """Micro-batches of a whole dataset, from its start on each time."""
        config = evaluation_config(self.config)
        batch = config.training.global_batch_size
        packs: list[DocumentPack] = []
        source = dataset
        if isinstance(dataset, DocumentCorpus):
            packer = build_packer(config, dataset, self.tokenizer.vocab_size)
            packs, source = packer.epoch_packs(), self._reader(dataset, packer)
        count = len(packs) or len(dataset)
        share, reads = _share(config), self._reads()
        collator = self._collator(config) if reads else None

        def reopen() -> Iterator[HostBatch] | None:
            if collator is None:
                return None
            sampler: Any = WholePackSampler(packs, batch, share)
            if not packs:
                sampler = self._row_sampler("whole", count, 0, share, batch)
            return build_loader(source, sampler, collator, *self._loading())

        batches = self._iterator(reopen(), share, 0)
        batches.reopen = reopen
        return HeldOut(key, name, batches, -(-count // batch))

    def _batches(
        self, config: Config, key: str, dataset: Any, kind: str, consumed: int
    ) -> MicroBatchIterator:
        state = self.saved.get(key, {})
        consumed = state.get("consumed_samples", consumed)
        share = _share(config)
        loader: Iterator[HostBatch] | None = None
        if self._reads():
            collator = self._collator(config)
            if isinstance(dataset, DocumentCorpus):
                packer = build_packer(config, dataset, self.tokenizer.vocab_size)
                print_rank_0(f"{key}: {describe(packer)}")
                sequence = PackSequence(packer, start=consumed, state=state.get("packing"))
                reader = self._reader(dataset, packer)
                loader = build_pack_batches(reader, sequence, collator, share, *self._loading())
            else:
                sampler = self._row_sampler(kind, len(dataset), consumed, share)
                loader = build_loader(dataset, sampler, collator, *self._loading())
        return self._iterator(loader, share, consumed)

    def _collator(self, config: Config) -> Collator:
        return build_collator(config, self.tokenizer.eod, whole_packs=self.magi is not None)

    def _reader(self, corpus: DocumentCorpus, packer: DocumentPacker) -> PackReader | PaddedReader:
        if self.config.packing.use_packed_sequence:
            return PackReader.of_packer(corpus, packer)
        return PaddedReader(corpus, self.config.data.seq_length, self.tokenizer.pad)

    def _reads(self) -> bool:
        return parallel_state.get_tensor_model_parallel_rank() == 0

    def _loading(self) -> tuple[int, bool]:
        return self.config.data.num_workers, self.environment.accelerator.name == "cuda"

    def _row_sampler(
        self, kind: str, count: int, consumed: int, share: ReplicaShare, whole_batch: int = 1
    ) -> MicroBatchSampler:
        return build_sampler(
            kind,
            count,
            seed=self.config.training.seed,
            consumed_samples=consumed,
            micro_batch_size=share.micro_batch_size,
            data_parallel_rank=share.data_parallel_rank,
            data_parallel_size=share.data_parallel_size,
            whole_batch=whole_batch,
        )

    def _iterator(
        self, loader: Iterator[HostBatch] | None, share: ReplicaShare, consumed: int
    ) -> MicroBatchIterator:
        block_diagonal = self.config.data.reset_attention_mask
        windows = self.config.attention.layer_windows(self.config.model.num_layers)
        return MicroBatchIterator(
            BatchSource(
                loader,
                self.environment,
                block_diagonal=block_diagonal,
                window=next((w for w in windows if w is not None), None),
                share=None if self.magi is None else self.magi.share,
            ),
            samples_per_micro_batch=share.group_size,
            consumed_samples=consumed,
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
        ConfigurationError: the names of validation sets don't fit them.
        DataError: the corpora don't fit the run.
    """
    datasets: Datasets = build_datasets(
        config, tokenizer, sample_counts(config), first_on_rank_0=first_on_rank_0
    )
    evaluation = config.evaluation
    magi = magi_engine(config, environment.accelerator)
    builder = _SplitBuilder(config, environment, tokenizer, progress.data or {}, magi)
    train = builder.train(datasets.train, progress.consumed_samples)
    validate = builder.whole if evaluation.full_validation else builder.held_out
    valid: list[HeldOut] = []
    if evaluation.eval_iters > 0 or evaluation.full_validation:
        if datasets.valid is not None:
            valid.append(validate("valid", "validation", datasets.valid))
        names = _set_names(config, len(datasets.valid_sets))
        for name, dataset in zip(names, datasets.valid_sets, strict=True):
            valid.append(validate(f"valid-{name}", f"validation-{name}", dataset))
    test: tuple[HeldOut, ...] = ()
    if evaluation.eval_iters > 0 and datasets.test is not None:
        test = (builder.held_out("test", "test", datasets.test),)
    return Splits(train, tuple(valid), test)


def _set_names(config: Config, count: int) -> list[str]:
    names = config.evaluation.validation_set_names
    if names is None or not count:
        return [str(number) for number in range(count)]
    if len(set(names)) != count:
        raise ConfigurationError(
            f"--validation-set-names {' '.join(names)}: must be {count} names, one for each "
            "corpus of the validation split, no two alike"
        )
    return list(names)


def _share(config: Config) -> ReplicaShare:
    return ReplicaShare(
        micro_batch_size=config.training.micro_batch_size,
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
    )
