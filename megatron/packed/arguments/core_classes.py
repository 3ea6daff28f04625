"""What becomes of the settings that megatron-core declares and this project leaves to it.

Every field of the installed megatron-core that no config group declares gets a flag (see core.py).
The tables here give each one its class. A field that they don't know, one that a newer core
brought, is passed on to it, and the start-up table says that nobody here has tried it.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron.packed.arguments.declare import EVERYWHERE, Replaced


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Set by the program itself, callbacks in disguise, deprecated in core, or without a flag upstream.
INTERNAL = _names(
    """
    virtual_pipeline_model_parallel_size enable_autocast moe_extended_tp
    num_microbatches_with_partial_activation_checkpoints async_tensor_model_parallel_allreduce
    tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_atomic_ag tp_comm_atomic_rs
    variable_seq_lengths batch_p2p_comm batch_p2p_sync deallocate_pipeline_outputs
    cpu_offloading cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights
    cpu_offloading_double_buffering cpu_offloading_retain_pinned_cpu_buffers mtp_standalone
    num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage softmax_scale
    layernorm_epsilon layernorm_zero_centered_gamma
    gated_linear_unit bias_activation_fusion activation_func_fp8_input_store num_moe_experts
    memory_efficient_layer_norm fused_single_qkv_rope fp8_param fp4_param
    fp8_dot_product_attention fp8_multi_head_attention tp_only_amax_red
    moe_token_dropping moe_router_topk_limited_devices moe_layer_recompute
    moe_router_padding_for_fp8
    cuda_graph_use_single_mempool cuda_graph_retain_backward_graph
    disable_parameter_transpose_cache inference_sampling_seed use_inference_optimized_layers
    inference_rng_tracker inference_fuse_tp_communication flash_decode mlp_chunks_for_prefill
    cache_mla_latents
    heterogeneous_block_specs hetereogenous_dist_checkpoint is_hybrid_model config_logger_dir
    mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path
    mrope_section grad_reduce_in_fp32 check_for_nan_in_grad use_custom_fsdp
    gtp_weight_remat_size expert_gtp_weight_remat_size
    perform_initialization use_cpu_initialization init_model_with_meta_device
    overlap_p2p_comm barrier_with_L1_time max_seqlen_per_dp_cp_rank
    beta_fast beta_slow original_max_position_embeddings rope_type test_mode
    decoupled_weight_decay pin_cpu_grads pin_cpu_params store_param_remainders
    suggested_communication_unit_size preserve_fp32_weights gradient_reduce_div_fusion
    """
)

# Upstream's spelling, where it isn't the field's name.
SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "average_in_collective": ("--ddp-average-in-collective",),
    "bucket_size": ("--ddp-bucket-size",),
    "pad_buckets_for_high_nccl_busbw": ("--ddp-pad-buckets-for-high-nccl-busbw",),
    "reduce_scatter_with_fp32_accumulation": ("--ddp-reduce-scatter-with-fp32-accumulation",),
    "use_te_rng_tracker": ("--te-rng-tracker",),
    "fp8": ("--fp8-format",),
    "fp4": ("--fp4-format",),
    "overlap_p2p_comm_warmup_flush": ("--overlap-p2p-communication-warmup-flush",),
    "microbatch_group_size_per_vp_stage": ("--microbatch-group-size-per-virtual-pipeline-stage",),
}

_OVERLAP = "it moves when messages are sent, not what is computed"
_BUFFERS = Replaced(
    "TransformerEngine's user buffers aren't set up here", "plain collectives", None, EVERYWHERE
)
_GRAPHS = "CUDA graphs replay the same kernels faster"
_OFFLOAD = "it moves where activations wait, not what is computed"
_SHARDING = "it says how replicas share memory, not what is computed"


def _everywhere(why: str, used: str) -> Replaced:
    return Replaced(why, used, None, EVERYWHERE)


# `value` None stands for the field's default: what is replaced never reaches megatron-core.
REPLACED: Mapping[str, Replaced] = {
    "tp_comm_overlap": _BUFFERS,
    "tp_comm_bulk_wgrad": _BUFFERS,
    "tp_comm_bulk_dgrad": _BUFFERS,
    "tp_comm_overlap_ag": _BUFFERS,
    "tp_comm_overlap_rs": _BUFFERS,
    "tp_comm_overlap_rs_dgrad": _BUFFERS,
    "tp_comm_split_ag": _BUFFERS,
    "tp_comm_split_rs": _BUFFERS,
    "tp_comm_bootstrap_backend": _BUFFERS,
    "pipeline_model_parallel_comm_backend": Replaced("nccl and ucc need CUDA", "gloo", None),
    "use_te_rng_tracker": Replaced("CUDA graphs alone need it", "megatron-core's tracker", None),
    "cross_entropy_fusion_impl": Replaced("the fused kernels need CUDA", "plain torch", None),
    "overlap_moe_expert_parallel_comm": _everywhere(_OVERLAP, "exchange, then compute"),
    "ep_overlap_early_attn_memory_release": _everywhere(_OVERLAP, "exchange, then compute"),
    "delay_wgrad_compute": _everywhere(
        "it moves when weight gradients are computed", "with the other gradients"
    ),
    "defer_embedding_wgrad_compute": Replaced(
        "it needs a fused CUDA kernel, and moves work into the pipeline's flush",
        "gradients at once",
        None,
        EVERYWHERE,
    ),
    "wgrad_deferral_limit": _everywhere(
        "it belongs to --defer-embedding-wgrad-compute", "gradients at once"
    ),
    "overlap_p2p_comm_warmup_flush": _everywhere(_OVERLAP, "send and receive in turn"),
    "use_ring_exchange_p2p": _everywhere("it needs a torch of its own", "send and receive"),
    "average_in_collective": _everywhere(
        "gradients are sums, divided once by the counted tokens", "sum, then division"
    ),
    "align_param_gather": Replaced("nothing is gathered ahead on a CPU", "no alignment", None),
    "bucket_size": Replaced("nothing overlaps on a CPU", "one bucket", None),
    "pad_buckets_for_high_nccl_busbw": Replaced("nccl needs CUDA", "no padding", None),
    "reduce_scatter_with_fp32_accumulation": _everywhere(
        "gradients are reduced in fp32 throughout", "fp32 reduction"
    ),
    "overlap_param_gather_with_optimizer_step": _everywhere(
        _OVERLAP, "gather after the optimizer step"
    ),
    "num_buckets": Replaced("nothing overlaps on a CPU", "one bucket", None),
    "high_priority_a2a_comm_stream": Replaced("a CPU has no streams", "one queue", None),
    "enable_cuda_graph": _everywhere(_GRAPHS, "kernel by kernel"),
    "external_cuda_graph": _everywhere(_GRAPHS, "kernel by kernel"),
    "cuda_graph_impl": _everywhere(_GRAPHS, "kernel by kernel"),
    "cuda_graph_warmup_steps": _everywhere(_GRAPHS, "kernel by kernel"),
    "fine_grained_activation_offloading": _everywhere(_OFFLOAD, "activations stay"),
    "offload_modules": _everywhere(_OFFLOAD, "activations stay"),
    "min_offloaded_tensor_size": _everywhere(_OFFLOAD, "activations stay"),
    "activation_offload_fraction": _everywhere(_OFFLOAD, "activations stay"),
    "delay_offload_until_cuda_graph": _everywhere(_OFFLOAD, "activations stay"),
    "delta_offload_bytes_across_pp_ranks": _everywhere(_OFFLOAD, "activations stay"),
    "fine_grained_offloading_max_inflight_offloads": _everywhere(_OFFLOAD, "activations stay"),
    "distribute_saved_activations": _everywhere(_OFFLOAD, "every rank keeps its own"),
    "optimizer_cpu_offload": Replaced("the optimizer is on the CPU already", "as it is", None),
    "optimizer_offload_fraction": Replaced("the optimizer is on the CPU already", "as it is", None),
    "use_torch_optimizer_for_cpu_offload": Replaced(
        "the optimizer is on the CPU already", "as it is", None
    ),
    "overlap_cpu_optimizer_d2h_h2d": Replaced(
        "the optimizer is on the CPU already", "as it is", None
    ),
    "use_te_activation_func": Replaced("TransformerEngine needs CUDA", "torch's function", None),
    "use_fused_weighted_squared_relu": Replaced(
        "the fused kernel needs CUDA", "weight, then activation", None
    ),
    "fused_residual_rmsnorm": Replaced("the fused kernel needs CUDA", "addition, then norm", None),
    "mla_down_proj_fusion": Replaced("the fused kernel needs CUDA", "two projections", None),
    "symmetric_ar_type": _everywhere("for inference on NVLink alone", "all-reduce"),
    "disable_bf16_reduced_precision_matmul": Replaced(
        "CPU matrix products accumulate in fp32", "as it is", None
    ),
    "clone_scatter_output_in_embedding": Replaced(
        "it is about memory alone", "the clone is kept", None, EVERYWHERE
    ),
    "keep_fp8_transpose_cache": _everywhere(_SHARDING, "no cache"),
    "nccl_ub": _everywhere("nccl's user buffers aren't set up here", "plain collectives"),
    "fsdp_double_buffer": _everywhere(_SHARDING, "DistributedDataParallel"),
    "fsdp_manual_registration": _everywhere(_SHARDING, "DistributedDataParallel"),
    "disable_symmetric_registration": _everywhere(_SHARDING, "DistributedDataParallel"),
}

_LOGITS = (
    "the exact attention never holds the scores it would clip or log; leave it out "
    "(--qk-layernorm bounds them)"
)
_FP4 = "fp4 rounds every matrix product and needs a Blackwell GPU; train with --bf16"
_KITCHEN = "the kitchen package isn't part of this build; leave it out"

REFUSED: Mapping[str, str] = {
    "fp4": _FP4,
    "fp4_param_gather": _FP4,
    "fp4_quantizer_factory": _FP4,
    "fp8_quantizer_factory": "recipes of one's own aren't read here; use --fp8-recipe",
    "use_kitchen": _KITCHEN,
    "use_kitchen_attention": _KITCHEN,
    "kitchen_attention_backend": _KITCHEN,
    "qk_clip": _LOGITS,
    "qk_clip_alpha": _LOGITS,
    "qk_clip_threshold": _LOGITS,
    "log_max_attention_logit": _LOGITS,
    "hybrid_context_parallel": (
        "the layout of a pack is chosen by --cp-comm-type here, which balances packs of any "
        "lengths; leave it out"
    ),
    "use_precision_aware_optimizer": (
        "optimizer states are kept in fp32 here; leave it out, or shard them with "
        "--use-distributed-optimizer"
    ),
    "reuse_grad_buf_for_mxfp8_param_ag": "it belongs to mxfp8 parameters; leave it out",
    "batch_invariant_mode": "its kernels are for inference; leave it out",
}

# A CPU has no fp8 arithmetic, and leaving it out changes every product.
REFUSED_ON_CPU: Mapping[str, str] = {
    "fp8": (
        "fp8 rounds every matrix product, and a CPU has no fp8 arithmetic: the losses would be "
        "another model's; leave it and its companions out and train with --bf16"
    ),
}

# Passed on to megatron-core, which honours them in plain torch on every device; those of fp8 have
# no meaning without --fp8-format.
HONOURED = _names(
    """
    check_for_large_grads
    linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads
    linear_num_value_heads
    dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff
    dsa_indexer_use_sparse_loss
    fp8_recipe fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad
    fp8_param_gather first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16
    fp4_recipe
    """
)
