"""Datasets of a run: megatron-core's blended builder over row datasets."""

from __future__ import annotations

import contextlib
import importlib
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

from megatron.packed.data.blends import (
    SPLIT_NAMES,
    Corpora,
    resolve_corpora,
    validation_sets,
)
from megatron.packed.data.document_corpus import DocumentCorpus, build_document_corpora
from megatron.packed.data.fim import build_fim
from megatron.packed.data.row_dataset import (
    BlendedRowDataset,
    MockRowDataset,
    RowDataset,
    RowDatasetConfig,
)
from megatron.packed.data.supervised_corpus import encode_corpora
from megatron.packed.data.validation import SampleCounts, check_cache_folder, validate_data
from megatron.packed.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    from megatron.packed.arguments import Config
    from megatron.packed.data.tokenizer_base import PackedTokenizer

Rows = RowDataset | MockRowDataset | BlendedRowDataset
Splits = tuple[Rows | DocumentCorpus | None, ...]


@dataclass(frozen=True)
class Datasets:
    """Rows, or whole documents, of a run; None where a split has no share or isn't asked for.

    Attributes:
        train: of training.
        valid: of validation; None with several sets.
        test: of the test.
        valid_sets: with `--multiple-validation-sets`, each in the order it was named.
    """

    train: Rows | DocumentCorpus
    valid: Rows | DocumentCorpus | None
    test: Rows | DocumentCorpus | None
    valid_sets: tuple[Rows | DocumentCorpus, ...] = ()

    def __iter__(self) -> Iterator[Rows | DocumentCorpus | None]:
        return iter((self.train, self.valid, self.test))


def build_datasets(
    config: Config,
    tokenizer: PackedTokenizer,
    num_samples: SampleCounts,
    is_built_on_rank: Callable[[], bool] = lambda: True,
    first_on_rank_0: Callable[[Callable[[], Corpora]], Corpora] = lambda action: action(),
) -> Datasets:
    """Check the corpora and build the datasets; every rank calls it.

    Rank 0 builds the index files while the others wait at a barrier, then the others map them.

    Args:
        config: the run; `data`, `packing` and `training` are read.
        tokenizer: the run's tokenizer.
        num_samples: rows the run asks of each split.
        is_built_on_rank: whether this rank needs datasets. All do by default: metadata must be
            the same on every rank, and a mapped file is cheaper than a broadcast.
        first_on_rank_0: runs an action on rank 0 and then on the others, in a job of several.

    Returns:
        The datasets: document corpora where documents are packed whole. Of row datasets, with one
        corpus, or weights, a split repeats its documents until it has the rows that are asked
        for; it may have a few more.

    Raises:
        ConfigurationError: if data flags are malformed.
        DataError: if files, tokenizer and run don't fit.
    """
    corpora = resolve_corpora(config.data)
    if corpora is not None and config.sft.sft:
        corpora = first_on_rank_0(partial(encode_corpora, config, corpora, tokenizer))
    if corpora is not None:
        validate_data(config, corpora, tokenizer, num_samples)
        if num_samples.valid is None:
            _refuse_weights(corpora)
    elif config.data.data_cache_path is not None:
        check_cache_folder(config.data.data_cache_path, [])
    build = partial(_build_splits, config, tokenizer, is_built_on_rank)
    if corpora is None or not config.evaluation.multiple_validation_sets:
        return Datasets(*_require_train(build(corpora, num_samples)))
    train, _, test = _require_train(build(corpora, replace(num_samples, valid=0)))
    only_valid = SampleCounts(0, num_samples.valid, 0)
    sets = []
    for blend in validation_sets(corpora) if num_samples.valid != 0 else ():
        _, one, _ = build(Corpora(None, None, (None, blend, None)), only_valid)
        assert one is not None  # it has a blend, and rows of it are asked for
        sets.append(one)
    return Datasets(train, None, test, tuple(sets))


def _build_splits(
    config: Config,
    tokenizer: PackedTokenizer,
    is_built_on_rank: Callable[[], bool],
    corpora: Corpora | None,
    counts: SampleCounts,
) -> Splits:
    if config.packing.packs_documents or config.sft.sft:
        train, valid, test = build_document_corpora(config, corpora, tokenizer, list(counts))
        return train, valid, test
    _require_compiled_helpers()
    core_config = _core_config(config, corpora, tokenizer)
    _leave_out_unwanted_splits(core_config, counts)
    builder = _RowDatasetBuilder(
        MockRowDataset if corpora is None else RowDataset,
        list(counts),
        is_built_on_rank,
        core_config,
    )
    with _quiet_core():
        try:
            built: Splits = tuple(builder.build())
        except Exception as error:
            # megatron-core wraps what went wrong with the cache folder in a bare Exception.
            if isinstance(error.__cause__, OSError):
                raise DataError(
                    f"can't write index files ({error.__cause__}); "
                    "give a folder with room and write access as --data-cache-path"
                ) from error
            raise
    _check_enough_rows(config, corpora, built, counts)
    return built


