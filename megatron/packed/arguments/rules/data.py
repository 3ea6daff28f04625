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
        "--train-data-path / --valid-data-path / --test-data-path": data.has_per_split_paths,
        "--mock-data": data.mock_data,
    }
    chosen = [name for name, given in sources.items() if given]
    if not chosen:
        yield f"no data: give one of {', '.join(sources)}"
    elif len(chosen) > 1:
        yield f"{' and '.join(chosen)}: exclude each other; keep one"
    elif data.has_per_split_paths and not data.train_data_path:
        yield "--valid-data-path / --test-data-path: need --train-data-path too"


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


def experiment_name(config: Config) -> Iterator[str]:
    logging = config.logging
    if logging.wandb_project and not logging.wandb_exp_name:
        yield f"--wandb-project {logging.wandb_project}: needs --wandb-exp-name, the run's name"


RULES = (
    data_source,
    split_proportions,
    tokenizer,
    experiment_name,
)
