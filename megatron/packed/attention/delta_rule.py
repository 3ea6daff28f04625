"""The gated delta rule: a recurrence that stands in for attention, in chunks of matrix products.

Each head keeps a matrix S that forgets, and is corrected towards what a key should read:

    S_t = exp(g_t) S_{t-1} + k_t u_t^T,   u_t = beta_t (v_t - (exp(g_t) S_{t-1})^T k_t)
    o_t = S_t^T q_t

Within a chunk the corrections u solve a triangular system, so that the recurrence runs over chunks
alone. Source: Yang, Kautz, Hatamizadeh, Gated Delta Networks (https://arxiv.org/abs/2412.06464).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 64


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, chunk: int = CHUNK
) -> Tensor:
    """Run the recurrence over a batch of sequences, each from an empty state.

    Args:
        query: ``[B, T, heads, dk]``, scaled.
        key: ``[B, T, heads, dk]``.
        value: ``[B, T, heads, dv]``.
        log_decay: ``[B, T, heads]``, g, at most 0.
        beta: ``[B, T, heads]``, in (0, 1).
        chunk: Tokens that one triangular system covers.

    Returns:
        ``[B, T, heads, dv]`` in fp32 (fp64 for fp64 input).
    """
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    length = query.shape[1]
    padding = -length % chunk

    def chunked(x: Tensor) -> Tensor:
        """``[B, T, heads, ...]`` to ``[chunks, B, heads, chunk, ...]``, zeros at the end."""
        x = F.pad(x.to(exact), (0, 0) * (x.dim() - 2) + (0, padding))
        return x.unflatten(1, (-1, chunk)).transpose(2, 3).transpose(0, 1)

    q, k, v = chunked(query), chunked(key), chunked(value)
    b = chunked(beta.unsqueeze(-1))
    # Sums of the chunk so far, [chunks, B, heads, chunk, 1], in fp64: differences of large ones.
    decay = chunked(log_decay.unsqueeze(-1)).double().cumsum(dim=-2)
    # exp(g_i + ... + g_{j+1}) of every pair, j <= i; the exponent of the rest could overflow.
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    between = (decay - decay.transpose(-1, -2)).masked_fill(~causal, -torch.inf).exp().to(exact)
    system = (b * (k @ k.transpose(-1, -2)) * between).tril(-1)  # ones on the diagonal
    reads = (q @ k.transpose(-1, -2)) * between
    since_start = decay.exp().to(exact)
    until_end = (decay[..., -1:, :] - decay).exp().to(exact)
    # Corrections for an empty state, and what a state takes away from them.
    solved = torch.linalg.solve_triangular(
        system,
        torch.cat((b * v, b * since_start * k), dim=-1),
        upper=False,
        unitriangular=True,
    )
    fresh, carried = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    state = q.new_zeros(*q.shape[1:3], k.shape[-1], v.shape[-1])
    outputs = []
    for n in range(q.shape[0]):
        corrections = fresh[n] - carried[n] @ state
        outputs.append((q[n] * since_start[n]) @ state + reads[n] @ corrections)
        state = state * since_start[n, :, :, -1:] + (k[n] * until_end[n]).mT @ corrections
    out = torch.stack(outputs).transpose(0, 1).transpose(2, 3).flatten(1, 2)
    return out[:, :length]


def causal_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Each channel's own causal filter over a batch of sequences.

    Args:
        x: ``[B, T, channels]``.
        weight: ``[channels, taps]``, the last tap on the token itself.

    Returns:
        ``[B, T, channels]``.
    """
    taps = weight.shape[1]
    padded = F.pad(x.transpose(1, 2), (taps - 1, 0))
    return F.conv1d(padded, weight.unsqueeze(1), groups=x.shape[-1]).transpose(1, 2)
