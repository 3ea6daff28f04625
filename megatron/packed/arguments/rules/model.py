"""Rules on the model's shape, alone and over its parallel layout."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.packed.arguments.config import Config


def head_width(config: Config) -> Iterator[str]:
    model = config.model
    if not config.is_given("kv_channels") and model.hidden_size % model.num_attention_heads:
        yield (
            f"--hidden-size {model.hidden_size}: must be a multiple of --num-attention-heads "
            f"{model.num_attention_heads}; change one, or give --kv-channels"
        )


def heads_over_tensor_parallel(config: Config) -> Iterator[str]:
    heads, size = config.model.num_attention_heads, config.parallel.tensor_model_parallel_size
    if heads % size:
        yield (
            f"--num-attention-heads {heads}: must be a multiple of --tensor-model-parallel-size "
            f"{size}; change one of them"
        )


def query_groups(config: Config) -> Iterator[str]:
    heads, groups = config.model.num_attention_heads, config.model.num_query_groups
    size = config.parallel.tensor_model_parallel_size
    if heads % groups:
        yield (
            f"--num-query-groups {groups}: must divide --num-attention-heads {heads}; "
            "every group serves the same number of heads"
        )
    elif groups != heads and groups % size and size % groups:
        yield (
            f"--num-query-groups {groups}: must be a multiple or a divisor of "
            f"--tensor-model-parallel-size {size}; change one of them"
        )


def feed_forward_width(config: Config) -> Iterator[str]:
    width, size = config.model.ffn_hidden_size, config.parallel.tensor_model_parallel_size
    if width < 1:
        yield (
            f"--hidden-size {config.model.hidden_size}: too small for --swiglu's default "
            "feed-forward width, a multiple of 64; give --ffn-hidden-size"
        )
    elif width % size:
        yield (
            f"--ffn-hidden-size {width}: must be a multiple of --tensor-model-parallel-size "
            f"{size}; change one of them"
        )


def activation(config: Config) -> Iterator[str]:
    model = config.model
    asked = [
        name
        for name, value in (
            ("--swiglu", model.swiglu),
            ("--squared-relu", model.squared_relu),
            ("--quick-geglu", model.quick_geglu),
        )
        if value
    ]
    if len(asked) > 1:
        yield f"{' and '.join(asked)}: choose one activation"
    for dest in ("glu_linear_offset", "activation_func_clamp_value"):
        if config.get(dest) and not model.quick_geglu:
            name = f"--{dest.replace('_', '-')}"
            yield f"{name} {config.get(dest):g}: needs --quick-geglu; add it or leave {name} out"


def flash_attention(config: Config) -> Iterator[str]:
    backend = config.model.attention_backend
    if config.kernels.use_flash_attn and backend != "flash":
        yield (
            f"--use-flash-attn and --attention-backend {backend}: contradict each other; "
            "keep the second"
        )


def position_table(config: Config) -> Iterator[str]:
    length, rows = config.data.seq_length, config.model.max_position_embeddings
    if length > rows:
        yield (
            f"--seq-length {length}: must be at most --max-position-embeddings {rows}; "
            "raise the table or shorten the rows"
        )


def sequence_shards(config: Config) -> Iterator[str]:
    length, size = config.data.seq_length, config.parallel.tensor_model_parallel_size
    packed = config.packing.use_packed_sequence  # packs are padded to the size
    if config.parallel.sequence_parallel and not packed and length % size:
        yield (
            f"--seq-length {length}: must be a multiple of --tensor-model-parallel-size {size} "
            "with --sequence-parallel; change it, or leave --sequence-parallel out"
        )


def maximal_update(config: Config) -> Iterator[str]:
    model = config.model
    for dest in (
        "mup_base_hidden_size",
        "mup_embedding_mult",
        "mup_output_mult",
        "mup_base_head_dim",
        "mup_attn_scale_power",
    ):
        if config.is_given(dest) and not model.use_mup:
            name = f"--{dest.replace('_', '-')}"
            yield f"{name} {config.get(dest):g}: needs --use-mup; add it or leave {name} out"
    optimizer = config.optimization.optimizer
    if model.use_mup and optimizer not in ("adam", "sgd"):
        yield (
            f"--use-mup: scales the rates of adam and sgd, not of --optimizer {optimizer}; change "
            "one of them"
        )


RULES = (
    head_width,
    heads_over_tensor_parallel,
    query_groups,
    feed_forward_width,
    activation,
    flash_attention,
    position_table,
    sequence_shards,
    maximal_update,
)
