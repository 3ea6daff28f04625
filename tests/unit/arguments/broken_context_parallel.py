"""Command lines that each break one rule on context parallelism; see `test_rules.py`."""

from __future__ import annotations

# (rule, flags that break it and nothing else, what the message must hold, WORLD_SIZE)
BROKEN_CONTEXT_PARALLEL = [
    (
        "exchange",
        "--cp-comm-type p2p a2a --context-parallel-size 2",
        "--cp-comm-type p2p a2a: 2 values for --num-layers 4",
        2,
    ),
    (
        "exchange",
        "--cp-comm-type dispatch --context-parallel-size 2",
        "--cp-comm-type dispatch: ContextParallelHelper has no such .* needs --use-packed-sequence",
        2,
    ),
    (
        "exchange",
        "--cp-comm-type p2p dispatch p2p p2p --context-parallel-size 2 --use-packed-sequence",
        "--cp-comm-type dispatch: RingAttnContextParallelHelper has no such exchange",
        2,
    ),
    (
        "exchange",
        "--cp-comm-type p2p striped p2p a2a --context-parallel-size 2 --use-packed-sequence",
        r"--cp-comm-type p2p striped a2a: all layers share one .*\(p2p zigzag, striped striped",
        2,
    ),
    (
        "hierarchical_sizes",
        "--cp-comm-type a2a+p2p --context-parallel-size 4",
        r"a2a\+p2p: needs --hierarchical-context-parallel-sizes",
        4,
    ),
    (
        "hierarchical_sizes",
        "--hierarchical-context-parallel-sizes 2 2 --context-parallel-size 4",
        "sizes 2 2: needs --cp-comm-type a2a",
        4,
    ),
    (
        "hierarchical_sizes",
        "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4 --context-parallel-size 4",
        "sizes 4: must be two numbers",
        4,
    ),
    (
        "hierarchical_sizes",
        "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4 "
        "--context-parallel-size 4",
        "sizes 2 4: multiply to 8, which must be --context-parallel-size 4",
        4,
    ),
    (
        "chunk_size",
        "--magi-attn-chunk-size 64 --use-packed-sequence --context-parallel-size 2",
        "--magi-attn-chunk-size 64: needs --attention-backend magi",
        2,
    ),
    (
        "chunk_size",
        "--magi-attn-chunk-size 48 --attention-backend magi --use-packed-sequence",
        "--magi-attn-chunk-size 48: must be a power of two.* 32 would do",
        1,
    ),
    (
        "heads_over_context_parallel",
        "--cp-comm-type a2a --context-parallel-size 3 --use-packed-sequence",
        "--cp-comm-type a2a: shares 4 heads of a tensor-parallel rank out over 3 context-parallel",
        3,
    ),
    (
        "heads_over_context_parallel",
        "--attention-backend flex --context-parallel-size 4 --use-packed-sequence "
        "--num-attention-heads 12 --hidden-size 96 --group-query-attention --num-query-groups 6",
        "--cp-comm-type a2a: 6 key-value heads .* multiple or a divisor of 4",
        4,
    ),
    (
        "heads_over_context_parallel",
        "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4 1 "
        "--tensor-model-parallel-size 2 --context-parallel-size 4 --use-packed-sequence",
        "p2p: shares 2 heads of a tensor-parallel rank out over 4",
        8,
    ),
    (
        "rows_over_context_parallel",
        "--context-parallel-size 2 --seq-length 126",
        "--seq-length 126: must be a multiple of 4, .*--use-packed-sequence",
        2,
    ),
    (
        "rows_over_context_parallel",
        "--context-parallel-size 2 --seq-length 126 --cp-comm-type striped "
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--seq-length 126: must be a multiple of 4",
        4,
    ),
    (
        "segment_alignment",
        "--context-parallel-size 2 --use-packed-sequence --packing-alignment pack",
        "--packing-alignment pack: --cp-comm-type p2p cuts every segment",
        2,
    ),
    (
        "attention_dropout",
        "--context-parallel-size 2 --attention-dropout 0.1",
        "--attention-dropout 0.1: must be 0 with --context-parallel-size 2",
        2,
    ),
]
