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

import torch

from megatron.packed.arguments.model import ModelConfig


@dataclass(frozen=True)
class FlopsCounter:
    """Operations of a model, per token and per attended pair, forward and backward.

    Attributes:
        per_token: operations of every matrix product outside attention scores.
        per_pair: operations of attention for one (query, key) pair, over all heads and layers.
    """

    per_token: int
    per_pair: int

    @classmethod
    def from_config(cls, model: ModelConfig, padded_vocab_size: int) -> FlopsCounter:
        """Count from the model's shape.

        Args:
            model: a validated model configuration.
            padded_vocab_size: columns of the output layer.
        """
        hidden, head_dim = model.hidden_size, model.kv_channels
        query = model.num_attention_heads * head_dim
        key_value = 2 * model.num_query_groups * head_dim
        attention = hidden * (query + key_value) + query * hidden
        mlp = (3 if model.swiglu else 2) * hidden * model.ffn_hidden_size
        products = model.num_layers * (attention + mlp) + hidden * padded_vocab_size
        pair = model.num_layers * 2 * query
        return cls(per_token=3 * 2 * products, per_pair=3 * 2 * pair)

    def count(self, tokens: int, sum_squared_lengths: int) -> int:
        """Operations of a step.

        Args:
            tokens: real tokens processed.
            sum_squared_lengths: sum over segments of the squared length.
        """
        pairs = (sum_squared_lengths + tokens) // 2
        return tokens * self.per_token + pairs * self.per_pair


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
