"""Small corpora on disk and the flags that the data path reads."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy

from megatron.packed.data.files import publish
from megatron.packed.data.index_files import CorpusWriter

TOOLS = Path(__file__).resolve().parents[3] / "tools"


def write_corpus(prefix: Path | str, documents: list[list[int]], dtype: type = numpy.uint16) -> str:
    """Write documents, one sequence each; returns the prefix."""
    writer = CorpusWriter(str(prefix), dtype)
    for document in documents:
        writer.add(
            numpy.array(document, dtype=dtype),
            numpy.array([len(document)] if document else [], dtype=numpy.int32),
            numpy.array([1 if document else 0], dtype=numpy.int64),
        )
    publish(writer.finalize())
    return str(prefix)


def numbered_documents(count: int, eod: int = 256, seed: int = 0) -> list[list[int]]:
    """Documents of 1 to 60 bytes, each closed by EOD."""
    generator = numpy.random.RandomState(seed)
    return [
        [*generator.randint(0, 256, size=generator.randint(1, 60)).tolist(), eod]
        for _ in range(count)
    ]


def run_config(**data: object) -> SimpleNamespace:
    """The parts of the configuration that the data path reads, with overrides for `data`."""
    options = {
        "seq_length": 32,
        "data_path": None,
        "split": None,
        "train_data_path": None,
        "valid_data_path": None,
        "test_data_path": None,
        "fim_data": False,
        "data_args_path": None,
        "per_split_data_args_path": None,
        "per_dataset_sequences_path": None,
        "num_dataset_builder_threads": 1,
        "mid_level_dataset_surplus": 0.005,
        "data_cache_path": None,
        "mock_data": False,
        "mmap_bin_files": True,
        "dataloader_type": "single",
        "tokenizer_type": "ByteTokenizer",
        "tokenizer_model": None,
        "vocab_size": None,
        "eod_token": None,
    }
    return SimpleNamespace(
        data=SimpleNamespace(**{**options, **data}),
        packing=SimpleNamespace(
            use_packed_sequence=True, packs_documents=False, document_boundaries="eod"
        ),
        training=SimpleNamespace(seed=1234, global_batch_size=4),
        evaluation=SimpleNamespace(multiple_validation_sets=False),
        sft=SimpleNamespace(sft=False),
        loss=SimpleNamespace(use_document_weights=False),
    )


def load_tool(name: str) -> ModuleType:
    """Import tools/<name>.py, which is a script and no package."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]
