"""Rules on experts, their router and their dispatcher."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.packed.arguments.config import Config
from megatron.packed.errors import ConfigurationError

_CAPACITY_BALANCING = ("aux_loss", "seq_aux_loss", "none")


def experts_are_there(config: Config) -> Iterator[str]:
    moe = config.moe
    if moe.num_experts is not None:
        return
    if moe.expert_model_parallel_size > 1:
        yield (
            f"--expert-model-parallel-size {moe.expert_model_parallel_size}: needs --num-experts; "
            "add it or leave this out"
        )


def experts_over_processes(config: Config) -> Iterator[str]:
    moe = config.moe
    if moe.num_experts is not None and moe.num_experts % moe.expert_model_parallel_size:
        yield (
            f"--num-experts {moe.num_experts}: must be a multiple of --expert-model-parallel-size "
            f"{moe.expert_model_parallel_size}; change one of them"
        )


def expert_groups_of_processes(config: Config) -> Iterator[str]:
    moe, parallel = config.moe, config.parallel
    if moe.num_experts is None:
        return
    size = moe.expert_tensor_parallel_size * moe.expert_model_parallel_size
    size *= parallel.pipeline_model_parallel_size
    if parallel.world_size % size:
        yield (
            f"{parallel.world_size} processes started, which must be a multiple of expert tensor "
            f"{moe.expert_tensor_parallel_size} x expert {moe.expert_model_parallel_size} x "
            f"pipeline {parallel.pipeline_model_parallel_size} = {size}; change "
            "--nproc-per-node or --nnodes of torchrun, or the parallel sizes"
        )


def experts_need_sequence_parallelism(config: Config) -> Iterator[str]:
    tensor = config.parallel.tensor_model_parallel_size
    if config.moe.num_experts is not None and tensor > 1 and not config.parallel.sequence_parallel:
        yield (
            f"--num-experts with --tensor-model-parallel-size {tensor}: needs --sequence-parallel, "
            "or every process would send the same tokens to the experts; add it"
        )


def expert_layers(config: Config) -> Iterator[str]:
    if config.moe.num_experts is None:
        return
    try:
        pattern = config.moe.expert_layers(config.model.num_layers)
    except ConfigurationError as error:
        yield f"--moe-layer-freq {error}"
        return
    if not any(pattern):
        yield (
            f"--moe-layer-freq {config.moe.moe_layer_freq}: gives no layer experts; leave "
            "--num-experts out"
        )


def experts_of_a_token(config: Config) -> Iterator[str]:
    moe = config.moe
    if moe.num_experts is None:
        return
    if moe.moe_router_topk > moe.num_experts:
        yield (
            f"--moe-router-topk {moe.moe_router_topk}: must be at most --num-experts "
            f"{moe.num_experts}; change one of them"
        )
    pre = moe.moe_router_pre_softmax or moe.moe_router_score_function != "softmax"
    sinkhorn = "sinkhorn" in moe.moe_router_load_balancing_type
    if moe.moe_router_topk == 1 and not pre and not sinkhorn:
        yield (
            "--moe-router-topk 1: the softmax over one chosen expert is 1 and the router can't "
            "learn; add --moe-router-pre-softmax"
        )


def groups_of_experts(config: Config) -> Iterator[str]:
    moe = config.moe
    groups, chosen = moe.moe_router_num_groups, moe.moe_router_group_topk
    if moe.num_experts is None or (groups is None and chosen is None):
        return
    if groups is None or chosen is None:
        given = "--moe-router-num-groups" if chosen is None else "--moe-router-group-topk"
        other = "--moe-router-group-topk" if chosen is None else "--moe-router-num-groups"
        yield f"{given}: needs {other}; give both or none"
        return
    if moe.num_experts % groups:
        yield (
            f"--moe-router-num-groups {groups}: must divide --num-experts {moe.num_experts}; "
            "groups are equal"
        )
    elif chosen > groups:
        yield (
            f"--moe-router-group-topk {chosen}: must be at most --moe-router-num-groups {groups}"
        )
    elif moe.moe_router_topk % chosen:
        yield (
            f"--moe-router-topk {moe.moe_router_topk}: must be a multiple of "
            f"--moe-router-group-topk {chosen}; groups are ranked by their best "
            "topk / group-topk experts"
        )
    elif moe.moe_router_topk > chosen * (moe.num_experts // groups):
        yield (
            f"--moe-router-topk {moe.moe_router_topk}: {chosen} of {groups} groups hold only "
            f"{chosen * (moe.num_experts // groups)} experts; choose more groups or fewer experts"
        )


def balancing(config: Config) -> Iterator[str]:
    moe = config.moe
    kinds, coefficients = moe.moe_router_load_balancing_type, moe.moe_aux_loss_coeff
    if moe.num_experts is None:
        return
    if len(set(kinds)) < len(kinds):
        yield f"--moe-router-load-balancing-type {' '.join(kinds)}: name each kind once"
    if len(kinds) > 1 and {"sinkhorn", "none"} & set(kinds):
        yield (
            f"--moe-router-load-balancing-type {' '.join(kinds)}: sinkhorn and none stand alone; "
            "name losses only"
        )
    if len(kinds) != len(coefficients):
        yield (
            f"--moe-aux-loss-coeff {' '.join(f'{c:g}' for c in coefficients)}: needs one value for "
            f"each of --moe-router-load-balancing-type {' '.join(kinds)}"
        )
    elif "sinkhorn" in kinds and any(coefficients):
        yield "--moe-aux-loss-coeff: sinkhorn has no loss; leave it out"
    if "sinkhorn" in kinds and (moe.moe_router_group_topk or moe.moe_router_enable_expert_bias):
        yield (
            "--moe-router-load-balancing-type sinkhorn: chooses experts by itself, without groups "
            "or an expert bias; leave those out"
        )


def expert_bias(config: Config) -> Iterator[str]:
    moe = config.moe
    if moe.moe_router_enable_expert_bias and moe.moe_router_score_function != "sigmoid":
        yield (
            "--moe-router-enable-expert-bias: needs --moe-router-score-function sigmoid, not "
            f"{moe.moe_router_score_function}"
        )


def capacity(config: Config) -> Iterator[str]:
    moe = config.moe
    kinds = moe.moe_router_load_balancing_type
    if moe.num_experts is None:
        return
    if moe.capacity_factor is None:
        if moe.moe_pad_expert_input_to_capacity:
            yield (
                "--moe-pad-expert-input-to-capacity: needs --moe-expert-capacity-factor; "
                "add it or leave this out"
            )
        return
    if set(kinds) - set(_CAPACITY_BALANCING):
        yield (
            f"--moe-expert-capacity-factor {moe.capacity_factor:g}: goes with "
            f"--moe-router-load-balancing-type {', '.join(_CAPACITY_BALANCING)}, not "
            f"{' '.join(kinds)}"
        )


def biases_of_experts(config: Config) -> Iterator[str]:
    moe = config.moe
    if moe.num_experts is None or not config.model.add_bias_linear:
        return
    if moe.moe_shared_expert_intermediate_size is not None:
        yield (
            "--moe-shared-expert-intermediate-size: shared experts have no biases; add "
            "--disable-bias-linear"
        )
    if moe.expert_tensor_parallel_size > 1:
        yield (
            f"--expert-tensor-parallel-size {moe.expert_tensor_parallel_size}: experts that are "
            "cut have no biases; add --disable-bias-linear or pass 1"
        )


def biases_of_grouped_experts(config: Config) -> Iterator[str]:
    """TransformerEngine's experts take their biases for parts of the tensor-parallel model."""
    model, spread = config.model, config.parallel.tensor_model_parallel_size
    if (
        config.moe.num_experts is not None
        and model.add_bias_linear
        and spread > 1
        and config.device_type == "cuda"
        and model.transformer_impl == "transformer_engine"
    ):
        yield (
            f"--num-experts with --tensor-model-parallel-size {spread}: TransformerEngine's "
            "experts have no biases then; add --disable-bias-linear, or --transformer-impl local"
        )


