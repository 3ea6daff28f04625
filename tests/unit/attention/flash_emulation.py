"""A stand-in for torch's variable-length flash operators: brute force, and strict on the contract.

Written from what `aten/src/ATen/native/transformers/cuda/flash_attn` checks and computes: masks are
aligned at the bottom right of each sequence; -1 is an unbounded side; a row that sees nothing gives
zeros and a log-sum-exp of +inf; the backward pass takes the output and log-sum-exp it is handed.
It computes in fp64 and answers in the dtype of its inputs (log-sum-exps: fp32, or fp64 for fp64,
which the real operators refuse).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class FlashEmulation:
    """Both operators.

    Attributes:
        strict_dtype: refuse what the real ones refuse, fp32 and fp64.
        calls: (left, right, sequences) of every forward call.
    """

    strict_dtype: bool = False
    calls: list[tuple[int, int, int]] = field(default_factory=list)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cum_seq_q: Tensor,
        cum_seq_k: Tensor,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float,
        window_size_left: int,
        window_size_right: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        assert dropout_p == 0.0 and return_debug_mask is False
        window = self._check(
            query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal,
            window_size_left, window_size_right,
        )  # fmt: skip
        self.calls.append((window_size_left, window_size_right, len(cum_seq_q) - 1))
        out = torch.full_like(query, torch.nan, dtype=torch.float64)
        lse = torch.full(query.shape[1::-1], torch.nan, dtype=torch.float64)
        for rows, keys, seen in _sequences(cum_seq_q, cum_seq_k, window):
            scores, _, v = _scores(query[rows], key[keys], value[keys], seen, scale)
            total = scores.logsumexp(dim=-1)
            blind = ~seen.any(dim=-1)
            weights = torch.where(blind[:, None], 0.0, torch.exp(scores - total.unsqueeze(-1)))
            out[rows] = torch.einsum("hqk,khd->qhd", weights, v)
            lse[:, rows] = torch.where(blind, torch.inf, total)
        nothing = torch.empty(0)
        return out.to(query.dtype), lse.to(_lse_dtype(query)), nothing, nothing, nothing

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor,
        cum_seq_k: Tensor,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        rng_state: Tensor,
        unused: Tensor,
        *,
        scale: float,
        window_size_left: int,
        window_size_right: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert dropout_p == 0.0
        assert rng_state.dtype == torch.uint64 and rng_state.shape == (2,) and unused.numel() == 0
        window = self._check(
            query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal,
            window_size_left, window_size_right,
        )  # fmt: skip
        assert grad_out.shape == out.shape == query.shape
        assert grad_out.dtype == out.dtype == query.dtype
        assert logsumexp.shape == query.shape[1::-1] and logsumexp.is_contiguous()
        assert logsumexp.dtype == _lse_dtype(query)
        grads = [torch.zeros_like(x, dtype=torch.float64) for x in (query, key, value)]
        heads, kv_heads = query.shape[1], key.shape[1]
        for rows, keys, seen in _sequences(cum_seq_q, cum_seq_k, window):
            scores, k, v = _scores(query[rows], key[keys], value[keys], seen, scale)
            weights = torch.exp(scores - logsumexp[:, rows].double().unsqueeze(-1))
            upstream, q = grad_out[rows].double(), query[rows].double()
            delta = (upstream * out[rows].double()).sum(dim=-1).t().unsqueeze(-1)
            slopes = (torch.einsum("qhd,khd->hqk", upstream, v) - delta) * weights * scale
            grads[0][rows] += torch.einsum("hqk,khd->qhd", slopes, k)
            for whole, piece in (
                (grads[1], torch.einsum("hqk,qhd->khd", slopes, q)),
                (grads[2], torch.einsum("hqk,qhd->khd", weights, upstream)),
            ):
                whole[keys] += piece.unflatten(1, (kv_heads, heads // kv_heads)).sum(dim=2)
        return tuple(x.to(query.dtype) for x in grads)

    def _check(self, q, k, v, cu_q, cu_k, max_q, max_k, is_causal, left, right):
        for x in (q, k, v):
            assert x.dim() == 3 and x.stride(2) == 1 and x.dtype == q.dtype
            assert x.shape[2] == q.shape[2] and x.shape[2] % 8 == 0 and x.shape[2] <= 256
        assert not self.strict_dtype or q.dtype in (torch.bfloat16, torch.float16)
        assert k.shape == v.shape and q.shape[1] % k.shape[1] == 0
        assert type(max_q) is int and type(max_k) is int
        for x, cu, most in ((q, cu_q, max_q), (k, cu_k, max_k)):
            assert cu.dtype == torch.int32 and cu.dim() == 1 and cu.is_contiguous()
            lengths = cu.diff()
            assert cu[0] == 0 and cu[-1] == len(x) and len(cu) == len(cu_q)
            assert lengths.min() > 0, "an empty sequence"
            assert lengths.max() == most
        if is_causal and max_q > 1:
            right = 0
        left, right = (-1 if side >= max_k else side for side in (left, right))
        assert left >= -1 and right >= -1
        return left, right


def _lse_dtype(query: Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)


def _sequences(
    cu_q: Tensor, cu_k: Tensor, window: tuple[int, int]
) -> Iterator[tuple[slice, slice, Tensor]]:
    left, right = window
    for index in range(len(cu_q) - 1):
        rows, keys = (slice(*cu[index : index + 2].tolist()) for cu in (cu_q, cu_k))
        m, n = rows.stop - rows.start, keys.stop - keys.start
        here, there = torch.arange(m)[:, None] + n - m, torch.arange(n)
        seen = torch.ones(m, n, dtype=torch.bool)
        if left >= 0:
            seen &= there >= here - left
        if right >= 0:
            seen &= there <= here + right
        yield rows, keys, seen


def _scores(q, k, v, seen, scale):
    """Masked scores `[heads, m, n]`, and keys and values with a head for each query head."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(groups, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    return scores.masked_fill(~seen, -torch.inf), k, v
