"""Multi-token prediction on targets that the batch brings, with losses that no layout changes.

megatron-core's block and layer (after DeepSeek-V3) are used, and three things in them replaced:

- Inputs and labels of depth k come from the plan of the batch. Upstream rolls the ones of depth
  k - 1, which for packs takes a loop over documents and, with context parallelism, two messages a
  document, and knows real boundaries only. Nothing is rolled or sent here.
- Losses are sums, scaled to the global count of their depth. Upstream divides by the count of a
  rank's own micro-batch, which is 0 / 0 where that holds no target.
- Recomputation captures what isn't a tensor; upstream hands a pack's parameters to
  `save_for_backward`, which raises.

`mtp_overrides` names each function that is replaced and what its source was when it was read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
    get_mtp_num_layers_to_build,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from megatron.packed.accelerator.compat import (
    detaches_predictions,
    predicting_layer_name,
    repeats_predicting_layer,
)
from megatron.packed.loss.token import token_loss


@dataclass(frozen=True)
class DeeperTargets:
    """What a micro-batch brings for predictions beyond the next token: depth 1, 2, ..., K.

    The main prediction's input is the token of a position and its label the next one. That label
    is the input of depth 1, whose own label is the token after it, and so on.

    Attributes:
        tokens: int64 `[K, B, S]`, input of each depth; 0 where the document has ended.
        labels: int64 `[K, B, S]`.
        loss_masks: float32 `[K, B, S]`, nonzero where supervised.
        scales: float64 `[K]`, supervised tokens of the global batch over those of each depth; None
            where no gradient is taken.
        reports: `[2]` tensors (sum, count) of every depth, put here by the last pipeline stage.
    """

    tokens: Tensor
    labels: Tensor
    loss_masks: Tensor
    scales: Tensor | None = None
    reports: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(
        cls, labels: Tensor, mtp_labels: Tensor, loss_masks: Tensor, scales: Tensor | None = None
    ) -> DeeperTargets:
        """Those of a batch.

        Args:
            labels: int64 `[B, S]`, of the main prediction.
            mtp_labels: int64 `[K, B, S]`, of depth 1, 2, ...
            loss_masks: float32 `[K, B, S]`.
            scales: see the class.
        """
        tokens = torch.cat((labels[None], mtp_labels[:-1]))
        return cls(tokens, mtp_labels, loss_masks, scales)


class PackedMTPLayer(MultiTokenPredictionLayer):
    """megatron-core's layer; `input_ids` are those of this depth and all deeper ones."""

    def _get_embeddings(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        embedding: LanguageModelEmbedding,
        hidden_states: Tensor,
        packed_seq_params: Any = None,
        **more: Any,
    ) -> tuple[Tensor, ...]:
        """Embed this depth's inputs; the others go on to the next depth.

        Args:
            input_ids: int64 `[K - k + 1, B, S]`.
            position_ids: int64 `[B, S]`, of the inputs of the depth before.
            embedding: the model's.
            hidden_states: `[S, B, H]`.
            packed_seq_params: not needed.
            **more: `padding_mask`, where megatron-core hands it through.

        Returns:
            Ids and positions for the next depth, `more`, embeddings and hidden states.
        """
        position_ids = position_ids + 1
        places = position_ids
        if embedding.add_position_embedding:
            # Inputs past the end of a row may lie past the end of the table.
            places = places.clamp(max=embedding.position_embeddings.num_embeddings - 1)
        decoder_input = embedding(input_ids=input_ids[0], position_ids=places)
        if detaches_predictions(self.config):
            decoder_input = decoder_input.detach()
        hidden_states = make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)
        if not hidden_states.requires_grad:
            hidden_states.requires_grad_(True)  # or recomputation would give no gradient
        return input_ids[1:], position_ids, *more.values(), decoder_input, hidden_states

    def _checkpointed_forward(self, *function: Callable[..., Tensor], **kwargs: Any) -> Tensor:
        """Recompute the layer, whatever the method: each depth is a layer of its own.

        Args:
            *function: what to run, where megatron-core says it.
            **kwargs: its arguments.
        """
        forward_func = function[0] if function else self._proj_and_transformer_layer
        tensors = ("hidden_states", "decoder_input")
        others = {name: value for name, value in kwargs.items() if name not in tensors}

        def forward(hidden_states: Tensor, decoder_input: Tensor) -> Tensor:
            return forward_func(hidden_states=hidden_states, decoder_input=decoder_input, **others)

        return tensor_parallel.checkpoint(
            forward, self.config.distribute_saved_activations, *(kwargs[name] for name in tensors)
        )


def build_mtp_spec(
    config: TransformerConfig,
    layer_spec: ModuleSpec,
    norm: type,
    backend: BackendSpecProvider | None = None,
    vp_stage: int | None = None,
) -> MultiTokenPredictionBlockSubmodules | None:
    """The specification of a pipeline stage's deeper predictions; None where it has none.

    Args:
        config: megatron-core's configuration.
        layer_spec: the decoder layer inside each depth.
        norm: norm of inputs and outputs.
        backend: gives the projection; megatron-core's own linear layer by default.
        vp_stage: which of this rank's stages, when it has several.
    """
    if not config.mtp_num_layers:
        return None
    count = get_mtp_num_layers_to_build(config, vp_stage=vp_stage)
    if not count:
        return None
    if repeats_predicting_layer(config):
        count = 1
    linear = (backend or LocalSpecProvider()).column_parallel_linear()
    layer = ModuleSpec(
        module=PackedMTPLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=norm,
            hnorm=norm,
            eh_proj=linear,
            layer_norm=norm,
            **{predicting_layer_name(): layer_spec},
        ),
    )
    return MultiTokenPredictionBlockSubmodules(layer_specs=[layer] * count)


def deeper_losses(
    hidden_states: list[Tensor],
    targets: DeeperTargets,
    losses_of: Callable[[Tensor, Tensor], Tensor],
    factor: float,
) -> Tensor:
    """Attach the losses of all depths to the hidden states of the main prediction.

    Their gradient flows with the main loss's: no second output leaves the model.

    Args:
        hidden_states: `[S, B, H]` of the main prediction and of each depth.
        targets: of the micro-batch; its `reports` are filled.
        losses_of: hidden states and labels `[B, S]` to losses `[B, S]`.
        factor: weight of all depths together beside the main loss.

    Returns:
        The first of the hidden states.
    """
    main, *deeper = hidden_states
    targets.reports.clear()
    for depth, hidden in enumerate(deeper):
        losses = losses_of(hidden, targets.labels[depth])
        loss = token_loss(losses, targets.loss_masks[depth])
        targets.reports.append(loss.report)
        if targets.scales is not None:
            scaled = loss.total * (targets.scales[depth] * (factor / len(deeper)))
            main = MTPLossAutoScaler.apply(main, scaled.to(loss.total.dtype).reshape(1))
    return main
