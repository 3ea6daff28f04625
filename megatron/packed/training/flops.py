"""Floating-point operations of one training step, and what the hardware can do.

Counts model operations only (no recomputation, no padding): a multiply-add is two operations,
the backward pass of a product costs twice its forward pass. Attention is counted as what causal
attention inside each segment needs, the sum over segments of l(l+1)/2 pairs, never as the square
of the pack length.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.packed.arguments import Config


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
        hidden = model.hidden_size
        attention, pair = _attention_products(config)
        # Each deeper prediction joins two hidden states, and has a layer and logits of its own.
        deeper = config.loss.mtp_depths
        layers = model.num_layers + deeper
        pattern = config.moe.expert_layers(model.num_layers)
        pattern += pattern[-1:] * deeper
        products = layers * attention + (1 + deeper) * hidden * padded_vocab_size
        products += deeper * 2 * hidden * hidden
        products += sum(_feed_forward_products(config, experts) for experts in pattern)
        windows = config.attention.layer_windows(model.num_layers)
        windows += windows[-1:] * deeper
        windowed = sum(window is not None for window in windows)
        return cls(
            per_token=3 * 2 * products,
            per_pair=3 * 2 * (layers - windowed) * pair,
            per_windowed_pair=3 * 2 * windowed * pair,
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
