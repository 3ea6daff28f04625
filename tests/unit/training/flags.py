"""The smallest command line that starts a run, for the tests of this folder."""

from __future__ import annotations

from megatron.packed.arguments import Config, config_from_flags

MINIMAL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 2 "
    "--global-batch-size 8 --train-iters 100 --lr 1e-3 --seq-length 128 "
    "--tokenizer-type NullTokenizer --vocab-size 100 --mock-data --attention-dropout 0.0 "
)


def config(flags: str = "") -> Config:
    """A validated configuration on a CPU."""
    return config_from_flags(MINIMAL + flags, {})
