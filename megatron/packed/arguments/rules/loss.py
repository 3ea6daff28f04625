"""Rules on the loss: what its reductions and logs need."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.packed.arguments.config import Config
from megatron.packed.arguments.stages import LayoutError, stages_of


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


def deeper_predictions(config: Config) -> Iterator[str]:
    loss = config.loss
    if not loss.mtp_depths and config.is_given("mtp_loss_scaling_factor"):
        yield (
            f"--mtp-loss-scaling-factor {loss.mtp_loss_scaling_factor:g}: needs --mtp-num-layers"
        )
    if (
        loss.mtp_depths
        and config.model.position_embedding_type == "learned_absolute"
        and config.parallel.pipeline_model_parallel_size > 1
    ):
        yield (
            f"--mtp-num-layers {loss.mtp_num_layers}: with --pipeline-model-parallel-size "
            f"{config.parallel.pipeline_model_parallel_size} two stages would learn position "
            "tables of their own; use --position-embedding-type rope"
        )
    if getattr(config.core, "mtp_use_repeated_layer", False) and config.moe.num_experts:
        yield (
            "--mtp-use-repeated-layer: the losses of its router would count once for each of "
            "--mtp-num-layers; leave it or --num-experts out"
        )
    placed = config.pipeline.pipeline_model_parallel_layout
    if placed is not None:
        try:
            stages = stages_of(config)
        except LayoutError:
            return  # the layout's own rule says what is wrong with it
        found = sum(stages.predictions)
        place = stages.first_prediction
        # megatron-core adds up the gradients of the embedding in a process's last stage.
        if place is not None and place // stages.processes < stages.virtual - 1:
            yield (
                f"--pipeline-model-parallel-layout {placed}: places m in stage {place}, whose copy "
                "of the word embeddings no gradient would reach; place it in the last virtual "
                "stage of its process"
            )
        if found != loss.mtp_depths:
            yield (
                f"--pipeline-model-parallel-layout {placed}: places {found} predictions (m), and "
                f"--mtp-num-layers is {loss.mtp_depths}; make them equal"
            )


RULES = (
    deeper_predictions,
    documents_need_packs,
    document_length,
    document_losses_file,
)
