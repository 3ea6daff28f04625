"""What is minimised: reductions over documents and multi-token prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.packed.arguments.declare import flag


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What is minimised: reductions over documents and multi-token prediction."""

    SECTION: ClassVar[str] = "loss"

    loss_reduction: str = flag(
        "token: the mean over supervised tokens; document: the mean over documents of a document's "
        "mean; sqrt: in between, a document of n supervised tokens weighs n^1/2.",
        default="token",
        choices=("token", "document", "sqrt"),
    )
    document_length: str = flag(
        "What n is in --loss-reduction document and sqrt. segment: the supervised tokens of the "
        "piece in this pack; document: of the whole stored document, so that one that is cut over "
        "packs weighs as one.",
        default="segment",
        choices=("segment", "document"),
    )
    use_document_weights: bool = flag(
        "Weigh documents in the objective by their corpus's weights.", default=False
    )
    on_empty_batch: str = flag(
        "A global batch without one supervised token: skip its update, or stop with an error.",
        default="skip",
        choices=("skip", "error"),
    )
    log_document_losses: int = flag(
        "Write the documents of the highest loss of every log interval, so many of them, with "
        "their dataset, number and position.",
        default=0,
        at_least=0,
    )
    document_losses_path: str | None = flag(
        "File of --log-document-losses, one JSON object a line; by default "
        "document_losses.jsonl in --tensorboard-dir."
    )
    loss_by_dataset: bool = flag(
        "Log the token-mean training loss of each blended dataset.", default=False
    )

    mtp_num_layers: int | None = flag(
        "Predict so many tokens beyond the next one, each by a layer of its own that takes the "
        "one before it as input.",
        at_least=1,
        at_most=4,
    )
    mtp_loss_scaling_factor: float = flag(
        "Weight of the mean of the losses of --mtp-num-layers beside the main loss.",
        default=0.1,
        at_least=0,
    )

    @property
    def mtp_depths(self) -> int:
        """Predictions beyond the next token."""
        return self.mtp_num_layers or 0

    @property
    def is_weighted(self) -> bool:
        """Whether tokens of different documents weigh differently in the objective."""
        return self.loss_reduction != "token" or self.use_document_weights
