"""The core attention module that megatron-core's layers call: causal inside segments, never S x S.

It stands behind the contract of megatron-core's `DotProductAttention`, which itself refuses packed
sequences and builds S x S scores. Layer specs name it as ``core_attention``.

Source: ``megatron/core/transformer/dot_product_attention.py`` and ``attention.py`` (0.16.1).
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor
from torch.nn import Parameter

from megatron.packed.attention.executor import packed_attention
from megatron.packed.attention.kernels import cpu, dropout
from megatron.packed.attention.magi import MagiShare
from megatron.packed.attention.plans import AttentionPlan, LayerPlans
from megatron.packed.attention.plans.local import plan_of_layout
from megatron.packed.attention.segments import SegmentLayout, packed_layout, row_layout
from megatron.packed.errors import ConfigurationError

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


@dataclass
class RowSeqParams(PackedSeqParams):
    """What the attention of rows (BSHD) cut over context-parallel ranks goes by.

    It travels as packed parameters do, past activation recomputation, to every layer.

    Attributes:
        attention: this rank's plans.
    """

    attention: LayerPlans | None = None


class PackedCoreAttention(MegatronModule):
    """Exact causal self-attention over packs (THD) and rows (BSHD).

    Args:
        config: Transformer configuration.
        layer_number: Global 1-based layer number.
        attn_mask_type: ``causal`` or ``padding_causal``.
        attention_type: ``self``.
        attention_dropout: Overrides ``config.attention_dropout``; in training, and on one
            context-parallel rank.
        softmax_scale: Overrides ``1/sqrt(d)``.
        cp_comm_type: Accepted for the contract; the batch's plans say what is exchanged.
        pg_collection: Gives the context-parallel group, by default megatron-core's global one;
            heads arrive already split over tensor-parallel ranks.
        k_channels: Width of a query and key head, where it is not ``config.kv_channels``.
        v_channels: Width of a value head; read from the tensors.
        **unused: Keywords that later megatron-core versions pass. One that is set is refused.

    Raises:
        ConfigurationError: If the configuration asks for what this kernel does not compute.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **unused: object,
    ) -> None:
        super().__init__(config=config)
        # Layers of multi-token prediction count on, and attend like the last layer of the decoder.
        self.layer_number = min(max(1, layer_number), config.num_layers)
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        check_supported(config, attn_mask_type, attention_type, self.dropout, unused)
        self.window = layer_window(
            config.window_size, config.window_attn_skip_freq, self.layer_number
        )
        self._pg_collection = pg_collection
        width = k_channels or config.kv_channels
        # config.apply_query_key_layer_scaling divides by the layer number here and multiplies by
        # it inside the softmax, against fp16 overflow: in fp32 the two cancel.
        self.softmax_scale = 1.0 / math.sqrt(width) if softmax_scale is None else softmax_scale
        self.softmax_offset = self._make_sink()

    def _make_sink(self) -> Tensor | None:
        """Score `[heads]`, by head of this rank, of a key with value 0 that every query sees."""
        if self.config.softmax_type == "vanilla":
            return None
        heads = self.config.num_attention_heads // self.config.tensor_model_parallel_size
        device = torch.cuda.current_device()
        sink = torch.zeros(heads, dtype=self.config.params_dtype, device=device)
        if self.config.softmax_type == "off-by-one":
            return sink
        parameter = Parameter(sink)  # `initialize_weights` fills it
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        return parameter

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, object] | None = None,
    ) -> dict[str, object]:
        """The learned sinks, split over tensor-parallel ranks; arguments as megatron-core's."""
        own = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            own, prefix, {"softmax_offset": 0}, sharded_offsets
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: object,
    ) -> Tensor:
        """Attend.

        Args:
            query: ``[T, heads, d]`` with packed parameters, else ``[S, B, heads, d]``.
            key: The same with key-value heads.
            value: The same with key-value heads and the value width dv.
            attention_mask: BSHD alone. None: every row is one causal segment. Else the int32
                boundaries ``[segments + 1]`` of the segments in the flattened ``[B*S]`` stream,
                row after row, from 0 to B*S: block-diagonal without a mask matrix. It is a tensor
                so that activation recomputation carries it.
            attn_mask_type: Mask kind of this call, where it differs from the module's.
            attention_bias: Refused.
            packed_seq_params: Boundaries of the pack: ``cu_seqlens_q`` real, and
                ``cu_seqlens_q_padded`` padded (the real ones where absent).

        Returns:
            ``[T, heads * dv]`` or ``[S, B, heads * dv]``.

        Raises:
            ValueError: If a bias or another mask kind is passed, or boundaries don't fit.
        """
        if attention_bias is not None:
            raise ValueError("attention_bias is not supported: positions come from RoPE")
        if attn_mask_type is not None and attn_mask_type not in _CAUSAL:
            raise ValueError(f"attn_mask_type {attn_mask_type} is not supported: only causal")
        plans = getattr(packed_seq_params, "attention", None)
        if isinstance(plans, MagiShare):
            return plans.attend(query, key, value, self.window, self.softmax_scale).flatten(1)
        if plans is not None:
            plan = plans.of_layer(self.layer_number, self.window)
            return self._attend_over_ranks(query, key, value, plan)
        if self.config.context_parallel_size > 1:
            raise ValueError(
                "packed_seq_params: has no attention plan, which --context-parallel-size "
                f"{self.config.context_parallel_size} needs; make batches with the run's helper"
            )
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
            layout = layout_of_pack(packed_seq_params, query.shape[0])
            q, k, v = (x.unsqueeze(0) for x in (query, key, value))
            return self._attend(q, k, v, layout).flatten(2).squeeze(0)
        sequence, rows = query.shape[:2]
        boundaries = None if attention_mask is None else boundaries_of_rows(attention_mask)
        layout = row_layout(rows, sequence, boundaries)
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        return self._attend(q, k, v, layout).flatten(2).transpose(0, 1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, layout: SegmentLayout) -> Tensor:
        """Attend on one rank: `[rows, slots, heads, d]` to `[rows, slots, heads, dv]`."""
        if self.dropout > 0 and self.training:
            # Heads of other tensor-parallel ranks draw differently. With sequence parallelism the
            # whole layer draws from that stream already, as in megatron-core's own attention.
            tracker = get_cuda_rng_tracker()
            own = contextlib.nullcontext() if self.config.sequence_parallel else tracker.fork()
            with own:
                return dropout.segment_attention(
                    query, key, value, layout, self.softmax_scale, self.dropout, self.window
                )
        if query.device.type == "cpu" and self.window is None and self.softmax_offset is None:
            return cpu.segment_attention(query, key, value, layout, self.softmax_scale)
        plan = plan_of_layout(layout, self.window)
        q, k, v = (x.flatten(0, 1) for x in (query, key, value))
        out = packed_attention(
            q, k, v, plan, softmax_scale=self.softmax_scale, sink=self.softmax_offset
        )
        return out.unflatten(0, query.shape[:2])

    def _attend_over_ranks(
        self, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan
    ) -> Tensor:
        """Run a plan over the context-parallel ranks; shapes as in `forward`, of local tokens."""
        group = getattr(self._pg_collection, "cp", None)
        if group is None:
            group = parallel_state.get_context_parallel_group()
        q, k, v = query, key, value
        if query.dim() == 4:  # local tokens of row 0, then of row 1, ...
            q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        out = packed_attention(
            q,
            k,
            v,
            plan,
            group,
            softmax_scale=self.softmax_scale,
            sink=self.softmax_offset,
        ).flatten(1)
        if query.dim() == 4:
            return out.unflatten(0, (query.shape[1], query.shape[0])).transpose(0, 1)
        return out


