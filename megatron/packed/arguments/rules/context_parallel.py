"""Rules on context parallelism: what the chosen helper and exchange can do with the run."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron.packed.arguments.config import Config
from megatron.packed.arguments.exchange import select_for
from megatron.packed.context_parallel.capabilities import (
    COMMUNICATIONS,
    unsupported,
)


def exchange(config: Config) -> Iterator[str]:
    """Every layer's exchange is one that the helper has, and all agree on the partition."""
    asked, layers = config.parallel.cp_comm_type, config.model.num_layers
    if asked is not None and len(asked) not in (1, layers):
        yield (
            f"--cp-comm-type {' '.join(asked)}: {len(asked)} values for --num-layers {layers}; "
            "give one for all layers, or one a layer"
        )
    elif config.parallel.context_parallel_size > 1:
        yield from unsupported(select_for(config))


def hierarchical_sizes(config: Config) -> Iterator[str]:
    parallel = config.parallel
    sizes, ranks = parallel.hierarchical_context_parallel_sizes, parallel.context_parallel_size
    wants = any(COMMUNICATIONS[name].takes_sizes for name in _kinds(config))
    if sizes is None:
        if wants and ranks > 1:
            yield (
                "--cp-comm-type a2a+p2p: needs --hierarchical-context-parallel-sizes, the ranks of "
                "a group that shares heads and the number of groups"
            )
        return
    shown = " ".join(map(str, sizes))
    if not wants:
        yield (
            f"--hierarchical-context-parallel-sizes {shown}: needs --cp-comm-type a2a+p2p; leave "
            "it out, or change the exchange"
        )
    elif len(sizes) != 2:
        yield (
            f"--hierarchical-context-parallel-sizes {shown}: must be two numbers, the ranks of a "
            "group that shares heads and the number of groups"
        )
    elif math.prod(sizes) != ranks:
        yield (
            f"--hierarchical-context-parallel-sizes {shown}: multiply to {math.prod(sizes)}, which "
            f"must be --context-parallel-size {ranks}; change one of them"
        )


def chunk_size(config: Config) -> Iterator[str]:
    size = config.parallel.magi_attn_chunk_size
    if size is None:
        return
    if not any(COMMUNICATIONS[name].takes_chunks for name in _kinds(config)):
        yield (
            f"--magi-attn-chunk-size {size}: needs --attention-backend magi or --cp-comm-type "
            "dispatch, which hand chunks out; leave it out, or change the exchange"
        )
    elif size & (size - 1):
        yield (
            f"--magi-attn-chunk-size {size}: must be a power of two, so that the smaller chunks of "
            f"short packs divide it; {1 << (size.bit_length() - 1)} would do"
        )


def heads_over_context_parallel(config: Config) -> Iterator[str]:
    """Ranks that share heads out get equally many, each with its key-value head."""
    parallel = config.parallel
    if parallel.context_parallel_size == 1:
        return
    tensor = parallel.tensor_model_parallel_size
    heads = config.model.num_attention_heads // tensor
    groups = max(1, config.model.num_query_groups // tensor)
    for name in _kinds(config):
        if not COMMUNICATIONS[name].shares_heads:
            continue
        sizes = parallel.hierarchical_context_parallel_sizes
        ranks = parallel.context_parallel_size
        if COMMUNICATIONS[name].takes_sizes:
            ranks = sizes[0] if sizes else 1
        if heads % ranks:
            yield (
                f"--cp-comm-type {name}: shares {heads} heads of a tensor-parallel rank out over "
                f"{ranks} context-parallel ranks, which must divide them; change "
                "--num-attention-heads or a parallel size, or use --cp-comm-type p2p"
            )
        elif groups % ranks and ranks % groups:
            yield (
                f"--cp-comm-type {name}: {groups} key-value heads of a tensor-parallel rank must "
                f"be a multiple or a divisor of {ranks} context-parallel ranks; change "
                "--num-query-groups or a parallel size, or use --cp-comm-type p2p"
            )


def rows_over_context_parallel(config: Config) -> Iterator[str]:
    """Rows are cut exactly; packs are padded instead."""
    parallel, length = config.parallel, config.data.seq_length
    ranks = parallel.context_parallel_size
    if ranks == 1 or config.packing.use_packed_sequence:
        return
    chunks = ranks if select_for(config).partition == "striped" else 2 * ranks
    shards = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    multiple = math.lcm(chunks, ranks * shards)
    if length % multiple:
        yield (
            f"--seq-length {length}: must be a multiple of {multiple}, which "
            f"--context-parallel-size {ranks} cuts rows into; change it, or add "
            "--use-packed-sequence, which pads"
        )


def segment_alignment(config: Config) -> Iterator[str]:
    if config.parallel.context_parallel_size == 1 or not config.packing.use_packed_sequence:
        return
    if config.packing.packing_alignment == "pack" and select_for(config).partition == "zigzag":
        yield (
            f"--packing-alignment pack: --cp-comm-type {' '.join(_kinds(config))} cuts every "
            "segment into equal chunks; use default, or --cp-comm-type striped, a2a or dispatch"
        )


def attention_dropout(config: Config) -> Iterator[str]:
    rate = config.model.attention_dropout
    if config.parallel.context_parallel_size > 1 and rate:
        yield (
            f"--attention-dropout {rate:g}: must be 0 with --context-parallel-size "
            f"{config.parallel.context_parallel_size}, whose exact attention has no dropout; add "
            "--attention-dropout 0.0 (--hidden-dropout works)"
        )


def _kinds(config: Config) -> tuple[str, ...]:
    return select_for(config).kinds


RULES = (
    exchange,
    hierarchical_sizes,
    chunk_size,
    heads_over_context_parallel,
    rows_over_context_parallel,
    segment_alignment,
    attention_dropout,
)
