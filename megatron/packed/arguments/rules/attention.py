"""Rules on positions, and on how attention projects and masks."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.packed.arguments.config import Config
from megatron.packed.errors import ConfigurationError

_ABSENT_POSITIONS = {
    "mrope": "its positions in pictures and films come with data that text alone hasn't",
    "relative": "its bias on scores is T5's, and the exact attention here never forms them",
}


def position_embedding(config: Config) -> Iterator[str]:
    kind = config.model.position_embedding_type
    if kind in _ABSENT_POSITIONS:
        yield (
            f"--position-embedding-type {kind} is refused: {_ABSENT_POSITIONS[kind]}; use rope, "
            "yarn, learned_absolute or none"
        )


def rotary_embedding(config: Config) -> Iterator[str]:
    model, latent = config.model, config.attention.multi_latent_attention
    kind = model.position_embedding_type
    if kind != "rope" and not latent and model.use_rope_scaling:
        yield (
            f"--use-rope-scaling: needs --position-embedding-type rope, not {kind}; change one of "
            "them"
        )
    if latent or kind not in ("rope", "yarn"):
        return
    rotated = int(model.kv_channels * model.rotary_percent)
    if rotated < 2 or rotated % 2:
        yield (
            f"--rotary-percent {model.rotary_percent:g}: rotates {rotated} of "
            f"{model.kv_channels} channels of a head, which must be an even number above 0; "
            "change it or --kv-channels"
        )
    if config.attention.rope_type not in (None, kind):
        yield (
            f"--rope-type {config.attention.rope_type}: chooses the frequencies of "
            f"--multi-latent-attention; with plain heads --position-embedding-type {kind} does"
        )


def yarn(config: Config) -> Iterator[str]:
    """YaRN blends frequencies over the channels of whole heads, in halves."""
    model, attention = config.model, config.attention
    latent = attention.multi_latent_attention
    if not (attention.rotates_by_yarn if latent else model.position_embedding_type == "yarn"):
        return
    where = "--rope-type yarn" if latent else "--position-embedding-type yarn"
    if model.rotary_percent != 1.0:
        yield f"--rotary-percent {model.rotary_percent:g}: {where} rotates whole heads; leave it 1"
    if model.rotary_interleaved and not latent:
        yield f"--rotary-interleaved: {where} rotates halves; leave it out"
    factor = model.rotary_seq_len_interpolation_factor
    if factor is not None and not latent:
        yield (
            f"--rotary-seq-len-interpolation-factor {factor}: {where} stretches the context by "
            "--rotary-scaling-factor; leave it out"
        )


def layers_without_rotary(config: Config) -> Iterator[str]:
    pattern = config.attention.no_rope_freq
    try:
        config.attention.no_rope_layers(config.model.num_layers)
    except ConfigurationError as error:
        yield f"--no-rope-freq {pattern}: {error}"
    if pattern is not None and config.attention.multi_latent_attention:
        yield (
            f"--no-rope-freq {pattern}: --multi-latent-attention rotates its position channels in "
            "every layer; leave one of them out"
        )


def windows(config: Config) -> Iterator[str]:
    attention = config.attention
    try:
        window = attention.window
    except ConfigurationError as error:
        yield f"--window-size {attention.window_size}: {error}"
        return
    try:
        attention.layer_windows(config.model.num_layers)
    except ConfigurationError as error:
        yield f"--window-attn-skip-freq {attention.window_attn_skip_freq}: {error}"
    if attention.window_attn_skip_freq is not None and window is None:
        yield (
            f"--window-attn-skip-freq {attention.window_attn_skip_freq}: needs --window-size; add "
            "it or leave this out"
        )


def latent_attention(config: Config) -> Iterator[str]:
    """What megatron-core's latent attention refuses, or would quietly leave out."""
    model, attention = config.model, config.attention
    if not attention.multi_latent_attention:
        return
    what = "--multi-latent-attention"
    for name, given, why in (
        ("--group-query-attention", model.group_query_attention, "gives every head its own keys"),
        ("--rotary-interleaved", model.rotary_interleaved, "pairs channels in its own way"),
        ("--use-rope-scaling", model.use_rope_scaling, "scales by --rotary-scaling-factor"),
        (
            "--rotary-seq-len-interpolation-factor",
            model.rotary_seq_len_interpolation_factor is not None,
            "scales by --rotary-scaling-factor",
        ),
        ("--attention-output-gate", attention.attention_output_gate, "has no gate"),
        ("--qk-l2-norm", attention.qk_l2_norm, "normalises its latents with --qk-layernorm"),
    ):
        if given:
            yield f"{name}: {what} {why}; leave one of them out"
    if attention.qk_pos_emb_head_dim % 2:
        yield (
            f"--qk-pos-emb-head-dim {attention.qk_pos_emb_head_dim}: channels are rotated in "
            "pairs; use an even number"
        )


def latents_over_tensor_parallel(config: Config) -> Iterator[str]:
    attention, size = config.attention, config.parallel.tensor_model_parallel_size
    if not attention.multi_latent_attention:
        return
    if attention.q_lora_rank is not None and attention.q_lora_rank % size:
        yield (
            f"--q-lora-rank {attention.q_lora_rank}: must be a multiple of "
            f"--tensor-model-parallel-size {size}; change one of them"
        )
    width = attention.kv_lora_rank + attention.qk_pos_emb_head_dim
    if width % size:
        yield (
            f"--kv-lora-rank {attention.kv_lora_rank}: with --qk-pos-emb-head-dim "
            f"{attention.qk_pos_emb_head_dim} makes {width} columns, which must be a multiple of "
            f"--tensor-model-parallel-size {size}; change one of them"
        )


def head_norms(config: Config) -> Iterator[str]:
    if config.attention.qk_l2_norm and config.model.qk_layernorm:
        yield "--qk-l2-norm and --qk-layernorm: choose one norm of queries and keys"


def softmax(config: Config) -> Iterator[str]:
    kind, rate = config.attention.softmax_type, config.model.attention_dropout
    if kind != "vanilla" and rate > 0:
        yield (
            f"--softmax-type {kind}: the kernel with dropout has the plain softmax alone; set "
            f"--attention-dropout 0.0, not {rate:g}"
        )


RULES = (
    position_embedding,
    rotary_embedding,
    yarn,
    layers_without_rotary,
    windows,
    latent_attention,
    latents_over_tensor_parallel,
    head_norms,
    softmax,
)
