"""Rotary position embedding whose positions come from the batch, for packs and rows alike.

megatron-core's embedding guesses positions from the layout: it counts 0, 1, 2, ... over a row, and
in a pack it restarts at each padded boundary unless the pack happens to be as long as its longest
segment. Here the model hands over position ids; the embedding turns them into one plain tensor of
cosines and sines, once per micro-batch, and all layers share it. It is a plain tensor because
activation recomputation saves it among its inputs.

Source: RoFormer (https://arxiv.org/abs/2104.09864);
``megatron/core/models/common/embeddings/rope_utils.py`` (0.16.1) for the numerics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.common.embeddings.rope_utils import (
    apply_rotary_pos_emb as upstream_apply_rotary_pos_emb,
)
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from megatron.packed.accelerator import cpu_ops


class PositionIndexedRotaryEmbedding(RotaryEmbedding):
    """Drop-in for `RotaryEmbedding` inside a GPT model; constructor arguments are upstream's.

    The model's forward runs inside :meth:`positions`::

        with self.rotary_pos_emb.positions(position_ids):
            return super().forward(...)

    Frequencies (base, percent, interpolation, Llama-3 scaling) are upstream's own.
    """

    inv_freq: Tensor
    amplitude: float = 1.0
    _position_ids: Tensor | None = None

    @contextmanager
    def positions(self, position_ids: Tensor) -> Iterator[None]:
        """Set the position ids of the micro-batch for the forward passes inside.

        Args:
            position_ids: ``[B, S]`` or ``[1, T]``, any integer dtype; each token's position in
                its own document. Values at padding slots do not matter.
        """
        if position_ids.dim() != 2:
            raise ValueError(
                f"position ids of shape {tuple(position_ids.shape)}: [rows, tokens] is needed"
            )
        previous, self._position_ids = self._position_ids, position_ids
        try:
            yield
        finally:
            self._position_ids = previous

    def get_rotary_seq_len(self, *args: object, **kwargs: object) -> int:
        """Number of token slots; positions themselves come from the batch."""
        return self._positions_or_error().shape[1]

    def forward(
        self, max_seq_len: int = 0, offset: int = 0, packed_seq: bool = False, cp_group=None
    ) -> Tensor:
        """Cosines and sines at the current position ids.

        Args:
            max_seq_len: Ignored, as are the other arguments of upstream's signature.
            offset: Ignored.
            packed_seq: Ignored: packs and rows are treated alike.
            cp_group: Ignored: position ids are those of the tokens this rank holds.

        Returns:
            ``[S, B, 2, rotary_dim / 2]`` fp32: cosines, then sines, times the amplitude. One
            frequency serves two channels, so half the rotary width is stored.
        """
        position_ids = self._positions_or_error()
        if self.inv_freq.device != position_ids.device:
            self.inv_freq = self.inv_freq.to(position_ids.device)
        positions = position_ids.t().to(self.inv_freq.dtype)
        if self.seq_len_interpolation_factor is not None:
            positions = positions * (1 / self.seq_len_interpolation_factor)
        angles = positions.unsqueeze(-1) * self.inv_freq
        waves = torch.stack((angles.cos(), angles.sin()), dim=2)
        return waves if self.amplitude == 1.0 else waves * self.amplitude

    def _positions_or_error(self) -> Tensor:
        if self._position_ids is None:
            raise RuntimeError(
                "rotary embedding without position ids: run the model's forward inside "
                "rotary_pos_emb.positions(position_ids)"
            )
        return self._position_ids


@dataclass(frozen=True)
class Yarn:
    """How YaRN stretches a context.

    Attributes:
        factor: by how much.
        original_length: tokens of the context that is stretched.
        beta_fast: channels that turn more often in it keep their frequency.
        beta_slow: channels that turn less often are interpolated.
        mscale: scale of the rotated channels.
        mscale_all_dim: scale of all channels, by which that of the rotated ones is divided.
        round_to_int: round the channels between which frequencies blend to whole ones.
    """

    factor: float
    original_length: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    round_to_int: bool = True

    def frequencies(self, width: int, base: float) -> Tensor:
        """Angle per position of every pair of channels: fp32 ``[width / 2]``.

        Args:
            width: rotated channels.
            base: base of the rotary frequencies.
        """
        powers = base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
        low, high = (
            self._channel(self.beta_fast, width, base),
            self._channel(self.beta_slow, width, base),
        )
        if self.round_to_int:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        if low == high:
            high += 0.001  # a step in place of a ramp
        ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        keep = 1.0 - ramp
        return 1.0 / (self.factor * powers) * (1 - keep) + 1.0 / powers * keep

    def _channel(self, turns: float, width: int, base: float) -> float:
        """Pair of channels that turns so often in the original context."""
        ratio = self.original_length / (turns * 2 * math.pi)
        return width * math.log(ratio) / (2 * math.log(base))

    @property
    def amplitude(self) -> float:
        """Factor of cosines and sines (the paper's attention factor)."""
        return yarn_scale(self.factor, self.mscale) / yarn_scale(self.factor, self.mscale_all_dim)


def yarn_scale(factor: float, mscale: float) -> float:
    """``0.1 * mscale * ln(factor) + 1``, or 1 where nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


class YarnPositionIndexedRotaryEmbedding(PositionIndexedRotaryEmbedding):
    """Rotary embedding with YaRN's frequencies.

    Args:
        kv_channels: rotated channels, all of a head.
        yarn: how the context is stretched.
        rotary_base: base of the frequencies.
        **kwargs: as `RotaryEmbedding`.

    Source: YaRN (https://arxiv.org/abs/2309.00071);
    ``megatron/core/models/common/embeddings/yarn_rotary_pos_embedding.py`` (0.16.1).
    """

    def __init__(
        self, kv_channels: int, *, yarn: Yarn, rotary_base: float = 10000, **kwargs: Any
    ) -> None:
        super().__init__(kv_channels, rotary_percent=1.0, rotary_base=rotary_base, **kwargs)
        self.inv_freq = yarn.frequencies(kv_channels, rotary_base).to(self.inv_freq.device)
        self.amplitude = yarn.amplitude


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    config,
    cu_seqlens: Tensor | None = None,
    mscale: float = 1.0,
    cp_group=None,
    mla_rotary_interleaved: bool | None = None,
) -> Tensor:
    """Rotate queries or keys; takes the place of megatron-core's function of this name.

    Args:
        t: ``[S, B, heads, d]`` or ``[T, heads, d]``.
        freqs: What :class:`PositionIndexedRotaryEmbedding` returns, ``[S, B, 2, r/2]`` (``B`` may
            be 1 for all rows; ``[T, 1, 2, r/2]`` for a pack). Any other layout, which has size 1
            in dimension 2, goes to megatron-core's function unchanged.
        config: Transformer configuration; ``rotary_interleaved`` and ``multi_latent_attention``
            are read. Latent attention rotates neighbouring channels too: upstream first brings
            them apart, which changes neither scores nor what the weights mean.
        cu_seqlens: Not needed here: every token has its own position.
        mscale: Factor of cosines and sines (YaRN's concentration).
        cp_group: Not needed here.
        mla_rotary_interleaved: Whether the caller is latent attention, from megatron-core 0.17 on;
            None where it doesn't say, and the configuration does.

    Returns:
        Rotated tensor like ``t``, contiguous; channels from ``r`` on are passed through.
    """
    if freqs.dim() != 4 or freqs.shape[2] != 2:
        said: dict[str, Any] = {}
        if mla_rotary_interleaved is not None:
            said["mla_rotary_interleaved"] = mla_rotary_interleaved
        return upstream_apply_rotary_pos_emb(
            t, freqs, config, cu_seqlens=cu_seqlens, mscale=mscale, cp_group=cp_group, **said
        )
    rows = 1 if t.dim() == 3 else t.shape[1]
    fits = t.shape[0] == freqs.shape[0] and freqs.shape[1] in (1, rows)
    if not fits or 2 * freqs.shape[3] > t.shape[-1]:
        raise ValueError(
            f"rotary embedding {tuple(freqs.shape)} does not fit queries or keys "
            f"{tuple(t.shape)}: position ids must cover exactly the tokens of the micro-batch"
        )
    if mscale != 1.0:
        freqs = freqs * mscale
    latent = mla_rotary_interleaved
    if latent is None:
        latent = config.multi_latent_attention
    return _Rotate.apply(t, freqs, config.rotary_interleaved or latent)


class _Rotate(torch.autograd.Function):
    """Rotation by +angle; its gradient is the rotation by -angle of the incoming gradient."""

    @staticmethod
    def forward(ctx, t, freqs, interleaved):
        ctx.save_for_backward(freqs)
        ctx.interleaved = interleaved
        return _rotate(t, freqs, interleaved, inverse=False)

    @staticmethod
    def backward(ctx, grad):
        (freqs,) = ctx.saved_tensors
        return _rotate(grad, freqs, ctx.interleaved, inverse=True), None, None


def _rotate(t: Tensor, freqs: Tensor, interleaved: bool, *, inverse: bool) -> Tensor:
    out = torch.empty_like(t, memory_format=torch.contiguous_format)
    native = cpu_ops.suitable(t, freqs)
    if native is not None and t.numel() and freqs.is_contiguous():
        tokens = _as_tokens(t)
        native.rotate(
            tokens.data_ptr(),
            out.data_ptr(),
            freqs.data_ptr(),
            *tokens.shape,
            freqs.shape[3],
            tokens.shape[0] // (freqs.shape[0] * freqs.shape[1]),
            *tokens.stride()[:2],
            interleaved,
            inverse,
            cpu_ops.threads(),
        )
        return out
    _rotate_with_torch(t, out, freqs, interleaved, -1 if inverse else 1)
    return out


def _as_tokens(t: Tensor) -> Tensor:
    """``[tokens, heads, width]``, unit stride in the last dimension, without a copy if it can."""
    tokens = t if t.dim() == 3 else t.reshape(-1, *t.shape[2:])
    return tokens if tokens.stride(2) == 1 else tokens.contiguous()


def _rotate_with_torch(t: Tensor, out: Tensor, freqs: Tensor, interleaved: bool, sign: int) -> None:
    """Four passes into ``out``, no concatenation."""
    cos, sin = freqs.to(t.dtype).unbind(dim=2)
    if t.dim() == 3:
        cos, sin = cos.flatten(0, 1), sin.flatten(0, 1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    half = cos.shape[-1]
    (a, b), (out_a, out_b) = (_pairs(x, half, interleaved) for x in (t, out))
    torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin, value=sign)
    if 2 * half < t.shape[-1]:
        out[..., 2 * half :] = t[..., 2 * half :]


def _pairs(x: Tensor, half: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    return x[..., :half], x[..., half : 2 * half]
