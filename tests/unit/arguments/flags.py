"""The smallest command line that starts a run, for the tests of this folder."""

from __future__ import annotations

MINIMAL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 2 "
    "--train-iters 100 --lr 1e-3 --seq-length 128 --tokenizer-type NullTokenizer "
    "--vocab-size 100 --mock-data --attention-dropout 0.0"
)
