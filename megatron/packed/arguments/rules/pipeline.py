"""Rules on pipeline stages, virtual stages and the micro-batches that flow through them."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.packed.arguments.config import Config
from megatron.packed.arguments.stages import (
    LayoutError,
    known_stages,
    micro_batch_problems,
    stages_of,
)


def layout(config: Config) -> Iterator[str]:
    try:
        stages_of(config)
    except LayoutError as error:
        yield str(error)


def interleaving(config: Config) -> Iterator[str]:
    stages = known_stages(config)
    if stages is None:
        return
    pipeline = config.pipeline
    if stages.virtual == 1:
        if pipeline.microbatch_group_size_per_vp_stage is not None:
            yield (
                "--microbatch-group-size-per-virtual-pipeline-stage "
                f"{pipeline.microbatch_group_size_per_vp_stage}: needs virtual stages, such as "
                "--num-virtual-stages-per-pipeline-rank 2"
            )
        return
    # Without overlap the exchanges of a step with both neighbours are one batch, and with two
    # processes both neighbours are the same one.
    least = 2 if pipeline.overlap_p2p_comm else 3
    if stages.processes < least:
        also = "" if least == 2 else " with --no-overlap-p2p-communication"
        yield (
            f"{stages.virtual} virtual stages on each process: need "
            f"--pipeline-model-parallel-size of {least} or more{also}, not {stages.processes}"
        )


def overlapped_exchanges(config: Config) -> Iterator[str]:
    pipeline = config.pipeline
    if pipeline.overlap_p2p_comm_warmup_flush and not pipeline.overlap_p2p_comm:
        yield (
            "--overlap-p2p-communication-warmup-flush and --no-overlap-p2p-communication: "
            "contradict each other; leave one out"
        )


def micro_batches(config: Config) -> Iterator[str]:
    training = config.training
    step = training.micro_batch_size * config.parallel.data_parallel_size
    if step and training.global_batch_size % step == 0:
        count = training.global_batch_size // step
        stages = known_stages(config)
        if stages is not None:
            yield from micro_batch_problems(config, stages, count, "--global-batch-size")


def evaluation_micro_batches(config: Config) -> Iterator[str]:
    evaluation, training, stages = config.evaluation, config.training, known_stages(config)
    size, micro = evaluation.eval_global_batch_size, evaluation.eval_micro_batch_size
    step = micro * config.parallel.data_parallel_size
    if stages is None or not evaluation.eval_iters or not step or size % step:
        return
    if (size, micro) != (training.global_batch_size, training.micro_batch_size):
        yield from micro_batch_problems(config, stages, size // step, "--eval-global-batch-size")


def data_last(config: Config) -> Iterator[str]:
    parallel, moe = config.parallel, config.moe
    shared = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    experts = moe.expert_tensor_parallel_size * moe.expert_model_parallel_size
    if (
        parallel.use_tp_pp_dp_mapping
        and moe.num_experts is not None
        and parallel.pipeline_model_parallel_size > 1
        and experts != shared
    ):
        yield (
            "--use-tp-pp-dp-mapping: with pipeline stages, --expert-tensor-parallel-size x "
            f"--expert-model-parallel-size = {experts} must equal --tensor-model-parallel-size x "
            f"--context-parallel-size = {shared}; change them, or leave it out"
        )


RULES = (
    layout,
    interleaving,
    overlapped_exchanges,
    micro_batches,
    evaluation_micro_batches,
    data_last,
)
