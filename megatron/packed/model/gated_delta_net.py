"""Gated DeltaNet: a layer's attention replaced by a recurrence, segment by segment.

The parameters and their start are megatron-core's (``megatron/core/ssm/gated_delta_net.py``,
0.16.1), which itself refuses packed sequences and needs CUDA packages. One thing differs: the rows
of the input projection and of the convolution are ordered by key head (q, k, v, z, beta, alpha of
each), not by kind, so that any tensor-parallel split holds whole heads and every split computes the
same.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from megatron.packed.attention.core_attention import boundaries_of_rows, layout_of_pack
from megatron.packed.attention.delta_rule import causal_convolution, gated_delta_rule
from megatron.packed.attention.segments import SegmentLayout, row_layout

_SPLIT = ("conv_weight", "dt_bias", "A_log")


class GatedDeltaNet(MegatronModule):
    """Gated DeltaNet in place of self-attention; the arguments of megatron-core's contract.

    Args:
        config: Transformer configuration (``linear_*``).
        layer_number: Global 1-based layer number.
        pg_collection: Gives the tensor-parallel group.
        **unused: What attention alone needs.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        **unused: object,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.tp_group = pg_collection.tp
        share = self.tp_group.size()
        self.key_width, self.value_width = config.linear_key_head_dim, config.linear_value_head_dim
        self.values_per_key = config.linear_num_value_heads // config.linear_num_key_heads
        self.key_heads = config.linear_num_key_heads // share
        # Of one key head: q, k, and v, z, beta, alpha of its value heads.
        mixed = 2 * self.key_width + self.values_per_key * self.value_width
        self.parts = (mixed, self.values_per_key * self.value_width, *[self.values_per_key] * 2)
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            sum(self.parts) * config.linear_num_key_heads,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.tp_group,
        )
        value_heads = self.key_heads * self.values_per_key
        self.conv_weight = self._split(self.key_heads * mixed, config.linear_conv_kernel_dim)
        self.dt_bias, self.A_log = self._split(value_heads), self._split(value_heads)
        centred = config.layernorm_zero_centered_gamma
        self.norm_weight = self._parameter(self.value_width)
        self.norm_weight.data.fill_(0.0 if centred else 1.0)
        self.norm_bias = None
        if config.normalization == "LayerNorm":
            self.norm_bias = self._parameter(self.value_width)
            self.norm_bias.data.zero_()
        self.out_proj = RowParallelLinear(
            value_heads * share * self.value_width,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=self.tp_group,
        )

    def _parameter(self, *shape: int) -> Parameter:
        device = torch.cuda.current_device()
        return Parameter(torch.ones(shape, dtype=self.config.params_dtype, device=device))

    def _split(self, *shape: int) -> Parameter:
        parameter = self._parameter(*shape)
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        return parameter

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Mix tokens of each segment.

        Args:
            hidden_states: ``[S, B, hidden]``, or a pack ``[T, 1, hidden]``; this rank's share of
                it with sequence parallelism.
            attention_mask: Boundaries of segments inside rows, as `PackedCoreAttention` takes them.
            packed_seq_params: Boundaries of a pack.
            **unused: Positions, which a recurrence has of itself.

        Returns:
            Of the shape of ``hidden_states``, and no bias.
        """
        projected, _ = self.in_proj(hidden_states)
        sequence, rows = projected.shape[:2]
        layout = _layout(sequence, rows, attention_mask, packed_seq_params)
        stream = projected.transpose(0, 1).reshape(sequence * rows, -1)
        width = self.key_heads * self.values_per_key * self.value_width
        mixed = stream.new_zeros(sequence * rows, width)
        for run in layout.runs:
            place = _places(run.start, run.length, run.count, run.stride, stream.device)
            out = self._mix(stream[place]).to(stream.dtype)
            mixed = mixed.index_copy(0, place.flatten(), out.flatten(0, 1))
        out, _ = self.out_proj(mixed.view(rows, sequence, width).transpose(0, 1))
        return out, None

    def _mix(self, x: Tensor) -> Tensor:
        """A batch of segments: ``[B, T, projected]`` to ``[B, T, value heads * dv]``."""
        x = x.unflatten(-1, (self.key_heads, -1))
        qkv, z, beta, alpha = x.split(self.parts, dim=-1)
        qkv = F.silu(causal_convolution(qkv.flatten(-2), self.conv_weight))
        qkv = qkv.unflatten(-1, (self.key_heads, -1))
        each = self.values_per_key
        q, k, v = qkv.split((self.key_width, self.key_width, each * self.value_width), dim=-1)
        q, k = (_unit(y).repeat_interleave(each, dim=2) for y in (q, k))
        v, z = (y.reshape(*y.shape[:2], -1, self.value_width) for y in (v, z))
        exact = torch.float64 if x.dtype == torch.float64 else torch.float32
        step = F.softplus(alpha.flatten(-2).to(exact) + self.dt_bias.to(exact))
        decay = -self.A_log.to(exact).exp() * step
        scale = self.key_width**-0.5
        y = gated_delta_rule(q * scale, k, v, decay, beta.flatten(-2).to(exact).sigmoid())
        return (self._norm(y) * F.silu(z.to(exact))).flatten(-2)

    def _norm(self, y: Tensor) -> Tensor:
        """RMSNorm or LayerNorm of each head's output."""
        # Every rank has its own heads and so its own part of these parameters' gradients.
        gain = copy_to_tensor_model_parallel_region(self.norm_weight, group=self.tp_group).to(y)
        if self.config.layernorm_zero_centered_gamma:
            gain = gain + 1
        if self.norm_bias is None:
            mean_square = y.square().mean(-1, keepdim=True)
            return y * torch.rsqrt(mean_square + self.config.layernorm_epsilon) * gain
        bias = copy_to_tensor_model_parallel_region(self.norm_bias, group=self.tp_group).to(y)
        return F.layer_norm(y, (self.value_width,), gain, bias, self.config.layernorm_epsilon)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Describe the parameters to megatron-core's distributed checkpoints."""
        own = dict(self.named_parameters(recurse=False))
        sharded = make_sharded_tensors_for_checkpoint(
            own, prefix, dict.fromkeys(_SPLIT, 0), sharded_offsets
        )
        for name, child in self.named_children():
            sharded.update(
                sharded_state_dict_default(child, f"{prefix}{name}.", sharded_offsets, metadata)
            )
        return sharded


def _unit(x: Tensor) -> Tensor:
    """Vectors of length 1, in fp32 at least."""
    x = x if x.dtype == torch.float64 else x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _layout(
    sequence: int, rows: int, boundaries: Tensor | None, params: PackedSeqParams | None
) -> SegmentLayout:
    if params is not None and params.qkv_format == "thd":
        return layout_of_pack(params, sequence)
    return row_layout(
        rows, sequence, None if boundaries is None else boundaries_of_rows(boundaries)
    )


def _places(start: int, length: int, count: int, stride: int, device: torch.device) -> Tensor:
    """Slots of a run's segments in the flattened stream, ``[count, length]``."""
    first = start + stride * torch.arange(count, device=device)
    return first[:, None] + torch.arange(length, device=device)[None, :]
