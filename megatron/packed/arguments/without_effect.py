"""Flags of upstream's that launch scripts carry and nothing here reads, or that are refused.

A table, since most say no more than that a script may have them: `name`, `name:type`, or
`name:type=default`; `*` after a type makes it a list. A switch that upstream's `--no-name` turns
off is written `-name`. Spellings that don't follow from the name are in `SPELLINGS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from megatron.packed.arguments.declare import EVERYWHERE, Replaced, flag

SECTION = "flags without effect"

# (what the flags are of, why they have no effect, what happens instead): the flags
REPLACED: Mapping[tuple[str, str, str], str] = {
    ("profilers", "profilers are started around the program", "no profile"): """
        profile profile_step_start:int=10 profile_step_end:int=12 profile_ranks:int*
        use_pytorch_profiler pytorch_profiler_collect_shapes pytorch_profiler_collect_callstack
        pytorch_profiler_collect_chakra record_memory_history
        memory_snapshot_path:str=snapshot.pickle record_shapes nvtx_ranges
    """,
    ("OneLogger", "that service isn't asked", "the log, TensorBoard and W&B"): """
        -enable_one_logger one_logger_project:str=megatron-lm one_logger_run_name:str
        one_logger_async app_tag_run_name:str app_tag_run_version:str=0.0.0
    """,
    ("reports", "nothing here writes it", "the log, TensorBoard and W&B"): """
        log_progress -log_loss_scale_to_tensorboard log_memory_interval:int log_device_memory_used
        -barrier_with_L1_time log_energy config_logger_dir:str= run_workload_inspector_server
        save_params_interval:int save_activations_interval:int save_wgrads_interval:int
        save_tokens_per_expert_interval:int save_dgrads_interval:int
        dump_param_to_param_group_map:str moe_routing_trace_path:str
        moe_routing_trace_max_training_iters:int moe_routing_trace_capture_logits
        moe_routing_trace_capture_hidden_states moe_routing_trace_dump_weights
    """,
    ("initial weights", "they are drawn by seed and name, on the host", "the same weights"): """
        -perform_initialization use_cpu_initialization init_model_with_meta_device
    """,
    ("the launcher", "the launcher's environment says it", "LOCAL_RANK"): """
        local_rank_of_launcher:int=0
    """,
    ("communication", "it says how messages are sent, not what they hold", "plain collectives"): """
        nccl_communicator_config_path:str use_sharp sharp_enabled_group:str
        high_priority_stream_groups:str* distributed_timeout_seconds_after_init:int
        create_all_gather_group -align_grad_reduce -gradient_reduce_div_fusion
        suggested_communication_unit_size:int enable_full_sharding_in_hsdp
        -torch_fsdp2_reshard_after_forward flight_recorder_dump_path:str
        flight_recorder_trace_buffer_size:int=2000 -flight_recorder_dump_on_timeout
        flight_recorder_include_stack_trace -flight_recorder_include_only_active
        -flight_recorder_extra_dump_on_exec
    """,
    ("memory", "it says where things wait, not what is computed", "they stay where they are"): """
        cpu_offloading_num_layers:int=0 cpu_offloading_retain_pinned_cpu_buffers -pin_cpu_grads
        -pin_cpu_params empty_unused_memory_level:int=0 disable_jit_fuser
    """,
    ("health checks", "it watches hardware, and changes nothing", "--log-straggler"): """
        gpu_sniff_test_interval:int train_sync_interval:int
    """,
    ("checkpoints", "every save is whole and lies in --save", "saves every --save-interval"): """
        non_persistent_save_interval:int non_persistent_ckpt_type:str
        non_persistent_global_ckpt_dir:str non_persistent_local_ckpt_dir:str
        non_persistent_local_ckpt_algo:str=fully_parallel replication replication_jump:int
        replication_factor:int=2 async_ckpt_cpu_priority:int=10 async_ckpt_io_priority:int=3
        ckpt_fully_parallel_load_exchange_algo:str=broadcast
        ckpt_fully_parallel_save_process_group:str=dp ckpt_fully_parallel_load_process_group:str=dp
        -ckpt_load_validate_sharding_integrity -strict_fsdp_dtensor_load -stream_ckpt_dequant
        distrib_optim_fully_reshardable_mem_efficient use_dist_ckpt_deprecated
        dist_ckpt_format_deprecated:str dist_ckpt_workers:int=1
    """,
    ("kernels", "the engine chooses among those installed", "--attention-backend"): """
        flash_attention_version:int
    """,
    ("YaRN", "channels are rounded without it, too", "rounding"): "yarn_rounds_to_int",
    ("restarts", "the launcher starts a run again", "torchrun's restarts"): """
        inprocess_restart inprocess_max_iterations:int inprocess_monitor_thread_interval:float=1
        inprocess_monitor_process_interval:float=1 inprocess_progress_watchdog_interval:float=1
        inprocess_heartbeat_interval:float=30 inprocess_soft_timeout:float=60
        inprocess_hard_timeout:float=90 inprocess_heartbeat_timeout:float=60
        inprocess_barrier_timeout:float=120 inprocess_completion_timeout:float=120
        inprocess_last_call_wait:float=1 inprocess_termination_grace_time:float=1
        inprocess_granularity:str=node inprocess_active_world_size:int=1
        inprocess_empty_cuda_cache enable_ft_package calc_ft_timeouts ft_num_warmup_iters:int=5
        adlr_autoresume adlr_autoresume_interval:int=1000
    """,
    ("storage", "files are opened where they are", "the file system"): """
        enable_msc disable_msc_deprecated
    """,
}

# (what the flags are of, why not and what to do): the flags
REFUSED: Mapping[tuple[str, str], str] = {
    ("Mamba and hybrid models", "layers of Mamba aren't part of this build; leave it out"): """
        spec:str* is_hybrid_model hybrid_layer_pattern:str hybrid_override_pattern:str
        hybrid_attention_ratio:float=0 hybrid_mlp_ratio:float=0 mamba_state_dim:int=128
        mamba_head_dim:int=64 mamba_num_groups:int=8 mamba_num_heads:int -use_mamba_mem_eff_path
    """,
    ("quantisation", "products are quantised by --fp8-format alone; leave it out"): """
        te_precision_config_file:str kitchen_config_file:str kitchen_recipe_number:int
    """,
    ("settings", "files of settings are given with --config-file; leave it out"): "yaml_cfg:str",
    ("losses", "losses are taken and summed in fp32; leave it out"): "fp16_lm_cross_entropy",
    ("activations", "GeLU is the exact one; leave it out, or use --swiglu"): "openai_gelu",
    ("weight decay", "all but biases and norms decay; leave it out"): (
        "no_weight_decay_cond_type:str"
    ),
    ("initial weights", "replicas must start from the same weights; leave it out"): (
        "data_parallel_random_init"
    ),
    ("the run", "this program trains, from the first iteration to the last; leave it out"): """
        skip_train iterations_to_skip:int* phase_transition_iterations:str start_eval_at_iter:int
        freeze_all_layers fake_process_group lazy_mpu_init perform_rl_step
    """,
    ("checkpoints", "checkpoints are read and written as --ckpt-format says; leave it out"): """
        load_main_params_from_ckpt ckpt_convert_format:str ckpt_convert_save:str
        ckpt_convert_update_legacy_dist_opt_format dist_ckpt_save_pre_mcore_014
    """,
    ("checkpoints", "name the iteration with --ckpt-step; leave it out"): (
        "override_ckpt_iteration:int"
    ),
    ("context parallelism", "--packed-sequence-capacity bounds packs; leave it out"): (
        "max_seqlen_per_dp_cp_rank:int"
    ),
    ("distillation", "a teacher's loss isn't part of this build; leave it out"): """
        logits_save_dir:str logits_save_top_k:int logits_save_top_p:float
        logits_save_top_p_min_k:int=1 logits_save_dtype:str=fp16 logits_load_dir:str
        logits_load_decode_threads:int=4 logits_load_prefetch_factor:int=3
        logits_load_msc_prefetch_depth:int=2 logits_load_kd_loss_alpha:float=1
        logits_load_ignore_errors
    """,
    ("faults", "faults are pretended by --error-injection-rate; leave it out"): """
        fault_injector_ranks:str fault_injector_num_ranks:int fault_injector_fault_types:str
        fault_injector_fault_probabilities:str fault_injector_fault_delay:float
        fault_injector_delay_start_iteration:int fault_injector_mtti_seconds:float
        fault_injector_offset_seconds:float fault_injector_seed:int
    """,
    ("gradients", "they are accumulated in fp32 but for --grad-reduce-in-bf16; leave it out"): (
        "ddp_param_name_patterns_for_fp32_local_accumulation:str*"
    ),
    ("positions in pictures", "models of images aren't trained here; leave it out"): (
        "mrope_section:int*"
    ),
    ("encoders", "this model has one stack of layers: give --num-layers and --seq-length"): """
        encoder_num_layers:int decoder_num_layers:int encoder_seq_length:int decoder_seq_length:int
    """,
    ("older names", "upstream has renamed it: give --position-embedding-type none"): (
        "-add_position_embedding"
    ),
    ("newer names", "the handler is one for training: give --exit-signal-handler"): (
        "exit_signal_handler_for_training"
    ),
    ("older names", "upstream has renamed it: give --micro-batch-size"): "batch_size:int",
    ("older names", "upstream has renamed it: give --lr-warmup-fraction"): "warmup:int",
    ("older names", "upstream has renamed it: give --tensor-model-parallel-size"): (
        "model_parallel_size:int"
    ),
    ("older names", "upstream has renamed it: give --recompute-activations"): (
        "checkpoint_activations"
    ),
}

SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "enable_one_logger": ("--no-one-logger",),
    "barrier_with_L1_time": ("--no-barrier-with-level-1-timing",),
    "perform_initialization": ("--no-initialization",),
    "local_rank_of_launcher": ("--local-rank", "--local_rank"),
    "torch_fsdp2_reshard_after_forward": ("--torch-fsdp2-no-reshard-after-forward",),
    "yarn_rounds_to_int": ("--yarn-correction-range-round-to-int",),
    "add_position_embedding": ("--no-position-embedding",),
    "use_dist_ckpt_deprecated": ("--use-dist-ckpt",),
    "dist_ckpt_format_deprecated": ("--dist-ckpt-format",),
    "disable_msc_deprecated": ("--disable-msc",),
    "use_mamba_mem_eff_path": ("--disable-mamba-mem-eff-path",),
}
_TYPES: Mapping[str, type] = {"int": int, "float": float, "str": str}


def _declarations() -> Iterator[tuple[str, Any, Any]]:
    for (of, why, used), text in REPLACED.items():
        for word in text.split():
            name, kind, default, options = _read(word, of)
            replaced = Replaced(why, used, default, EVERYWHERE)
            yield name, kind, _flag(options, default=default, replaced=replaced)
    for (of, why), text in REFUSED.items():
        for word in text.split():
            name, kind, default, options = _read(word, of)
            yield name, kind, _flag(options, default=default, refused=why)


def _flag(options: dict[str, Any], **more: Any) -> Any:
    names = options.pop("names")
    return flag(options.pop("help"), *names, **options, **more)


def _read(word: str, of: str) -> tuple[str, Any, Any, dict[str, Any]]:
    """Return (field, annotation, default, options of `flag`) of a word of the tables."""
    declared, _, default_text = word.partition("=")
    name, _, kind = declared.partition(":")
    negative, name = name.startswith("-"), name.removeprefix("-")
    plain = name.replace("_", "-")
    usual = (f"--no-{plain}", f"--disable-{plain}") if negative else (f"--{plain}",)
    options = dict(help=f"Of upstream's {of}.", negative=negative)
    names = SPELLINGS.get(name, usual)
    if not kind:
        return name, bool, negative, options | {"names": names}
    element = _TYPES[kind.removesuffix("*")]
    if kind.endswith("*"):
        return name, tuple[element, ...], (), options | {"names": names}  # type: ignore[valid-type]
    default = element(default_text) if "=" in word else None
    return name, element | None, default, options | {"names": names}


WithoutEffectConfig = dataclasses.make_dataclass(
    "WithoutEffectConfig",
    [("SECTION", ClassVar[str], SECTION), *_declarations()],
    frozen=True,
    kw_only=True,
    namespace={"__doc__": "Accepted so that a launch script runs as it is, or refused by name."},
)
WithoutEffectConfig.__module__ = __name__  # where pickle finds it
