"""How layers are laid over pipeline stages and virtual stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.packed.arguments.declare import flag


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How layers are laid over pipeline stages and virtual stages.

    `arguments/stages.py` says what they come to.
    """

    SECTION: ClassVar[str] = "pipeline"

    num_layers_per_virtual_pipeline_stage: int | None = flag(
        "Interleave: layers of one virtual stage.", at_least=1
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        "Interleave: virtual stages of each process.", at_least=1
    )
    pipeline_model_parallel_layout: str | None = flag(
        "Which layers each stage holds: E embedding, t layer, m multi-token prediction, L loss, "
        "| between stages, x*n and (x)*n for n times x, such as Ett|(tt|)*6tL. "
        "Stages go around the processes as often as needed."
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        "Layers of the first process; the others share the rest equally.", at_least=1
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        "Layers of the last process; the others share the rest equally.", at_least=1
    )
    account_for_embedding_in_pipeline_split: bool = flag(
        "Count the embedding as a layer when layers are shared out.", default=False
    )
    account_for_loss_in_pipeline_split: bool = flag(
        "Count the output layer and loss as a layer when layers are shared out.", default=False
    )
    microbatch_group_size_per_vp_stage: int | None = flag(
        "Interleave: micro-batches that one virtual stage takes in a row; "
        "--pipeline-model-parallel-size by default.",
        "--microbatch-group-size-per-virtual-pipeline-stage",
        at_least=1,
    )
    overlap_p2p_comm: bool = flag(
        "Interleave: do not overlap exchanges between stages with computation.",
        "--no-overlap-p2p-communication",
        default=True,
        negative=True,
    )
    overlap_p2p_comm_warmup_flush: bool = flag(
        "Interleave: overlap exchanges in warm-up and flush, too.",
        "--overlap-p2p-communication-warmup-flush",
        default=False,
    )