def _require_train(
    built: Splits,
) -> tuple[Rows | DocumentCorpus, Rows | DocumentCorpus | None, Rows | DocumentCorpus | None]:
    train, valid, test = built
    if train is None:
        raise DataError("the train split is empty; give it a share of --split")
    return train, valid, test


def _refuse_weights(corpora: Corpora) -> None:
    blend = corpora.per_split[1] if corpora.per_split is not None else corpora.blend
    if blend is not None and blend.weights is not None:
        raise ConfigurationError(
            f"--full-validation: goes over each corpus once, and {blend.flag} "
            f"{' '.join(blend.prefixes)} draws by weights; give --valid-data-path without weights"
        )


class _RowDatasetBuilder(BlendedMegatronDatasetBuilder):
    @staticmethod
    def build_generic_dataset(
        cls: Any, is_built_on_rank: Callable[[], bool], synchronize_ranks: bool, *args: Any
    ) -> Any:
        if cls is BlendedDataset:
            cls = BlendedRowDataset
        return BlendedMegatronDatasetBuilder.build_generic_dataset(
            cls, is_built_on_rank, synchronize_ranks, *args
        )


def _core_config(
    config: Config, corpora: Corpora | None, tokenizer: PackedTokenizer
) -> RowDatasetConfig:
    blend, per_split = None, None
    if corpora is not None:
        blend = corpora.blend.as_core() if corpora.blend is not None else None
        if corpora.per_split is not None:
            per_split = [each.as_core() if each is not None else None for each in corpora.per_split]
    return RowDatasetConfig(
        fim=build_fim(config, tokenizer),
        use_document_weights=config.loss.use_document_weights,
        random_seed=config.training.seed,
        sequence_length=config.data.seq_length,
        blend=blend,
        blend_per_split=per_split,
        split=corpora.split if corpora is not None else None,
        path_to_cache=config.data.data_cache_path,
        mmap_bin_files=config.data.mmap_bin_files,
        num_dataset_builder_threads=config.data.num_dataset_builder_threads,
        mid_level_dataset_surplus=config.data.mid_level_dataset_surplus,
        tokenizer=tokenizer,
        # Masks and positions are made from raw rows, by packing or by BshdCollator.
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )


def _leave_out_unwanted_splits(core_config: GPTDatasetConfig, counts: SampleCounts) -> None:
    """A split of which no row is asked is not built: megatron-core would loop on an empty one."""
    for place, wanted in enumerate(counts):
        if wanted != 0:
            continue
        if core_config.split_matrix is not None:
            core_config.split_matrix[place] = None
        if core_config.blend_per_split is not None:
            core_config.blend_per_split[place] = None


def _check_enough_rows(
    config: Config, corpora: Corpora | None, datasets: Splits, counts: SampleCounts
) -> None:
    if corpora is None or config.data.dataloader_type != "single":
        return
    blends = corpora.per_split or (corpora.blend,) * len(SPLIT_NAMES)
    for name, blend, dataset, wanted in zip(SPLIT_NAMES, blends, datasets, counts, strict=True):
        if blend is None or dataset is None or blend.repeats or wanted is None:
            continue
        if len(dataset) >= wanted:
            continue
        raise DataError(
            f"{blend.flag} {' '.join(blend.prefixes)}: corpora without weights are gone over once, "
            f"which gives {len(dataset)} {name} rows, and the run asks for {wanted}; give weights "
            "(0.5 corpus_a 0.5 corpus_b) to repeat them, or lower --train-iters, --eval-iters or "
            "--global-batch-size"
        )


def _require_compiled_helpers() -> None:
    try:
        importlib.import_module("megatron.core.datasets.helpers_cpp")
    except ImportError as error:
        raise DataError(
            f"megatron-core's compiled dataset helpers can't be loaded ({error}); install "
            "megatron-core from a wheel for this Python: "
            "pip install --force-reinstall --no-deps --only-binary :all: megatron-core"
        ) from error


@contextlib.contextmanager
def _quiet_core() -> Iterator[None]:
    """Keep out what megatron-core says about choices that are deliberate here."""
    logger = logging.getLogger("megatron.core.datasets")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # Pad may equal EOD: masks go by position.
            warnings.filterwarnings("ignore", message="The pad token id in the tokenizer collides")
            yield
    finally:
        logger.setLevel(level)
