"""Train a byte-level BPE tokenizer on JSON lines; writes tokenizer.json and its settings."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from megatron.packed.data.files import publish, require_writable_folder, temporary_name
from megatron.packed.data.json_lines import JsonLines
from megatron.packed.errors import ConfigurationError, DataError

_BYTES = 256


def train(texts: Iterator[str], vocab_size: int, eos_token: str, progress: bool = False):
    """Train byte-level BPE.

    Args:
        texts: the corpus.
        vocab_size: ids to make, the 256 bytes and the EOS token included.
        eos_token: text of the EOS token; it gets id 0.
        progress: show the library's own progress bars.

    Returns:
        A `tokenizers.Tokenizer`; smaller than asked for if the corpus holds too few pairs.

    Raises:
        ConfigurationError: if the vocabulary can't even hold the bytes.
    """
    if vocab_size < _BYTES + 1:
        raise ConfigurationError(
            f"--vocab-size {vocab_size} can't hold 256 bytes and the EOS token; "
            f"give at least {_BYTES + 1}"
        )
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[eos_token],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=progress,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", nargs="+", required=True, help="JSON lines files (.gz as well).")
    parser.add_argument("--json-key", default="text", help="Key of the text. Default: text")
    parser.add_argument("--output", type=Path, required=True, help="Folder to write.")
    parser.add_argument("--vocab-size", type=int, required=True, help="Ids to make.")
    parser.add_argument(
        "--eos-token", default="<|endoftext|>", help="Ends a document. Default: <|endoftext|>"
    )
    parser.add_argument("--limit-bytes", type=int, help="Most bytes of input to train on.")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Train and save.

    Args:
        arguments: command line without the program's name; None reads sys.argv.

    Raises:
        ConfigurationError: if a flag can't be honoured.
        DataError: if the corpus can't be read or the folder can't be written.
    """
    options = parse_arguments(arguments)
    lines = JsonLines(options.input)
    require_writable_folder(options.output, f"--output {options.output}")
    began = time.monotonic()
    texts = _texts(lines, options.json_key, options.limit_bytes)
    tokenizer = train(texts, options.vocab_size, options.eos_token, progress=sys.stderr.isatty())

    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": options.eos_token,
        "clean_up_tokenization_spaces": False,
    }
    model_path = options.output / "tokenizer.json"
    settings_path = options.output / "tokenizer_config.json"
    pairs = [(temporary_name(path), path) for path in (settings_path, model_path)]
    try:
        pairs[0][0].write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        tokenizer.save(str(pairs[1][0]), pretty=False)
        publish(pairs)
    finally:
        for temporary, _ in pairs:
            temporary.unlink(missing_ok=True)
    print(
        f"{model_path}: {tokenizer.get_vocab_size()} ids, "
        f"trained in {time.monotonic() - began:.1f} s"
    )


def _texts(lines: JsonLines, key: str, limit_bytes: int | None) -> Iterator[str]:
    size = 0
    for line in lines:
        size += len(line.raw)
        if limit_bytes is not None and size > limit_bytes:
            return
        yield from line.texts(key)


if __name__ == "__main__":
    try:
        main()
    except (ConfigurationError, DataError) as error:
        sys.exit(f"error: {error}")
