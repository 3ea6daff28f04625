"""RMSNorm and LayerNorm behind megatron-core's norm contract.

megatron-core's torch norm refuses sequence parallelism and zero-centred gains, and its fused one
needs apex. These run anywhere, and mark their parameters for the sequence-parallel all-reduce.

Source: ``megatron/core/transformer/torch_norm.py`` and ``fusions/fused_layer_norm.py`` (0.16.1);
RMSNorm (https://arxiv.org/abs/1910.07467).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module, Parameter

from megatron.packed.accelerator import cpu_ops
from megatron.packed.errors import ConfigurationError

_PARTIAL_SUMS = 64


class _Norm(Module):
    """What both norms share: the gain, its centring and its sequence-parallel mark.

    The result has the dtype of the weights: with ``--fp32-residual-connection`` what comes in is
    fp32 and the linear layer that follows is bf16.

    Args:
        config: Transformer configuration (``layernorm_zero_centered_gamma``,
            ``sequence_parallel``, ``params_dtype``).
        hidden_size: Width of the normalised dimension.
        eps: Added to the variance.
        **unused: ``persist_layer_norm``, ``zero_centered_gamma`` and ``normalization`` of
            megatron-core's contract; the configuration decides, as it does there.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object
    ) -> None:
        super().__init__()
        self.config = config
        self.hidden_size = (hidden_size,)
        self.eps = eps
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        self.sequence_parallel = config.sequence_parallel
        self.weight = self._parameter(0.0 if self.zero_centered_gamma else 1.0)

    def _parameter(self, value: float) -> Parameter:
        parameter = Parameter(torch.full(self.hidden_size, value, dtype=self.config.params_dtype))
        parameter.sequence_parallel = self.sequence_parallel
        return parameter

    def _gain(self) -> Tensor:
        weight = self.weight.to(_accumulation_dtype(self.weight))
        return weight + 1 if self.zero_centered_gamma else weight

    def extra_repr(self) -> str:
        """Width and epsilon, for printing the model."""
        return f"{self.hidden_size[0]}, eps={self.eps}"


class RMSNorm(_Norm):
    """``x / sqrt(mean(x^2) + eps) * gain``."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of ``x`` ``[..., hidden_size]``."""
        return _RMSNormFunction.apply(x, self._gain(), self.eps).to(self.weight.dtype)


class L2Norm(Module):
    """``x / sqrt(mean(x^2) + eps)``: RMSNorm without a gain.

    Args:
        config: Transformer configuration; not needed.
        hidden_size: Width of the normalised dimension.
        eps: Added to the mean square.
        **unused: Other arguments of megatron-core's contract.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: object
    ) -> None:
        super().__init__()
        self.eps = eps
        ones = torch.ones(hidden_size, device=torch.cuda.current_device())
        self.register_buffer("_ones", ones, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of ``x`` ``[..., hidden_size]``."""
        gain = self._ones.to(_accumulation_dtype(x))
        return _RMSNormFunction.apply(x, gain, self.eps)


class LayerNorm(_Norm):
    """``(x - mean(x)) / sqrt(var(x) + eps) * gain + bias``."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object
    ) -> None:
        super().__init__(config, hidden_size, eps)
        self.bias = self._parameter(0.0)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of ``x`` ``[..., hidden_size]``."""
        # torch sums bf16 gradients of the gain in bf16 on CPU, 2 % wrong over 300 rows.
        dtype = _accumulation_dtype(x)
        out = F.layer_norm(
            x.to(dtype), self.hidden_size, self._gain().to(dtype), self.bias.to(dtype), self.eps
        )
        return out.to(self.weight.dtype)


class _RMSNormFunction(torch.autograd.Function):
    """torch's own RMSNorm has no fused backward on CPU and takes ten passes there.

    Saves the input and one factor per row.
    """

    @staticmethod
    def forward(ctx, x, gain, eps):
        native = cpu_ops.suitable(x, gain)
        width = x.shape[-1]
        if native is not None:
            rows = x.reshape(-1, width).contiguous()
            out = torch.empty_like(rows)
            rstd = rows.new_empty(rows.shape[0], 1)
            pointers = (y.data_ptr() for y in (rows, gain, out, rstd))
            native.rms_norm(*pointers, *rows.shape, eps, cpu_ops.threads())
        else:
            rows = x.reshape(-1, width)
            work = rows.to(_accumulation_dtype(x))
            rstd = work.square().mean(dim=1, keepdim=True).add_(eps).rsqrt_()
            out = (work * rstd * gain).to(x.dtype)
        ctx.save_for_backward(rows, gain, rstd)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx, grad_out):
        rows, gain, rstd = ctx.saved_tensors
        grad = grad_out.reshape(rows.shape)
        native = cpu_ops.suitable(rows, gain, grad)
        if native is not None:
            grad = grad.contiguous()
            dx = torch.empty_like(rows)
            # A fixed number of partial sums: the result does not depend on the thread count.
            partial = gain.new_zeros(_PARTIAL_SUMS, rows.shape[1])
            pointers = (y.data_ptr() for y in (grad, rows, gain, rstd, dx, partial))
            native.rms_norm_backward(*pointers, *rows.shape, _PARTIAL_SUMS, cpu_ops.threads())
            return dx.view(grad_out.shape), partial.sum(dim=0), None
        normed = rows.to(rstd.dtype) * rstd
        grad = grad.to(rstd.dtype)
        dgain = (grad * normed).sum(dim=0).to(gain.dtype)
        grad = grad * gain
        mean = (grad * normed).mean(dim=1, keepdim=True)
        dx = (grad - normed * mean).mul_(rstd).to(rows.dtype)
        return dx.view(grad_out.shape), dgain, None


def _accumulation_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def build_norm(
    config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object
) -> _Norm:
    """The norm that ``config.normalization`` names; usable as a module in layer specs.

    Raises:
        ConfigurationError: For a normalization other than LayerNorm and RMSNorm.
    """
    kinds = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
    if config.normalization not in kinds:
        raise ConfigurationError(
            f"--normalization {config.normalization} is not supported: use {' or '.join(kinds)}"
        )
    return kinds[config.normalization](config, hidden_size, eps)
