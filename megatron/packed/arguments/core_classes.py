"""What becomes of the settings that megatron-core declares and this project leaves to it.

Every field of the installed megatron-core that no config group declares gets a flag (see core.py).
The tables here give each one its class. A field that they don't know, one that a newer core
brought, is passed on to it, and the start-up table says that nobody here has tried it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    num_buckets
    """
)

# Upstream's spelling, where it isn't the field's name.
SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "average_in_collective": ("--ddp-average-in-collective",),
    "bucket_size": ("--ddp-bucket-size",),
    "pad_buckets_for_high_nccl_busbw": ("--ddp-pad-buckets-for-high-nccl-busbw",),
    "reduce_scatter_with_fp32_accumulation": ("--ddp-reduce-scatter-with-fp32-accumulation",),
    "nccl_ub": ("--use-nccl-ub",),
    "align_param_gather": ("--no-align-param-gather",),
    "use_te_rng_tracker": ("--te-rng-tracker",),
    "fp8": ("--fp8-format",),
    "fp4": ("--fp4-format",),
    "overlap_p2p_comm_warmup_flush": ("--overlap-p2p-communication-warmup-flush",),
    "microbatch_group_size_per_vp_stage": ("--microbatch-group-size-per-virtual-pipeline-stage",),
}

# Upstream's default, where its parser has another than core's dataclass.
DEFAULTS: Mapping[str, Any] = {"optimizer_offload_fraction": 1.0, "align_param_gather": True}

_OVERLAP = "it moves when messages are sent, not what is computed"
_BUFFERS = Replaced(
    "TransformerEngine's user buffers aren't set up here", "plain collectives", None, EVERYWHERE
)
_GRAPHS = "CUDA graphs replay the same kernels faster"
_OFFLOAD = "it moves where activations wait, not what is computed"
_SHARDING = "it says how replicas share memory, not what is computed"
_INFERENCE = "it is about inference alone"
_FLEX = Replaced("the libraries of flex need CUDA", "alltoall", None)
_FUSED = Replaced("the fused kernel needs CUDA", "one product after another", None)


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
    "align_param_gather": Replaced("nothing is gathered ahead on a CPU", "one gather", None),
    "bucket_size": Replaced(
        "buckets are for overlap, and a CPU reduces after the backward pass", "one bucket", None
    ),
    "reduce_scatter_with_fp32_accumulation": _everywhere(
        "gradients are reduced in fp32 throughout", "fp32 reduction"
    ),
    "overlap_param_gather_with_optimizer_step": _everywhere(
        _OVERLAP, "gather after the optimizer step"
    ),
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
    # New with 0.17 to 0.19.
    **dict.fromkeys(
        _names(
            """
            fsdp_db_use_persist_buf_on_alloc_fail fsdp_all_gather_in_start_param_sync
            megatron_fsdp_use_decoupled_grad megatron_fsdp_cuda_graph_mode
            megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer
            """
        ),
        _everywhere(_SHARDING, "DistributedDataParallel"),
    ),
    **dict.fromkeys(
        _names(
            """
            moe_flex_dispatcher_num_sms moe_permute_fusion_into_hybridep
            moe_hybridep_pad_uneven_dispatch_inputs moe_hybridep_num_blocks_permute
            moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms_preprocessing
            moe_ncclep_static_shape moe_ncclep_zero_copy
            """
        ),
        _FLEX,
    ),
    **dict.fromkeys(
        _names(
            """
            moe_pad_experts_for_cuda_graph_inference nccl_all_reduce_for_prefill
            inference_disable_triton_nvls_kernels inference_grouped_gemm_backend
            inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type
            """
        ),
        _everywhere(_INFERENCE, "nothing"),
    ),
    **dict.fromkeys(
        _names(
            """
            moe_paged_stash moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda
            moe_paged_stash_buffer_size_factor_cpu
            """
        ),
        _everywhere(_OFFLOAD, "activations stay"),
    ),
    "mlp_chunks_for_training": _everywhere("it saves memory alone", "the sequence in one piece"),
    "overlap_dispatch_backward_with_experts_wgrad": _everywhere(_OVERLAP, "exchange, then compute"),
    "optimizer_cuda_graph": _everywhere(_GRAPHS, "kernel by kernel"),
    "use_layer_wise_distributed_optimizer": _everywhere(
        _SHARDING, "as --optimizer dist_muon shares Muon's state"
    ),
    "use_grouped_gemm_for_shared_expert": _FUSED,
    "use_grouped_gemm_for_dense_mlp": _FUSED,
    "moe_single_grouped_weight": _everywhere(
        "it says how weights are stored, not what is computed", "weights of each expert"
    ),
    "moe_single_grouped_bias": _everywhere(
        "it says how biases are stored, not what is computed", "biases of each expert"
    ),
    "dsa_kernel_backend": _FUSED,
}

