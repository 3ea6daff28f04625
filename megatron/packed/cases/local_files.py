"""Corpus, tokenizers and folders on this machine in place of those a case names."""

from __future__ import annotations

import contextlib
import importlib.util
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy

from megatron.packed.cases.blocks import shrink_description, stand_in, widths
from megatron.packed.cases.case import Value
from megatron.packed.cases.layers import DESCRIPTION_FILE
from megatron.packed.cases.parallel import size
from megatron.packed.cases.shrink import VOCABULARY, SmallRun
from megatron.packed.data.files import publish
from megatron.packed.data.index_files import CorpusWriter
from megatron.packed.errors import ConfigurationError

if TYPE_CHECKING:
    from tokenizers import Encoding

EOD = "<|endoftext|>"
_DOCUMENTS = 6000
_SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")

_FOLDERS = {
    "--data-cache-path": "cache",
    "--tensorboard-dir": "tensorboard",
    "--save": "checkpoints",
    "--load": "checkpoints",
    "--wandb-save-dir": "wandb",
    "--non-persistent-global-ckpt-dir": "checkpoints",
}
_CORPORA = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")
# They talk to a service; nothing is computed from them.
_SERVICES = ("--wandb-project", "--wandb-entity", "--wandb-exp-name", "--wandb-save-dir")


@dataclass(frozen=True)
class LocalFiles:
    """Small stand-ins for the files of a cluster.

    Attributes:
        corpora: Prefixes of two indexed corpora.
        vocabulary: GPT-2's vocab.json.
        merges: GPT-2's merges.txt.
        tokenizer_json: The same as a Hugging Face tokenizer.
        sentencepiece: A SentencePiece model; None where its package is missing.
    """

    corpora: tuple[str, str]
    vocabulary: str
    merges: str
    tokenizer_json: str
    sentencepiece: str | None


def make_local_files(folder: Path) -> LocalFiles:
    """Write a corpus of made-up words, and tokenizers trained on it.

    Args:
        folder: Where; exists.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = _documents(seed=1)[:500]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[EOD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    vocabulary, merges = tokenizer.model.save(str(folder))
    tokenizer_json = folder / "tokenizer.json"
    tokenizer.save(str(tokenizer_json))
    corpora = []
    for seed in (1, 2):
        corpus = str(folder / f"corpus_{seed}_text_document")
        _write_corpus(corpus, tokenizer.encode_batch(_documents(seed)))
        corpora.append(corpus)
    return LocalFiles(
        corpora=(corpora[0], corpora[1]),
        vocabulary=vocabulary,
        merges=merges,
        tokenizer_json=str(tokenizer_json),
        sentencepiece=_train_sentencepiece(folder, texts),
    )


def localise(run: SmallRun, files: LocalFiles, folder: Path) -> SmallRun:
    """Point a small run at local files.

    Args:
        run: What `shrink` made.
        files: Stand-ins for corpora and tokenizers.
        folder: For what the run writes.

    Returns:
        The run with paths of this machine; what could not be mapped is in its notes.
    """
    args, notes = dict(run.args), list(run.notes)
    for name, place in _FOLDERS.items():
        if name in args:
            args[name] = str(folder / place)
    for name in _CORPORA:
        if name in args:
            args[name] = _corpus(args[name], files)
    if _is_variable(args.get("--seed")):
        args["--seed"] = 1
    args |= _tokenizer(args, files)
    if DESCRIPTION_FILE in args:
        args[DESCRIPTION_FILE] = _description(run, folder, notes)
    dropped = [name for name in _SERVICES if args.pop(name, None) is not None]
    if dropped:
        notes.append("--wandb-* talk to a service")
    return replace(run, args=args, notes=tuple(notes))


def _corpus(value: Value, files: LocalFiles) -> list[str]:
    text = " ".join(value) if isinstance(value, list) else str(value)
    words = text.split()
    if len(words) > 1 or "BLEND" in text:
        return ["0.7", files.corpora[0], "0.3", files.corpora[1]]
    return [files.corpora[0]]


def _description(run: SmallRun, folder: Path, notes: list[str]) -> str:
    """Write a small description of layers that differ; return its path."""
    layers, small = size(run.args, "--num-layers"), widths(run.args)
    asked = Path(str(run.case.args[DESCRIPTION_FILE]))
    try:
        text = asked.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        notes.append(f"{DESCRIPTION_FILE} {asked} isn't here, layers of every kind stand in")
        text = stand_in(layers, small)
    else:
        with contextlib.suppress(ConfigurationError):  # the run itself reports what it can't read
            text = shrink_description(text, layers, widths(run.case.args), small)
    path = folder / "layers.json"
    path.write_text(text, encoding="utf-8")
    return str(path)


def _is_variable(value: Value | None) -> bool:
    return isinstance(value, str) and value.startswith("$")


def _tokenizer(args: Mapping[str, Value], files: LocalFiles) -> dict[str, Value]:
    kind = str(args.get("--tokenizer-type", "GPT2BPETokenizer"))
    values: dict[str, Value] = {}
    if "--vocab-file" in args:
        values["--vocab-file"] = files.vocabulary
    if "--merge-file" in args:
        values["--merge-file"] = files.merges
    if kind in _SENTENCEPIECE and files.sentencepiece is not None:
        values["--tokenizer-model"] = files.sentencepiece
    elif kind not in ("GPT2BPETokenizer", "NullTokenizer", "ByteTokenizer"):
        values["--tokenizer-type"] = "HuggingFaceTokenizer"
        values["--tokenizer-model"] = files.tokenizer_json
    elif "--tokenizer-model" in args:
        values["--tokenizer-model"] = files.tokenizer_json
    return values


def _documents(seed: int) -> list[str]:
    """Documents of words that are as unequally frequent as real ones."""
    source = random.Random(seed)
    syllables = [a + b for a in "bcdfghklmnprstvz" for b in "aeiou"]
    words = ["".join(random.Random(n).choices(syllables, k=1 + n % 3)) for n in range(400)]
    weights = [1 / (rank + 2) for rank in range(len(words))]
    return [
        " ".join(source.choices(words, weights, k=int(source.lognormvariate(4, 1)) + 2)) + "."
        for _ in range(_DOCUMENTS)
    ]


def _write_corpus(prefix: str, documents: list[Encoding]) -> None:
    closed = [[*document.ids, 0] for document in documents]  # 0 is EOD
    writer = CorpusWriter(prefix, numpy.uint16)
    writer.add(
        numpy.array([token for document in closed for token in document], numpy.uint16),
        numpy.array([len(document) for document in closed], numpy.int32),
        numpy.ones(len(closed), numpy.int64),
    )
    publish(writer.finalize())


def _train_sentencepiece(folder: Path, texts: list[str]) -> str | None:
    if importlib.util.find_spec("sentencepiece") is None:
        return None
    import sentencepiece

    prefix = folder / "sentencepiece"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_prefix=str(prefix),
        vocab_size=VOCABULARY,
        hard_vocab_limit=False,
        byte_fallback=True,
        minloglevel=2,
        pad_id=3,
    )
    return f"{prefix}.model"
