"""Floating-point operations of one training step, and what the hardware can do.

Counts model operations only (no recomputation, no padding): a multiply-add is two operations,
the backward pass of a product costs twice its forward pass. Attention is counted as what causal
attention inside each segment needs, the sum over segments of l(l+1)/2 pairs, never as the square
of the pack length. A recurrence in place of attention has no pairs: it is counted token by token,
as upstream counts it (`num_floating_point_operations` of megatron/training/training.py).
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.packed.arguments import Config
from megatron.packed.arguments.heterogeneous import LayerShape


@dataclass(frozen=True)
class FlopsCounter:
    """Operations of a model, per token and per attended pair, forward and backward.

    Attributes:
        per_token: operations of every matrix product outside attention scores.
        per_pair: operations of attention for one (query, key) pair, over all heads and layers
            that see their whole segment.
        per_windowed_pair: those of layers with a sliding window.
    """

    per_token: int
    per_pair: int
    per_windowed_pair: int = 0

    @classmethod
    def from_config(cls, config: Config, padded_vocab_size: int) -> FlopsCounter:
        """Count from the model's shape.

        Args:
            config: a validated configuration.
            padded_vocab_size: columns of the output layer.
        """
        model = config.model
        # Each deeper prediction joins two hidden states, and has a layer and logits of its own.
        deeper = config.loss.mtp_depths
        layers = config.moe.expert_layers(model.num_layers)
        layers += layers[-1:] * deeper
        shapes = config.heterogeneous.layers(model.hidden_size, model.num_attention_heads)
        windows = config.attention.layer_windows(model.num_layers)
        windows += windows[-1:] * deeper
        per_token = (1 + deeper) * model.hidden_size * padded_vocab_size
        per_token += deeper * 2 * model.hidden_size**2
        linear = config.linear_attention.linear_layers(model.num_layers)
        linear += (False,) * deeper  # predictions attend
        pairs = narrow = 0
        for number, (experts, window) in enumerate(zip(layers, windows, strict=True)):
            if shapes is None:
                attention, pair = (
                    (_recurrence_products(config), 0)
                    if linear[number]
                    else _attention_products(config)
                )
                products = attention + _feed_forward_products(config, experts)
            else:
                products, pair = _products_of(shapes[number], config)
            per_token += products
            if window is None:
                pairs += pair
            else:
                narrow += pair
        return cls(
            per_token=3 * 2 * per_token, per_pair=3 * 2 * pairs, per_windowed_pair=3 * 2 * narrow
        )

    def count(self, tokens: int, sum_squared_lengths: int, windowed_pairs: int = 0) -> int:
        """Operations of a step.

        Args:
            tokens: real tokens processed.
            sum_squared_lengths: sum over segments of the squared length.
            windowed_pairs: query-key pairs, a head, of a layer with a sliding window, see
                `attended_pairs`.
        """
        pairs = (sum_squared_lengths + tokens) // 2
        attention = pairs * self.per_pair + windowed_pairs * self.per_windowed_pair
        return tokens * self.per_token + attention


def _feed_forward_products(config: Config, experts: bool) -> int:
    """Multiply-adds of a token in one layer: of the experts, those that it is sent to."""
    model, moe = config.model, config.moe
    hidden, matrices = model.hidden_size, 3 if model.gated else 2
    if not experts:
        return matrices * hidden * model.ffn_hidden_size
    assert moe.num_experts is not None
    shared = moe.moe_shared_expert_intermediate_size or 0
    width = moe.moe_router_topk * moe.moe_ffn_hidden_size + shared
    return matrices * hidden * width + hidden * (moe.num_experts + moe.moe_shared_expert_gate)


def _products_of(shape: LayerShape, config: Config) -> tuple[int, int]:
    """Multiply-adds of a layer that differs: per token outside scores, per pair in them."""
    model, square = config.model, config.model.hidden_size**2
    per_token = square if shape.linear_attention else 0
    pair = 0
    if shape.attention and not shape.linear_attention:
        groups = shape.query_groups or model.num_query_groups
        attention, pair = _attention_products(config.with_values({"num_query_groups": groups}))
        per_token += attention
    if shape.linear_feed_forward:
        per_token += square
    elif shape.feed_forward:
        width = shape.ffn_hidden_size or model.ffn_hidden_size
        per_token += (3 if model.gated else 2) * model.hidden_size * width
    return per_token, pair


def attended_pairs(lengths: NDArray[np.int64], window: int) -> int:
    """Query-key pairs, a head, of causal attention in a sliding window.

    Args:
        lengths: int64 ``[n]``, tokens of each segment.
        window: tokens to the left that stay visible besides the query itself.
    """
    reach = window + 1
    inside = np.minimum(lengths, reach)
    return int((inside * (inside + 1) // 2 + (lengths - inside) * reach).sum())


def _attention_products(config: Config) -> tuple[int, int]:
    """Multiply-adds of one layer's attention: per token in projections, per pair in scores."""
    model, attention = config.model, config.attention
    hidden, heads = model.hidden_size, model.num_attention_heads
    if not attention.multi_latent_attention:
        query = heads * model.kv_channels
        gate = query if attention.attention_output_gate else 0
        key_value = 2 * model.num_query_groups * model.kv_channels
        return hidden * (query + gate + key_value) + query * hidden, 2 * query
    query, value = heads * attention.query_width, heads * attention.v_head_dim
    rank = attention.kv_lora_rank
    products = (
        hidden * query
        if attention.q_lora_rank is None
        else attention.q_lora_rank * (hidden + query)
    )
    products += hidden * (rank + attention.qk_pos_emb_head_dim)
    products += rank * (heads * attention.qk_head_dim + value)
    return products + value * hidden, query + value


def _recurrence_products(config: Config) -> int:
    """Multiply-adds of a token in one layer of Gated DeltaNet.

    Of the rule itself, a token and head of values take three products of the state with a key or a
    query (what the key reads, the correction, what the query reads) and one of keys among
    themselves.
    """
    key, value = config.get("linear_key_head_dim"), config.get("linear_value_head_dim")
    heads = config.get("linear_num_value_heads")
    keys, values = config.get("linear_num_key_heads") * key, heads * value
    hidden = config.model.hidden_size
    projections = hidden * (2 * keys + 2 * values + 2 * heads) + values * hidden
    convolution = config.get("linear_conv_kernel_dim") * (2 * keys + values)
    return projections + convolution + heads * (key * key + 3 * key * value)


def measure_gemm_peak(
    device: torch.device, dtype: torch.dtype, *, size: int = 1024, repeats: int = 7
) -> float:
    """Operations per second that a square matrix product reaches here, now.

    Args:
        device: where to measure.
        dtype: operand type.
        size: rows and columns; pick 8192 on a GPU.
        repeats: timed products; the median counts.

    Returns:
        FLOP/s of this process.
    """
    left = torch.randn(size, size, device=device, dtype=dtype)
    right = torch.randn(size, size, device=device, dtype=dtype)
    synchronize = torch.cuda.synchronize
    seconds = []
    for _ in range(repeats + 2):
        synchronize()
        start = time.perf_counter()
        torch.mm(left, right)
        synchronize()
        seconds.append(time.perf_counter() - start)
    return 2.0 * size**3 / statistics.median(seconds[2:])
