"""Peak memory of a training step over the pack length: linear, whatever the segments.

    make bench-memory

Each size trains two steps in a process of its own; what the process held before the first step is
subtracted. The last column is the growth against the row before: 2.0 when tokens double.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import resource
import subprocess
import sys
import time

import numpy as np
import psutil

FLAGS = """
    --num-layers 4 --hidden-size 256 --num-attention-heads 4 --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0.0
    --hidden-dropout 0.0 --micro-batch-size 1 --lr 1e-4 --train-iters 10 --eval-iters 0
    --mock-data --tokenizer-type ByteTokenizer --use-packed-sequence
"""


def measure(tokens: int, segments: int) -> tuple[int, float]:
    """Train two steps on one pack.

    Args:
        tokens: length of the pack.
        segments: documents in it, of about equal length.

    Returns:
        Bytes that the steps added to the peak, and seconds of the second step.
    """
    from megatron.packed.arguments import config_from_flags
    from megatron.packed.data.tokenizers import build_tokenizer
    from megatron.packed.training import environment as environments
    from megatron.packed.training import setup
    from megatron.packed.training.batches import BatchSource, MicroBatchIterator
    from megatron.packed.training.collation import build_collator

    config = config_from_flags(f"{FLAGS} --seq-length {tokens}")
    environment = environments.start(config)
    tokenizer = build_tokenizer(config.data)
    text = np.random.default_rng(0).integers(0, 256, tokens + 1)
    text[np.linspace(0, tokens, segments + 1).astype(int)[1:] - 1] = tokenizer.eod
    collate = build_collator(config, tokenizer.eod)
    loader = (collate([{"text": text, "length": tokens + 1}]) for _ in range(2))
    batches = MicroBatchIterator(BatchSource(loader, environment, block_diagonal=False))
    with contextlib.redirect_stdout(io.StringIO()):
        step = setup.build_step(config, environment, tokenizer)
    before = psutil.Process().memory_info().rss
    for _ in range(2):
        start = time.perf_counter()
        step(batches, num_microbatches=1, global_batch_size=1)
        seconds = time.perf_counter() - start
    assert batches.statistics.segments == 2 * segments
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before, seconds


def main() -> None:
    """Print the table, or one measurement for it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", type=int, nargs=2, metavar=("TOKENS", "SEGMENTS"))
    arguments = parser.parse_args()
    if arguments.one:
        print(*measure(*arguments.one))
        return
    titles = ("tokens", "segments", "peak MiB", "KiB/token", "s/step", "growth")
    widths = (8, 9, 9, 10, 7, 7)
    print(" ".join(title.rjust(width) for title, width in zip(titles, widths, strict=True)))
    for segments_at_64k in (1000, 64):
        previous = None
        for tokens in (8192, 16384, 32768, 65536):
            segments = max(1, segments_at_64k * tokens // 65536)
            command = [sys.executable, __file__, "--one", str(tokens), str(segments)]
            answer = subprocess.run(command, check=True, capture_output=True, text=True)
            peak, seconds = answer.stdout.split()[-2:]
            growth = f"{int(peak) / previous:7.2f}" if previous else "      -"
            previous = int(peak)
            print(
                f"{tokens:8d} {segments:9d} {int(peak) / 2**20:9.0f} "
                f"{int(peak) / 1024 / tokens:10.1f} {float(seconds):7.2f} {growth}"
            )


if __name__ == "__main__":
    main()
