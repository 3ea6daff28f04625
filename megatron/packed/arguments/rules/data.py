"""Rules on corpus, tokenizer and reports."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron.packed.arguments.config import Config
from megatron.packed.arguments.tokenizer import (
    MODEL_FILE_TOKENIZERS,
    OTHER_MODELS_TOKENIZERS,
    TOKENIZER_TYPES,
)


def data_source(config: Config) -> Iterator[str]:
    data = config.data
    sources = {
        "--data-path": bool(data.data_path),
        "--data-args-path": data.data_args_path is not None,
        "--train-data-path / --valid-data-path / --test-data-path": bool(
            data.train_data_path or data.valid_data_path or data.test_data_path
        ),
        "--per-split-data-args-path": data.per_split_data_args_path is not None,
        "--mock-data": data.mock_data,
    }
    chosen = [name for name, given in sources.items() if given]
    if not chosen:
        yield f"no data: give one of {', '.join(sources)}"
    elif len(chosen) > 1:
        yield f"{' and '.join(chosen)}: exclude each other; keep one"
    elif chosen[0].startswith("--train") and not data.train_data_path:
        yield "--valid-data-path / --test-data-path: need --train-data-path too"


def dataloader(config: Config) -> Iterator[str]:
    if config.data.dataloader_type == "external":
        yield (
            "--dataloader-type external is refused: it takes iterators from a program of its own, "
            "and pretrain_gpt.py reads corpora; use single or cyclic"
        )


def validation_sets(config: Config) -> Iterator[str]:
    data, evaluation = config.data, config.evaluation
    if evaluation.multiple_validation_sets and not data.has_per_split_paths:
        yield (
            "--multiple-validation-sets: needs --valid-data-path or --per-split-data-args-path, "
            "which list them"
        )
    names = evaluation.validation_set_names
    if names is not None and not evaluation.multiple_validation_sets:
        yield (
            f"--validation-set-names {' '.join(names)}: names those of --multiple-validation-sets; "
            "ask for them too"
        )


def split_proportions(config: Config) -> Iterator[str]:
    data = config.data
    if data.split is None:
        return
    if data.has_per_split_paths:
        yield (
            f"--split {data.split}: splits --data-path, and excludes --train-data-path and its "
            "companions; leave one out"
        )
        return
    parts = [part.strip() for part in data.split.split(",")]
    number = re.compile(r"\d+\.?\d*|\.\d+")  # what megatron-core reads
    legal = len(parts) <= 3 and all(number.fullmatch(part) for part in parts)
    if not legal or not any(map(float, parts)):
        yield (
            f"--split {data.split}: must be up to three proportions of training, validation and "
            "test, not all 0, as in 90,5,5"
        )


def tokenizer(config: Config) -> Iterator[str]:
    data = config.data
    kind = data.tokenizer_type
    asked = f"--tokenizer-type {kind}"
    if kind in OTHER_MODELS_TOKENIZERS:
        yield (
            f"{asked} is refused: it belongs to BERT or to models of images, which this program "
            f"doesn't train; use one of {', '.join(TOKENIZER_TYPES)}"
        )
    elif kind in ("HuggingFaceTokenizer", "SFTTokenizer") and not data.tokenizer_model:
        yield (f"{asked}: needs --tokenizer-model, a tokenizer.json or a folder that holds one")
    elif kind in MODEL_FILE_TOKENIZERS and not data.tokenizer_model:
        yield f"{asked}: needs --tokenizer-model, its model file"
    elif kind == "GPT2BPETokenizer" and not (data.vocab_file and data.merge_file):
        given = "" if config.is_given("tokenizer_type") else " (the default)"
        yield (
            f"{asked}{given}: needs --vocab-file and --merge-file, the vocab.json and merges.txt "
            "of the corpus; or choose another --tokenizer-type"
        )
    if kind == "TikTokenizer" and data.tiktoken_pattern is None:
        yield f"{asked}: needs --tiktoken-pattern, v1 or v2, whichever the vocabulary was made with"
    if kind == "NullTokenizer" and data.vocab_size is None:
        yield f"{asked}: needs --vocab-size, it has no vocabulary of its own"


def tokenizer_options(config: Config) -> Iterator[str]:
    """Flags of one kind of tokenizer beside another."""
    data = config.data
    kind = data.tokenizer_type
    if data.special_tokens and kind != "TikTokenizer":
        yield (
            f"--tokenizer-special-tokens {' '.join(data.special_tokens)}: are TikTokenizer's; "
            f"those of {kind} are in its own files, add them there"
        )
    elif data.special_tokens and data.tiktoken_special_tokens:
        yield (
            "--tokenizer-special-tokens and --tiktoken-special-tokens: are the same; keep one of "
            "them"
        )
    eod = data.null_tokenizer_eod_id
    if eod is not None and kind != "NullTokenizer":
        yield f"--null-tokenizer-eod-id {eod}: is NullTokenizer's, not {kind}'s; leave it out"
    elif eod is not None and data.vocab_size is not None and eod > data.vocab_size:
        yield (
            f"--null-tokenizer-eod-id {eod}: must be at most --vocab-size {data.vocab_size}, the "
            "first id after the texts' own"
        )
    if data.tokenizer_hf_include_special_tokens and data.tokenizer_hf_no_include_special_tokens:
        yield (
            "--tokenizer-hf-include-special-tokens and --tokenizer-hf-no-include-special-tokens: "
            "exclude each other; keep one"
        )
    tensor = config.parallel.tensor_model_parallel_size
    if data.padded_vocab_size is not None and data.padded_vocab_size % tensor:
        yield (
            f"--padded-vocab-size {data.padded_vocab_size}: must be a multiple of "
            f"--tensor-model-parallel-size {tensor}; change one of them"
        )


def fill_in_the_middle(config: Config) -> Iterator[str]:
    data = config.data
    if not data.fim_data:
        return
    if data.mock_data:
        yield "--fim-data: --mock-data has no text to change; give a corpus as --data-path"
    if config.sft.sft:
        yield "--fim-data: would cut conversations apart; leave out it or --sft"
    if config.loss.document_length == "document" and not config.packing.packs_documents:
        yield (
            "--fim-data: changes the lengths of documents in rows; --document-length document "
            "needs a --packing-strategy that packs them whole"
        )
    if (data.fim_split_sample is None) != (data.fim_fragment_rate is None):
        yield (
            "--fim-split-sample and --fim-fragment-rate: belong together, the token that splits a "
            "document and the share of its fragments that are changed; give both or neither"
        )


def experiment_name(config: Config) -> Iterator[str]:
    logging = config.logging
    if logging.wandb_project and not logging.wandb_exp_name:
        yield f"--wandb-project {logging.wandb_project}: needs --wandb-exp-name, the run's name"


RULES = (
    data_source,
    dataloader,
    validation_sets,
    split_proportions,
    tokenizer,
    tokenizer_options,
    fill_in_the_middle,
    experiment_name,
)
