"""Rules on the loss: what its reductions and logs need."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.packed.arguments.config import Config


def documents_need_packs(config: Config) -> Iterator[str]:
    loss = config.loss
    if config.packing.use_packed_sequence:
        return
    asked = {
        f"--loss-reduction {loss.loss_reduction}": loss.loss_reduction != "token",
        "--use-document-weights": loss.use_document_weights,
        f"--log-document-losses {loss.log_document_losses}": loss.log_document_losses > 0,
        "--loss-by-dataset": loss.loss_by_dataset,
    }
    for name, given in asked.items():
        if given:
            yield f"{name}: needs --use-packed-sequence; rows don't know their documents"


def document_length(config: Config) -> Iterator[str]:
    loss = config.loss
    if loss.document_length == "document" and loss.loss_reduction == "token":
        yield (
            "--document-length document: needs --loss-reduction document or sqrt; in a mean over "
            "tokens no document has a length"
        )


def document_losses_file(config: Config) -> Iterator[str]:
    loss = config.loss
    if not loss.log_document_losses and loss.document_losses_path is not None:
        yield (
            f"--document-losses-path {loss.document_losses_path}: needs --log-document-losses, the "
            "number of documents to write"
        )
    if (
        loss.log_document_losses
        and loss.document_losses_path is None
        and config.logging.tensorboard_dir is None
    ):
        yield (
            f"--log-document-losses {loss.log_document_losses}: has no file to write to; give "
            "--document-losses-path or --tensorboard-dir"
        )


RULES = (
    documents_need_packs,
    document_length,
    document_losses_file,
)
