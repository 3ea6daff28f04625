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

from megatron.packed.errors import ConfigurationError


class _Norm(Module):
    """What both norms share: the gain, its centring and its sequence-parallel mark.

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
        parameter = Parameter(
            torch.full(self.hidden_size, value, dtype=self.config.params_dtype)
        )
        parameter.sequence_parallel = self.sequence_parallel
        return parameter

    def _gain(self) -> Tensor:
        return self.weight + 1 if self.zero_centered_gamma else self.weight

    def extra_repr(self) -> str:
        """Width and epsilon, for printing the model."""
        return f"{self.hidden_size[0]}, eps={self.eps}"


class RMSNorm(_Norm):
    """``x / sqrt(mean(x^2) + eps) * gain``."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of ``x`` ``[..., hidden_size]``."""
        return F.rms_norm(x, self.hidden_size, self._gain(), self.eps)


class LayerNorm(_Norm):
    """``(x - mean(x)) / sqrt(var(x) + eps) * gain + bias``."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object
    ) -> None:
        super().__init__(config, hidden_size, eps)
        self.bias = self._parameter(0.0)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of ``x`` ``[..., hidden_size]``."""
        return F.layer_norm(x, self.hidden_size, self._gain(), self.bias, self.eps)


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