def width_over_expert_tensor_parallel(config: Config) -> Iterator[str]:
    moe = config.moe
    size = moe.expert_tensor_parallel_size
    if moe.num_experts is None:
        return
    if moe.moe_ffn_hidden_size % size:
        yield (
            f"--moe-ffn-hidden-size {moe.moe_ffn_hidden_size}: must be a multiple of "
            f"--expert-tensor-parallel-size {size}; change one of them"
        )
    shared, tensor = (
        moe.moe_shared_expert_intermediate_size,
        config.parallel.tensor_model_parallel_size,
    )
    if shared is not None and shared % tensor:
        yield (
            f"--moe-shared-expert-intermediate-size {shared}: must be a multiple of "
            f"--tensor-model-parallel-size {tensor}; change one of them"
        )


def shared_expert(config: Config) -> Iterator[str]:
    moe = config.moe
    if moe.moe_shared_expert_intermediate_size is not None:
        if moe.moe_shared_expert_overlap and moe.moe_token_dispatcher_type == "allgather":
            yield (
                "--moe-shared-expert-overlap: needs --moe-token-dispatcher-type alltoall, "
                "not allgather"
            )
        return
    for name in ("moe_shared_expert_gate", "moe_shared_expert_overlap"):
        if getattr(moe, name):
            yield (
                f"--{name.replace('_', '-')}: needs --moe-shared-expert-intermediate-size; "
                "add it or leave this out"
            )


def probabilities_on_input(config: Config) -> Iterator[str]:
    moe = config.moe
    if moe.moe_apply_probs_on_input and moe.moe_router_topk != 1:
        yield (f"--moe-apply-probs-on-input: needs --moe-router-topk 1, not {moe.moe_router_topk}")


RULES = (
    experts_are_there,
    experts_over_processes,
    expert_groups_of_processes,
    experts_need_sequence_parallelism,
    expert_layers,
    experts_of_a_token,
    groups_of_experts,
    balancing,
    expert_bias,
    capacity,
    biases_of_experts,
    width_over_expert_tensor_parallel,
    shared_expert,
    probabilities_on_input,
)
HARDWARE_RULES = (biases_of_grouped_experts,)