def layer_window(
    window_size: tuple[int, int] | None, skip_frequency: int | list[int] | None, layer_number: int
) -> int | None:
    """Tokens to the left that a layer sees besides the query itself; None for all.

    Args:
        window_size: `--window-size`: tokens to the left, -1 for all, and to the right.
        skip_frequency: `--window-attn-skip-freq`: every n-th layer has no window; or one number a
            layer, 0 where it has none.
        layer_number: counted from 1 over the whole model.
    """
    if window_size is None or window_size[0] < 0:
        return None
    if not is_layer_window_attention(window_size, skip_frequency, layer_number):
        return None
    return int(window_size[0])


def layout_of_pack(params: PackedSeqParams, total_tokens: int) -> SegmentLayout:
    real = _host_integers(params, "cu_seqlens_host", params.cu_seqlens_q)
    if params.cu_seqlens_q_padded is None:
        return packed_layout(real, real, total_tokens)
    padded = _host_integers(params, "cu_seqlens_padded_host", params.cu_seqlens_q_padded)
    return packed_layout(real, padded, total_tokens)


def _host_integers(params: PackedSeqParams, name: str, boundaries: Tensor) -> tuple[int, ...]:
    """Boundaries as Python integers: the host copy where the parameters keep one, else a read."""
    host = getattr(params, name, None)
    return tuple((boundaries if host is None else host).tolist())


def boundaries_of_rows(attention_mask: Tensor) -> tuple[int, ...]:
    if attention_mask.dim() != 1 or attention_mask.dtype.is_floating_point:
        raise ValueError(
            f"attention_mask of shape {tuple(attention_mask.shape)} and {attention_mask.dtype}: "
            "pass None or 1-D integer segment boundaries, never a mask matrix"
        )
    return tuple(attention_mask.tolist())


def check_supported(
    config: TransformerConfig,
    attn_mask_type: AttnMaskType,
    attention_type: str,
    rate: float,
    unused: dict[str, object],
) -> None:
    if attention_type != "self" or attn_mask_type not in _CAUSAL:
        raise ConfigurationError(
            f"core attention of type {attention_type!r} with mask {attn_mask_type}: only causal "
            "self-attention is supported"
        )
    if rate > 0 and config.context_parallel_size > 1:
        raise ConfigurationError(
            f"--attention-dropout {rate} is not supported over context-parallel ranks, whose "
            "kernels never form the probabilities: set --attention-dropout 0"
        )
    window = config.window_size
    if window is not None and (window[0] < -1 or window[1] not in (-1, 0)):
        raise ConfigurationError(
            f"--window-size {window[0]},{window[1]}: must be the tokens that stay visible to the "
            "left (-1 for all), and 0 to the right, where causal attention sees nothing"
        )
    if config.softmax_type != "vanilla" and rate > 0:
        raise ConfigurationError(
            f"--softmax-type {config.softmax_type}: the kernel with dropout has the plain softmax "
            "alone: set --attention-dropout 0"
        )
    for name, wanted in unused.items():
        if wanted not in (None, False):
            raise ConfigurationError(
                f"core attention argument {name}={wanted!r} is not supported by this kernel"
            )
