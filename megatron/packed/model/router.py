"""megatron-core's top-k router, with padding left out and losses that no layout changes.

What differs from the base class, and why:

- Slots without a token choose no expert: they count for no statistic, fill no capacity and cost
  no operation. Upstream routes them.
- A micro-batch's statistics are those of all its tokens, over the sequence- and context-parallel
  ranks that share it: capacity, dropping and Sinkhorn too, which upstream does rank by rank.
- With `calculate_per_token_loss`, a micro-batch's loss counts as often as it has tokens, on
  whatever number of ranks these are (upstream: fewer times, by the number of ranks; its next
  version corrects this).
- `global_aux_loss` weighs the same for any number of data-parallel ranks (upstream: that many
  times less).
- `seq_aux_loss` looks at documents in a pack, at rows otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron.packed.model import routing
from megatron.packed.model.routing import LossShare
from megatron.packed.model.token_slots import TokenSlots

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
# Float16Module converts them with the model; counts and biases must stay exact.
_FP32_BUFFERS = ("expert_bias", "local_tokens_per_expert", "global_tokens_per_expert", "ga_steps")

# Losses by the name they are logged under, which is upstream's.
LOSS_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
Z_LOSS = "z_loss"


class PackedRouter(TopKRouter):
    """Top-k router of one layer; constructor arguments are upstream's.

    Attributes:
        losses: by name, this rank's share of each loss, summed over the step's micro-batches.
    """

    def __init__(self, config: Any, pg_collection: Any = None, **kwargs: Any) -> None:
        super().__init__(config=config, pg_collection=pg_collection, **kwargs)
        self.losses: dict[str, Tensor] = {}

    def _maintain_float32_expert_bias(self) -> None:
        for name in _FP32_BUFFERS:
            buffer = getattr(self, name, None)
            if buffer is not None and buffer.dtype != torch.float32:
                buffer.data = buffer.data.float()

    def gating(self, input: Tensor) -> Tensor:
        """Logits of every token.

        Args:
            input: [S, B, hidden].

        Returns:
            [S, B, experts] in the router's dtype.
        """
        if getattr(moe_utils, "HAVE_TE", False) and input.is_cuda:
            return super().gating(input)
        dtype = _DTYPES.get(self.config.moe_router_dtype or "", input.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(input.to(dtype), self.weight.to(dtype), bias)

    def routing(
        self, logits: Tensor, padding_mask: TokenSlots | None = None
    ) -> tuple[Tensor, Tensor]:
        """Choose experts and attach the losses.

        Args:
            logits: [S, B, experts].
            padding_mask: the tokens' slots (the name is upstream's); None for all valid.

        Returns:
            Weights [S * B, experts], zero where not chosen, and choices as a mask.
        """
        length, rows = logits.shape[:2]
        slots = padding_mask or TokenSlots.whole(rows, length, logits.device)
        logits = logits.reshape(-1, logits.shape[-1])
        if self._learns and self.config.moe_z_loss_coeff:
            share = routing.z_loss(logits, slots, self.tp_cp_group)
            logits = self._attach(logits, share, self.config.moe_z_loss_coeff, Z_LOSS)
        probs, chosen = self._choose(logits, slots)
        if self.config.moe_expert_capacity_factor is not None:
            chosen = self._within_capacity(probs, chosen, slots)
            probs = torch.where(chosen, probs, 0.0)
        if self._learns and self.is_aux_loss_enabled():
            probs = self._balance(probs, logits, slots)
        if self.enable_expert_bias and torch.is_grad_enabled():
            with torch.no_grad():
                self.local_tokens_per_expert += chosen.sum(dim=0)
        return probs, chosen

    @property
    def _learns(self) -> bool:
        """Whether losses count: not in evaluation, and once with recomputation."""
        return self.training and torch.is_grad_enabled()

    def _choose(self, logits: Tensor, slots: TokenSlots) -> tuple[Tensor, Tensor]:
        if self.routing_type == "sinkhorn":
            probs, chosen = self._sinkhorn(logits, slots)
        else:
            probs, chosen = moe_utils.topk_routing_with_score_function(
                logits,
                self.topk,
                use_pre_softmax=self.config.moe_router_pre_softmax,
                num_groups=self.config.moe_router_num_groups,
                group_topk=self.config.moe_router_group_topk,
                scaling_factor=self.config.moe_router_topk_scaling_factor,
                score_function=self.score_function,
                expert_bias=self.expert_bias,
                fused=self.config.moe_router_fusion,
            )
        chosen = chosen & slots.valid[:, None]
        return torch.where(chosen, probs, 0.0), chosen

    def _sinkhorn(self, logits: Tensor, slots: TokenSlots) -> tuple[Tensor, Tensor]:
        weights = logits.sigmoid() if self.topk == 1 else logits.float().softmax(-1).to(logits)
        if self.training:
            group = self.tp_cp_group
            everyone, valid = (routing.gathered(x, group) for x in (logits, slots.valid))
            indices = torch.zeros(len(valid), self.topk, dtype=torch.int64, device=logits.device)
            indices[valid] = routing.sinkhorn_assignment(everyone[valid], self.topk)
            indices = routing.own_rows(indices, group)
        else:
            indices = weights.topk(self.topk, dim=1).indices
        return weights, torch.zeros_like(weights, dtype=torch.bool).scatter(1, indices, True)

    def _within_capacity(self, probs: Tensor, chosen: Tensor, slots: TokenSlots) -> Tensor:
        group = self.tp_cp_group
        kept = routing.within_capacity(
            routing.gathered(probs, group),
            routing.gathered(chosen, group),
            routing.gathered(slots.order, group),
            topk=self.topk,
            factor=self.config.moe_expert_capacity_factor,
            by_position=self.config.moe_token_drop_policy == "position",
        )
        return routing.own_rows(kept, group)

    def _balance(self, probs: Tensor, logits: Tensor, slots: TokenSlots) -> Tensor:
        scores, chosen = routing.balancing_scores(logits, slots, self.topk, self.score_function)
        for kind, name in LOSS_NAMES.items():
            coefficient = self.get_aux_loss_coeff(kind)
            if coefficient:
                share = self._loss_share(kind, scores, chosen, slots)
                # Shares of all replicas add up to one loss; what is averaged is one a replica.
                replicas = 1
                if kind == "global_aux_loss":
                    replicas = self.tp_dp_cp_group.size() // self.tp_cp_group.size()
                probs = self._attach(probs, share, coefficient, name, replicas)
        return probs

    def _loss_share(
        self, kind: str, scores: Tensor, chosen: Tensor, slots: TokenSlots
    ) -> LossShare:
        group = self.tp_cp_group
        if kind == "global_aux_loss":
            group = self.tp_dp_cp_group
            return routing.global_balancing_loss(
                scores, chosen, self.global_tokens_per_expert, group
            )
        if kind == "aux_loss":
            sequence = torch.zeros_like(slots.sequence)
            return routing.balancing_loss(scores, chosen, sequence, 1, group)
        count = (slots.sequence.max() + 1).clamp(min=1)
        count = int(routing.reduced(count, group, torch.distributed.ReduceOp.MAX))
        return routing.balancing_loss(scores, chosen, slots.sequence, count, group)

    def _attach(
        self, carrier: Tensor, share: LossShare, coefficient: float, name: str, replicas: int = 1
    ) -> Tensor:
        """Let a loss flow into the backward pass of `carrier`, and note its value.

        Args:
            carrier: whose gradient brings the loss's along.
            share: this rank's part.
            coefficient: of the loss.
            name: it is logged under.
            replicas: data-parallel ranks whose shares make up one loss.
        """
        mean = share.mean * replicas
        value = mean.detach().double()
        self.losses[name] = self.losses.get(name, 0.0) + value
        loss = share.weighted if self.calculate_per_token_loss else mean
        return moe_utils.MoEAuxLossAutoScaler.apply(carrier, loss * coefficient)