_LOGITS = (
    "the exact attention never holds the scores it would clip or log; leave it out "
    "(--qk-layernorm bounds them)"
)
_FP4 = "fp4 rounds every matrix product and needs a Blackwell GPU; train with --bf16"
_SHARDS = (
    "weights are cut by tensor parallelism alone here; leave it out, and shard the optimizer's "
    "state with --use-distributed-optimizer"
)
_INTERLEAVED = (
    "it stores gates and linear units in turns, so that checkpoints fit this setting alone; "
    "leave it out"
)
_OTHER_OPTIMIZER = (
    "it belongs to an optimizer that isn't offered here; leave it out, see --optimizer"
)
_HYBRID = "layers of another kind in predictions aren't part of this build; leave it out"
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
    "reuse_grad_buf_for_mxfp8_param_ag": "it belongs to mxfp8 parameters; leave it out",
    "batch_invariant_mode": "its kernels are for inference; leave it out",
    # New with 0.17 to 0.19.
    "tensor_parallel_num_weight_shards": _SHARDS,
    "expert_tensor_parallel_num_weight_shards": _SHARDS,
    "mtp_hybrid_override_pattern": _HYBRID,
    "mup_width_mult": (
        "it follows from --hidden-size and --mup-base-hidden-size; leave it out, and give those"
    ),
    "fp8_output_proj": (
        "it rounds the logits, whose losses are exact here; leave it out, the output layer stays "
        "in the model's precision"
    ),
    "moe_shared_expert_glu_interleave_size": _INTERLEAVED,
    "moe_mlp_glu_interleave_size": _INTERLEAVED,
    "moe_router_quantile_balancing_ema": (
        "balancing by quantiles isn't offered here; leave it out, see "
        "--moe-router-load-balancing-type"
    ),
    "moe_router_force_biased": (
        "it adds random numbers to the router's logits, to time kernels; leave it out"
    ),
    "moe_expert_rank_capacity_factor": (
        "it drops tokens by the process that holds their expert, so that every layout would train "
        "another model; use --moe-expert-capacity-factor instead"
    ),
    "muon_coefficient_type": (
        "Muon's series has the coefficients that are called quintic; leave it out"
    ),
    "muon_scalar_optimizer": ("what Muon leaves to another optimizer is Adam's here; leave it out"),
    **dict.fromkeys(
        _names(
            """
            lion_beta1 lion_beta2 soap_shampoo_beta soap_precondition_frequency
            soap_use_kl_shampoo adaptive_muon_moment2_method adaptive_muon_beta2 adaptive_muon_eps
            """
        ),
        _OTHER_OPTIMIZER,
    ),
}

# A CPU has no fp8 arithmetic, and leaving it out changes every product.
REFUSED_ON_CPU: Mapping[str, str] = {
    "fp8": (
        "fp8 rounds every matrix product, and a CPU has no fp8 arithmetic: the losses would be "
        "another model's; leave it and its companions out and train with --bf16"
    ),
}

# Passed on to megatron-core, which honours them in plain torch on every device; those of fp8 have
# no meaning without --fp8-format, and those of DSA none without the variant of that name, which is
# refused.
HONOURED = _names(
    """
    check_for_large_grads
    linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads
    linear_num_value_heads
    dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff
    dsa_indexer_use_sparse_loss
    dsa_indexer_topk_freq dsa_indexer_skip_topk_offset dsa_indexer_rope_interleaved
    dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon
    dsa_indexer_k_norm_fp32 mtp_detach_heads mtp_use_repeated_layer
    pad_buckets_for_high_nccl_busbw
    fp8_recipe fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad
    fp8_param_gather first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16
    fp4_recipe
    """
)
