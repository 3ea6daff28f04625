"""Rules on processes and the batch spread over them."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.packed.arguments.config import Config


def launcher_rank(config: Config) -> Iterator[str]:
    rank, world = config.parallel.rank, config.parallel.world_size
    if rank >= world:
        yield (
            f"environment variable RANK={rank}: must be less than WORLD_SIZE={world}; "
            "let torchrun set both"
        )


def world_size(config: Config) -> Iterator[str]:
    parallel = config.parallel
    if parallel.world_size % parallel.model_parallel_size:
        yield (
            f"{parallel.world_size} processes started, which must be a multiple of tensor "
            f"{parallel.tensor_model_parallel_size} x pipeline "
            f"{parallel.pipeline_model_parallel_size} x context {parallel.context_parallel_size} "
            f"= {parallel.model_parallel_size} parallel processes; change --nproc-per-node or "
            "--nnodes of torchrun, or the parallel sizes"
        )


def global_batch(config: Config) -> Iterator[str]:
    training, replicas = config.training, config.parallel.data_parallel_size
    if config.schedule.step_batch_size_schedule is not None:
        return  # sizes of its own, with a rule of their own
    yield from _whole_batches("", training.global_batch_size, training.micro_batch_size, replicas)


def evaluation_batch(config: Config) -> Iterator[str]:
    evaluation, training = config.evaluation, config.training
    size, micro = evaluation.eval_global_batch_size, evaluation.eval_micro_batch_size
    if (size, micro) == (training.global_batch_size, training.micro_batch_size):
        return  # that of training
    yield from _whole_batches("eval-", size, micro, config.parallel.data_parallel_size)


def _whole_batches(prefix: str, size: int, micro: int, replicas: int) -> Iterator[str]:
    step = micro * replicas
    if step and size % step:
        yield (
            f"--{prefix}global-batch-size {size}: must be a multiple of "
            f"--{prefix}micro-batch-size {micro} x {replicas} data-parallel replicas = {step}; "
            f"{-(-size // step) * step} would do"
        )


def overlapped_parameter_gather(config: Config) -> Iterator[str]:
    parallel = config.parallel
    if parallel.overlap_param_gather and not (
        parallel.use_distributed_optimizer and parallel.overlap_grad_reduce
    ):
        yield (
            "--overlap-param-gather: needs --use-distributed-optimizer and --overlap-grad-reduce; "
            "add them or leave it out"
        )


def distributed_optimizer(config: Config) -> Iterator[str]:
    parallel = config.parallel
    if parallel.use_distributed_optimizer and config.optimization.optimizer == "sgd":
        yield (
            "--optimizer sgd: megatron-core shards Adam's state alone; leave "
            "--use-distributed-optimizer out or use --optimizer adam"
        )


def distributed_optimizer_instances(config: Config) -> Iterator[str]:
    parallel, count = config.parallel, config.parallel.num_distributed_optimizer_instances
    if count == 1 or config.optimization.uses_muon:  # of which another rule speaks
        return
    replicas = parallel.data_parallel_size * parallel.context_parallel_size
    if not parallel.use_distributed_optimizer:
        yield (
            f"--num-distributed-optimizer-instances {count}: needs --use-distributed-optimizer, "
            "which it makes copies of"
        )
    elif replicas % count:
        yield (
            f"--num-distributed-optimizer-instances {count}: must divide data-parallel "
            f"{parallel.data_parallel_size} x context-parallel {parallel.context_parallel_size} "
            f"processes = {replicas}"
        )


def muon(config: Config) -> Iterator[str]:
    optimizer, steps = config.optimization.optimizer, config.optimizer_options.muon_num_ns_steps
    if not config.optimization.uses_muon:
        return
    if config.training.fp16:
        yield f"--optimizer {optimizer}: has no loss scale for --fp16; train with --bf16"
    if steps % 5:
        yield (
            f"--muon-num-ns-steps {steps}: must be a multiple of 5, the length of its series of "
            "coefficients"
        )
    if config.parallel.num_distributed_optimizer_instances > 1:
        yield (
            f"--optimizer {optimizer}: keeps each matrix's state whole on one replica; leave "
            "--num-distributed-optimizer-instances out"
        )


def gradient_buckets(config: Config) -> Iterator[str]:
    count, size = config.parallel.ddp_num_buckets, config.get("bucket_size")
    if count is not None and size is not None:
        yield (
            f"--ddp-num-buckets {count} and --ddp-bucket-size {size}: exclude each other; keep one"
        )


RULES = (
    launcher_rank,
    world_size,
    global_batch,
    evaluation_batch,
    overlapped_parameter_gather,
    distributed_optimizer,
    distributed_optimizer_instances,
    muon,
    gradient_buckets,
)
