"""Every rule that ties flags together: one small function each, yielding what is wrong.

A message names the flag and its value, the rule, and a way out. Rules see what was asked for, with
derived fields filled in; they never change anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from megatron.packed.arguments.config import Config, all_specs
from megatron.packed.errors import ConfigurationError

Rule = Callable[[Config], Iterator[str]]


def check_values(config: Config) -> None:
    """Check each value by itself: choices, bounds, and flags this build refuses.

    Raises:
        ConfigurationError: Lists every value that can't be honoured.
    """
    problems = []
    for dest, spec in all_specs().items():
        value = config.get(dest)
        if rule := spec.violated_by(value):
            problems.append(f"{spec.name} {value}: {rule}")
        elif spec.refused and value != spec.default:
            problems.append(f"{spec.name} is refused: {spec.refused}")
    _raise(problems)


def check_rules(config: Config) -> None:
    """Check every rule among flags.

    Raises:
        ConfigurationError: Lists every broken rule.
    """
    _raise([message for rule in RULES for message in rule(config)])


def check_hardware_rules(config: Config) -> None:
    """Check the rules that depend on the accelerator, which is known by now.

    Raises:
        ConfigurationError: Lists every broken rule.
    """
    _raise([message for rule in HARDWARE_RULES for message in rule(config)])


def _raise(problems: list[str]) -> None:
    if len(problems) == 1:
        raise ConfigurationError(problems[0])
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise ConfigurationError(f"{len(problems)} problems in the flags:\n{lines}")


# Processes and the batch ------------------------------------------------------------------------


def launcher_rank(config: Config) -> Iterator[str]:
    rank, world = config.parallel.rank, config.parallel.world_size
    if rank >= world:
        yield (
            f"environment variable RANK={rank}: must be less than WORLD_SIZE={world}; "
            "let torchrun set both"
        )


def context_parallelism(config: Config) -> Iterator[str]:
    size = config.parallel.context_parallel_size
    if size > 1:
        yield (
            f"--context-parallel-size {size}: context parallelism isn't available in this build; "
            "use --context-parallel-size 1 and spread the model with "
            "--tensor-model-parallel-size or --pipeline-model-parallel-size"
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
    size, micro = config.training.global_batch_size, config.training.micro_batch_size
    replicas = config.parallel.data_parallel_size
    step = micro * replicas
    if step and size % step:
        yield (
            f"--global-batch-size {size}: must be a multiple of --micro-batch-size {micro} x "
            f"{replicas} data-parallel replicas = {step}; {-(-size // step) * step} would do"
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


# The model --------------------------------------------------------------------------------------


def head_width(config: Config) -> Iterator[str]:
    model = config.model
    if not config.is_given("kv_channels") and model.hidden_size % model.num_attention_heads:
        yield (
            f"--hidden-size {model.hidden_size}: must be a multiple of --num-attention-heads "
            f"{model.num_attention_heads}; change one, or give --kv-channels"
        )


def heads_over_tensor_parallel(config: Config) -> Iterator[str]:
    heads, size = config.model.num_attention_heads, config.parallel.tensor_model_parallel_size
    if heads % size:
        yield (
            f"--num-attention-heads {heads}: must be a multiple of --tensor-model-parallel-size "
            f"{size}; change one of them"
        )


def query_groups(config: Config) -> Iterator[str]:
    heads, groups = config.model.num_attention_heads, config.model.num_query_groups
    size = config.parallel.tensor_model_parallel_size
    if heads % groups:
        yield (
            f"--num-query-groups {groups}: must divide --num-attention-heads {heads}; "
            "every group serves the same number of heads"
        )
    elif groups != heads and groups % size and size % groups:
        yield (
            f"--num-query-groups {groups}: must be a multiple or a divisor of "
            f"--tensor-model-parallel-size {size}; change one of them"
        )


def feed_forward_width(config: Config) -> Iterator[str]:
    width, size = config.model.ffn_hidden_size, config.parallel.tensor_model_parallel_size
    if width < 1:
        yield (
            f"--hidden-size {config.model.hidden_size}: too small for --swiglu's default "
            "feed-forward width, a multiple of 64; give --ffn-hidden-size"
        )
    elif width % size:
        yield (
            f"--ffn-hidden-size {width}: must be a multiple of --tensor-model-parallel-size "
            f"{size}; change one of them"
        )


def layers_over_pipeline(config: Config) -> Iterator[str]:
    layers, stages = config.model.num_layers, config.parallel.pipeline_model_parallel_size
    if layers % stages:
        yield (
            f"--num-layers {layers}: must be a multiple of --pipeline-model-parallel-size "
            f"{stages}; change one of them"
        )


def activation(config: Config) -> Iterator[str]:
    if config.model.swiglu and config.model.squared_relu:
        yield "--swiglu and --squared-relu: choose one activation"


def rotary_embedding(config: Config) -> Iterator[str]:
    model = config.model
    if model.position_embedding_type != "rope":
        if model.use_rope_scaling:
            yield (
                "--use-rope-scaling: needs --position-embedding-type rope, not "
                f"{model.position_embedding_type}; change one of them"
            )
        return
    rotated = int(model.kv_channels * model.rotary_percent)
    if rotated < 2 or rotated % 2:
        yield (
            f"--rotary-percent {model.rotary_percent:g}: rotates {rotated} of "
            f"{model.kv_channels} channels of a head, which must be an even number above 0; "
            "change it or --kv-channels"
        )


def position_table(config: Config) -> Iterator[str]:
    length, rows = config.data.seq_length, config.model.max_position_embeddings
    if length > rows:
        yield (
            f"--seq-length {length}: must be at most --max-position-embeddings {rows}; "
            "raise the table or shorten the rows"
        )


def sequence_shards(config: Config) -> Iterator[str]:
    length, size = config.data.seq_length, config.parallel.tensor_model_parallel_size
    packed = config.packing.use_packed_sequence  # packs are padded to the size
    if config.parallel.sequence_parallel and not packed and length % size:
        yield (
            f"--seq-length {length}: must be a multiple of --tensor-model-parallel-size {size} "
            "with --sequence-parallel; change it, or leave --sequence-parallel out"
        )


# Training ---------------------------------------------------------------------------------------


def precision(config: Config) -> Iterator[str]:
    if config.model.fp32_residual_connection and not config.training.bf16:
        yield "--fp32-residual-connection: needs --bf16; in fp32 the residual is fp32 already"


def recompute(config: Config) -> Iterator[str]:
    training = config.training
    granularity, method = training.recompute_granularity, training.recompute_method
    layers = training.recompute_num_layers
    if granularity == "full":
        if method is None or layers is None:
            yield (
                "--recompute-granularity full: needs --recompute-method and "
                "--recompute-num-layers; 'uniform' and 1 save the most memory"
            )
        else:
            stage = config.model.num_layers // config.parallel.pipeline_model_parallel_size
            if layers > stage:
                yield (
                    f"--recompute-num-layers {layers}: a pipeline stage has {stage} layers; "
                    "use at most that many"
                )
    elif method is not None or layers is not None:
        yield (
            "--recompute-method and --recompute-num-layers: need --recompute-granularity full, "
            f"not {granularity or 'none'}; leave them out or ask for full"
        )


def learning_rate(config: Config) -> Iterator[str]:
    optimization = config.optimization
    if optimization.min_lr > optimization.lr:
        yield f"--min-lr {optimization.min_lr:g}: must be at most --lr {optimization.lr:g}"
    if optimization.lr_warmup_init > optimization.lr:
        yield (
            f"--lr-warmup-init {optimization.lr_warmup_init:g}: must be at most --lr "
            f"{optimization.lr:g}; warm-up rises"
        )


def warmup(config: Config) -> Iterator[str]:
    optimization = config.optimization
    fraction, iterations = optimization.lr_warmup_fraction, optimization.lr_warmup_iters
    if fraction is not None and iterations:
        yield (
            f"--lr-warmup-fraction {fraction:g} and --lr-warmup-iters {iterations}: "
            "exclude each other; keep one"
        )
    elif optimization.warmup_iters >= optimization.lr_decay_iters:
        yield (
            f"warm-up of {optimization.warmup_iters:g} iterations: must be shorter than "
            f"--lr-decay-iters {optimization.lr_decay_iters} (default --train-iters); shorten "
            "--lr-warmup-iters or --lr-warmup-fraction"
        )


def final_decay(config: Config) -> Iterator[str]:
    optimization = config.optimization
    final = optimization.lr_wsd_decay_iters
    if optimization.lr_decay_style != "WSD":
        if final is not None:
            yield f"--lr-wsd-decay-iters {final}: needs --lr-decay-style WSD"
    elif final is None:
        yield "--lr-decay-style WSD: needs --lr-wsd-decay-iters, the length of its final phase"
    elif final > optimization.lr_decay_iters:
        yield (
            f"--lr-wsd-decay-iters {final}: must be at most --lr-decay-iters "
            f"{optimization.lr_decay_iters}"
        )


def weight_decay(config: Config) -> Iterator[str]:
    start, end = config.optimization.start_weight_decay, config.optimization.end_weight_decay
    given = [dest for dest in ("start_weight_decay", "end_weight_decay") if config.is_given(dest)]
    if config.optimization.weight_decay_incr_style == "constant":
        if given:
            yield (
                "--start-weight-decay and --end-weight-decay: need --weight-decay-incr-style "
                "linear or cosine; for a constant one give --weight-decay"
            )
    elif len(given) < 2:
        yield (
            f"--weight-decay-incr-style {config.optimization.weight_decay_incr_style}: needs "
            "--start-weight-decay and --end-weight-decay"
        )
    elif end < start:
        yield f"--end-weight-decay {end:g}: must be at least --start-weight-decay {start:g}"


# Data and reports -------------------------------------------------------------------------------


def data_source(config: Config) -> Iterator[str]:
    data = config.data
    sources = {
        "--data-path": bool(data.data_path),
        "--train-data-path / --valid-data-path / --test-data-path": data.has_per_split_paths,
        "--mock-data": data.mock_data,
    }
    chosen = [name for name, given in sources.items() if given]
    if not chosen:
        yield f"no data: give one of {', '.join(sources)}"
    elif len(chosen) > 1:
        yield f"{' and '.join(chosen)}: exclude each other; keep one"
    elif data.has_per_split_paths and not data.train_data_path:
        yield "--valid-data-path / --test-data-path: need --train-data-path too"


def split_proportions(config: Config) -> Iterator[str]:
    data = config.data
    if data.split is None:
        return
    if data.has_per_split_paths:
        yield (
            f"--split {data.split}: splits --data-path, and excludes --train-data-path and its "
            "companions; leave one out"
        )
        return
    parts = [part.strip() for part in data.split.split(",")]
    number = re.compile(r"\d+\.?\d*|\.\d+")  # what megatron-core reads
    legal = len(parts) <= 3 and all(number.fullmatch(part) for part in parts)
    if not legal or not any(map(float, parts)):
        yield (
            f"--split {data.split}: must be up to three proportions of training, validation and "
            "test, not all 0, as in 90,5,5"
        )


def tokenizer(config: Config) -> Iterator[str]:
    data = config.data
    if data.tokenizer_type == "HuggingFaceTokenizer" and not data.tokenizer_model:
        yield (
            "--tokenizer-type HuggingFaceTokenizer: needs --tokenizer-model, a tokenizer.json or "
            "a folder that holds one"
        )
    if data.tokenizer_type == "NullTokenizer" and data.vocab_size is None:
        yield "--tokenizer-type NullTokenizer: needs --vocab-size, it has no vocabulary of its own"


def packing_options(config: Config) -> Iterator[str]:
    packing = config.packing
    if packing.packing_alignment != "default" and not packing.use_packed_sequence:
        yield (
            f"--packing-alignment {packing.packing_alignment}: needs --use-packed-sequence; "
            "without it nothing is packed"
        )


def experiment_name(config: Config) -> Iterator[str]:
    logging = config.logging
    if logging.wandb_project and not logging.wandb_exp_name:
        yield f"--wandb-project {logging.wandb_project}: needs --wandb-exp-name, the run's name"


# Hardware ---------------------------------------------------------------------------------------


def attention_dropout_on_cpu(config: Config) -> Iterator[str]:
    rate = config.model.attention_dropout
    if config.device_type == "cpu" and rate:
        yield (
            f"--attention-dropout {rate:g}: must be 0 on a CPU, whose exact attention has no "
            "dropout; add --attention-dropout 0.0 (--hidden-dropout works)"
        )


RULES: tuple[Rule, ...] = (
    launcher_rank,
    context_parallelism,
    world_size,
    global_batch,
    overlapped_parameter_gather,
    head_width,
    heads_over_tensor_parallel,
    query_groups,
    feed_forward_width,
    layers_over_pipeline,
    activation,
    rotary_embedding,
    position_table,
    sequence_shards,
    precision,
    recompute,
    learning_rate,
    warmup,
    final_decay,
    weight_decay,
    data_source,
    split_proportions,
    tokenizer,
    packing_options,
    experiment_name,
)

HARDWARE_RULES: tuple[Rule, ...] = (attention_dropout_on_cpu,)
