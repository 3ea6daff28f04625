"""GPTModel with positions from the batch and a loss over the real vocabulary."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from megatron.packed.accelerator.compat import accepted_by, detaches_predictions
from megatron.packed.loss.cross_entropy import vocab_parallel_cross_entropy
from megatron.packed.model.moe import moe_layers
from megatron.packed.model.mtp import DeeperTargets, deeper_losses
from megatron.packed.model.rotary import PositionIndexedRotaryEmbedding


class PackedGPTModel(GPTModel):
    """megatron-core's GPTModel, told by the batch which position every token has.

    Three things differ from the base class. Rotary embeddings are looked up by the batch's position
    ids instead of being rebuilt from sequence lengths, so that packed documents, resets and every
    partition of the tokens are right by construction. And the cross entropy leaves out the
    columns that only pad the vocabulary to a multiple of the tensor-parallel size, so the loss
    doesn't depend on that size. Multi-token prediction takes its inputs and labels from the batch,
    see `mtp`.

    Args:
        real_vocab_size: ids of the tokenizer, without padding.
        rotary: rotary embedding of all layers; None for a model without.
        **kwargs: the arguments of GPTModel.
    """

    def __init__(
        self,
        *,
        real_vocab_size: int,
        rotary: PositionIndexedRotaryEmbedding | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.real_vocab_size = real_vocab_size
        self.rotates = rotary is not None
        self._deeper: DeeperTargets | None = None
        if rotary is not None:
            self.rotary_pos_emb = rotary
        if self.mtp_process:
            self._share_embeddings()

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        *args: Any,
        mtp: DeeperTargets | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run this pipeline stage.

        Args:
            input_ids: int64 [B, S], or [1, T] when packed.
            position_ids: int64 of the same shape; given on every pipeline stage.
            *args: as GPTModel.forward.
            mtp: inputs and labels of multi-token prediction; given on every pipeline stage.
            **kwargs: as GPTModel.forward.

        Returns:
            float32 [B, S] losses on the last stage when labels are given, else hidden states.
        """
        slots = kwargs.get("padding_mask")
        if slots is not None:
            kwargs["padding_mask"] = self._slots_of_stage(slots)
        positions: Any = contextlib.nullcontext()
        if self.rotates:
            positions = self.rotary_pos_emb.positions(position_ids)
        self._deeper = mtp
        try:
            with positions:
                return super().forward(input_ids, position_ids, *args, **kwargs)
        finally:
            self._deeper = None

    def _share_embeddings(self) -> None:
        """Make the embeddings of a stage that predicts further tokens copies like any other.

        megatron-core allocates tied output weights there that nothing reads, which its own
        checkpoints refuse, and doesn't tell the optimizer what the copy is.
        """
        self.embedding.word_embeddings.weight.is_embedding_or_output_parameter = True
        if self.post_process and self.share_embeddings_and_output_weights:
            self.output_layer.weight = None

    def _preprocess(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """As GPTModel's; latent attention is handed the rotary embedding, too."""
        prepared = super()._preprocess(*args, **kwargs)
        if self.rotates and prepared[1] is None:
            return (prepared[0], self.rotary_pos_emb(), *prepared[2:])
        return prepared

    def _slots_of_stage(self, slots: torch.Tensor) -> torch.Tensor:
        """The slots of the tokens that this rank holds between tensor-parallel regions.

        megatron-core cuts them on the first stage alone, and hands none to the layers of
        multi-token prediction.

        Args:
            slots: int64 [B, S], see `token_slots`.
        """
        cut = slots
        if self.config.sequence_parallel:
            group = self.pg_collection.tp
            cut = slots.chunk(group.size(), dim=1)[group.rank()].contiguous()
        for _, layer in moe_layers(getattr(self, "mtp", None)):
            layer.slots_of_batch = cut
        return slots if self.pre_process else cut

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As GPTModel's, with multi-token prediction on what the batch brings for it.

        Args:
            hidden_states: [S, B, H] of the decoder; after an earlier stage's prediction those of
                all depths, laid end to end.
            *args: as GPTModel's.
            **kwargs: as GPTModel's.
        """
        if not self.config.mtp_num_layers:
            return super()._postprocess(hidden_states, *args, **kwargs)
        assert not args  # GPTModel.forward names everything but the hidden states
        targets = self._deeper
        if self.mtp_process and targets is not None:
            hidden_states = self.mtp(
                **accepted_by(self.mtp.forward, kwargs)
                | {"input_ids": targets.tokens, "hidden_states": hidden_states},
                embedding=self.embedding,
            )
        if not self.post_process:
            return hidden_states
        weight = None
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()

        deeper_weight = weight
        if detaches_predictions(self.config):
            own = self.output_layer.weight if weight is None else weight
            deeper_weight = own.detach()

        def losses_of(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            logits, _ = self.output_layer(hidden, weight=weight)
            return self.compute_language_model_loss(labels, logits)

        def deeper_losses_of(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            logits, _ = self.output_layer(hidden, weight=deeper_weight)
            return self.compute_language_model_loss(labels, logits)

        if targets is not None:
            depths = 1 + self.config.mtp_num_layers
            hidden_states = deeper_losses(
                list(hidden_states.chunk(depths)),
                targets,
                deeper_losses_of,
                self.config.mtp_loss_scaling_factor,
            )
        labels = kwargs.get("labels")
        if labels is not None:
            return losses_of(hidden_states, labels)
        logits, _ = self.output_layer(
            hidden_states,
            weight=weight,
            runtime_gather_output=kwargs.get("runtime_gather_output"),
        )
        return logits.transpose(0, 1).contiguous()

    def compute_language_model_loss(
        self, labels: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """Cross entropy per token over the real vocabulary.

        Args:
            labels: int64 [B, S].
            logits: [S, B, V_padded / tp].

        Returns:
            float32 [B, S].
        """
        losses = vocab_parallel_cross_entropy(
            logits, labels.transpose(0, 1), self.pg_collection.tp, self.real_vocab_size
        )
        return losses.transpose(0, 1).contiguous()
