"""Command lines that each break one rule on linear attention layers; see `test_rules.py`."""

from __future__ import annotations

DELTA = "--experimental-attention-variant gated_delta_net"

# (rule, flags that break it and nothing else, what the message must hold, WORLD_SIZE)
BROKEN_LINEAR_ATTENTION = [
    (
        "linear_layers",
        "--linear-attention-freq 2",
        "--linear-attention-freq 2: needs --experimental-attention-variant gated_delta_net",
        1,
    ),
    (
        "linear_layers",
        f"{DELTA} --linear-attention-freq [1,0]",
        "--linear-attention-freq .*must have a 0 or 1 for each of --num-layers 4",
        1,
    ),
    (
        "linear_layers",
        f"{DELTA} --linear-attention-freq often",
        "--linear-attention-freq often: 'often': must be a whole number",
        1,
    ),
    ("linear_layers", f"{DELTA}", "is needed to say which layers", 1),
    (
        "linear_heads",
        f"{DELTA} --linear-attention-freq 2 --linear-num-key-heads 5",
        "--linear-num-value-heads 32: must be a multiple of --linear-num-key-heads 5",
        1,
    ),
    (
        "linear_heads",
        f"{DELTA} --linear-attention-freq 2 --linear-num-key-heads 2 "
        "--tensor-model-parallel-size 4",
        "--linear-num-key-heads 2: must be a multiple of --tensor-model-parallel-size 4",
        4,
    ),
    (
        "linear_layer_surroundings",
        f"{DELTA} --linear-attention-freq 2 --context-parallel-size 2",
        "isn't spread over --context-parallel-size 2",
        2,
    ),
    (
        "sparse_attention",
        "--experimental-attention-variant dsa",
        "--experimental-attention-variant dsa is refused: it attends to the keys",
        1,
    ),
]
