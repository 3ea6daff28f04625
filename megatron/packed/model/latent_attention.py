"""Multi-latent attention with positions from the batch, right under tensor parallelism.

```
hidden --> q latent --> norm --> q up ----------> heads x [plain | rotated]
hidden --> kv latent -> norm --> k, v up -------> heads x [plain | value]
      \\-> shared key channels, rotated ---------> the same for all heads
```

Source: DeepSeek-V2 (https://arxiv.org/abs/2405.04434);
``megatron/core/transformer/multi_latent_attention.py`` (0.16.1).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor


class _RotaryOfTheCall(torch.nn.Module):
    """Stands where megatron-core's latent attention keeps a rotary embedding per layer.

    The model computes cosines and sines once per micro-batch and hands them to every layer; this
    returns those of the running call.
    """

    def __init__(self, with_scale: bool) -> None:
        super().__init__()
        self.with_scale = with_scale
        self.waves: Tensor | None = None

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        """Ignored by `forward`: positions are the batch's."""
        return 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The waves, and with YaRN the scale that is left to apply: none."""
        if self.waves is None:
            raise RuntimeError("latent attention without rotary embedding: the model passes it")
        return (self.waves, 1.0) if self.with_scale else self.waves


class _SumGradients(torch.autograd.Function):
    """Identity whose gradient is summed over a group.

    megatron-core's function for this loses the sum where the gradient isn't contiguous (0.16.1).
    """

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class PackedMLASelfAttention(MLASelfAttention):
    """megatron-core's latent self-attention; arguments are its own.

    Three things differ. Rotary embeddings come from the model by the batch's position ids. The key
    channels that all heads share get the gradients of the heads of every tensor-parallel rank:
    megatron-core adds those up for the latent alone, unless TransformerEngine's projection runs
    with sequence parallelism. And the norm of the query latent, whose gradient is whole on every
    tensor-parallel rank, doesn't get it once from each of them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rotary_pos_emb = _RotaryOfTheCall(self.config.rope_type == "yarn")
        self.linear_kv_down_proj.register_forward_hook(self._whole_latent)
        size = self.pg_collection.tp.size()
        norm = getattr(self, "q_layernorm", None)
        if size > 1 and self.config.qk_layernorm and not self.config.sequence_parallel and norm:
            # finalize_model_grads sums whatever is called q_layernorm over these ranks: in plain
            # attention, every rank normalises heads of its own.
            for parameter in norm.parameters():
                parameter.register_hook(lambda gradient: gradient / size)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        rotary_pos_emb: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            hidden_states: ``[S, B, hidden]``, or ``[T, 1, hidden]`` of a pack.
            attention_mask: as the core attention takes it.
            *args: as megatron-core's.
            rotary_pos_emb: cosines and sines, see `PositionIndexedRotaryEmbedding`.
            **kwargs: as megatron-core's.

        Returns:
            Output like `hidden_states`, and the bias of the output projection.
        """
        previous, self.rotary_pos_emb.waves = self.rotary_pos_emb.waves, rotary_pos_emb
        try:
            output, bias = super().forward(hidden_states, attention_mask, *args, **kwargs)
        finally:
            self.rotary_pos_emb.waves = previous
        # megatron-core drops the dimension of a single row whenever it gets packed parameters, and
        # restores it for packs alone.
        return (output if output.dim() == 3 else output.unsqueeze(1)), bias

    def _whole_latent(self, module: Any, args: Any, projected: Any) -> Any:
        """Put the kv latent and the shared key channels of all tensor-parallel ranks together.

        Args:
            module: the projection.
            args: what it was called with.
            projected: its output ``[S, B, (latent + shared) / TP]``, or whole, and its bias.

        Returns:
            ``[S, B, latent + shared]``, with sequence parallelism ``[S / TP, B, ...]``; and the
            bias.
        """
        combined, bias = projected
        config, tp_group = self.config, self.pg_collection.tp
        if tp_group.size() == 1:
            return projected
        if combined.size(-1) != config.kv_lora_rank + config.qk_pos_emb_head_dim:
            combined = gather_from_tensor_model_parallel_region(combined, tp_group)
            if config.sequence_parallel:
                combined = scatter_to_sequence_parallel_region(combined, tp_group)
        if not config.sequence_parallel:
            # With it, the gather over the sequence that follows adds gradients up.
            latent, shared = combined.split(
                [config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1
            )
            shared = _SumGradients.apply(shared, tp_group)
            combined = torch.cat((latent, shared), dim=-1)
        return combined, bias
