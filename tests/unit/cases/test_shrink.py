"""Large runs made small: sizes that hang together stay so, and every feature stays on."""

from __future__ import annotations

import pytest

from megatron.packed.arguments.patterns import parse_pattern
from megatron.packed.cases.case import Case, Value
from megatron.packed.cases.layers import resample, shrink_layout, shrink_pattern
from megatron.packed.cases.parallel import PROCESSES, ParallelSizes, shrink_parallel_sizes
from megatron.packed.cases.shrink import HIDDEN, ROW, STEPS, SmallRun, shrink

LARGE: dict[str, Value] = {
    "--num-layers": 32,
    "--hidden-size": 4096,
    "--num-attention-heads": 32,
    "--micro-batch-size": 4,
    "--global-batch-size": 512,
    "--seq-length": 8192,
    "--max-position-embeddings": 8192,
    "--train-iters": 50000,
    "--lr": "3e-4",
    "--min-lr": "3e-5",
    "--lr-decay-iters": 320000,
    "--lr-warmup-iters": 2000,
}


def small(**changes: Value) -> SmallRun:
    """Shrink the large run with some flags set, written as in `tensor_model_parallel_size=8`."""
    flags = {"--" + name.replace("_", "-"): value for name, value in changes.items()}
    return shrink(Case("case", "regular", {**LARGE, **flags}))


def notes(run: SmallRun) -> tuple[str, ...]:
    """What could not be kept, but for the schedule, which never is."""
    assert run.notes[-1].startswith("--lr 3e-4 -> ") or "error-injection" in run.notes[-1]
    return tuple(note for note in run.notes if not note.startswith("--lr 3e-4"))


def parallel(**changes: Value) -> ParallelSizes:
    return shrink_parallel_sizes(
        {"--" + name.replace("_", "-"): value for name, value in changes.items()}
    )


# ---- the whole ---------------------------------------------------------------------------------


def test_a_plain_run() -> None:
    run = small()
    assert run.processes == 1 and len(run.notes) == 1
    assert run.args["--num-layers"] == 2
    assert run.args["--hidden-size"] == HIDDEN
    assert run.args["--seq-length"] == run.args["--max-position-embeddings"] == ROW
    assert (run.args["--micro-batch-size"], run.args["--global-batch-size"]) == (2, 4)
    assert run.args["--train-iters"] == STEPS
    assert run.args["--min-lr"] == pytest.approx(run.args["--lr"] / 10)
    assert run.args["--lr-warmup-iters"] == 0
    assert run.args["--lr-decay-iters"] > STEPS


def test_shrinking_is_pure_and_leaves_small_values_and_switches_alone() -> None:
    changes = {"bf16": True, "ffn_hidden_size": 96, "adam_beta1": "0.0", "kv_channels": 8}
    case = Case("case", "regular", {**LARGE, "--swiglu": True})
    before = dict(case.args)
    assert shrink(case) == shrink(case) and dict(case.args) == before
    args = small(**changes).args
    assert args["--bf16"] is True and args["--adam-beta1"] == "0.0"
    assert (args["--ffn-hidden-size"], args["--kv-channels"]) == (96, 8)


def test_widths_of_latent_attention_and_experts() -> None:
    args = small(
        multi_latent_attention=True,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_head_dim=128,
        qk_pos_emb_head_dim=64,
        v_head_dim=128,
        num_experts=64,
        moe_ffn_hidden_size=2048,
        moe_router_topk=8,
        moe_router_num_groups=8,
        moe_router_group_topk=4,
    ).args
    assert args["--qk-head-dim"] == args["--v-head-dim"] == HIDDEN // 4
    experts, groups = args["--num-experts"], args["--moe-router-num-groups"]
    of_groups, chosen = args["--moe-router-group-topk"], args["--moe-router-topk"]
    assert experts % groups == 0 and of_groups < groups
    assert chosen % of_groups == 0 and chosen <= of_groups * experts // groups


@pytest.mark.parametrize(
    ("groups", "context", "exchange", "expected"),
    [(8, 1, None, 2), (1, 1, None, 1), (8, 2, "a2a", 4), (8, 2, "p2p", 2)],
)
def test_query_groups_divide_heads_and_suit_the_exchange(
    groups: int, context: int, exchange: str | None, expected: int
) -> None:
    changes: dict[str, Value] = {"tensor_model_parallel_size": 2 if context == 2 else 1}
    if exchange:
        changes["cp_comm_type"] = exchange
    args = small(
        group_query_attention=True,
        num_query_groups=groups,
        context_parallel_size=context,
        **changes,
    ).args
    assert args["--num-query-groups"] == expected
    assert args["--num-attention-heads"] % expected == 0


def test_samples_instead_of_iterations() -> None:
    large = {name: value for name, value in LARGE.items() if name != "--train-iters"}
    args = shrink(
        Case("c", "r", {**large, "--train-samples": 24414062, "--lr-warmup-samples": 1536000})
    ).args
    assert "--train-iters" not in args
    assert args["--train-samples"] == STEPS * args["--global-batch-size"]
    assert args["--lr-warmup-samples"] == 0


def test_a_schedule_of_batch_sizes_goes_through_all_of_them() -> None:
    large = {n: v for n, v in LARGE.items() if n not in ("--train-iters", "--global-batch-size")}
    schedule = {"--step-batch-size-schedule": "0:384 200B:768 400B:1152", "--train-samples": 10**7}
    args = shrink(Case("c", "r", {**large, **schedule})).args
    steps = [
        tuple(map(int, step.split(":"))) for step in args["--step-batch-size-schedule"].split()
    ]
    assert [size for _, size in steps] == [4, 8, 12]
    assert [tokens for tokens, _ in steps] == [0, 4 * ROW, 12 * ROW]
    assert args["--train-samples"] == 24


def test_a_narrow_model_keeps_its_ratio_to_the_base() -> None:
    args = small(hidden_size=512, use_mup=True, mup_base_hidden_size=256).args
    assert args["--mup-base-hidden-size"] == HIDDEN // 2


def test_half_precision_starts_at_a_scale_that_does_not_overflow_for_three_steps() -> None:
    assert small(fp16=True).args["--initial-loss-scale"] == 4096
    assert "--initial-loss-scale" not in small(fp16=True, loss_scale=512).args


def test_every_change_of_rates_and_schedule_is_said() -> None:
    large = {name: value for name, value in LARGE.items() if not name.startswith("--lr-")}
    changes: dict[str, Value] = {
        "--decoupled-lr": "6e-4",
        "--lr-warmup-samples": 100,
        "--lr-decay-samples": 5000,
        "--lr-wsd-decay-iters": 0,
        "--fp16": True,
        "--exit-interval": STEPS,
    }
    (note,) = shrink(Case("c", "r", {**large, **changes})).notes
    assert note.split(", ") == [
        "--lr 3e-4 -> 0.005",
        "--min-lr 3e-5 -> 0.0005",
        "--decoupled-lr 6e-4 -> 0.01",
        "--lr-warmup-samples 100 -> 0",
        "--lr-decay-samples 5000 -> 48",
        "--lr-wsd-decay-iters 0 -> 3",
        "--initial-loss-scale unset -> 4096",
    ]
    same = {**large, "--lr": "0.005", "--min-lr": 0}
    assert shrink(Case("c", "r", same)).notes == ()


def test_injected_errors_stay_rare_in_a_short_run() -> None:
    run = small(error_injection_rate=100, error_injection_type="persistent_error")
    assert run.args["--error-injection-rate"] > 10**6
    assert run.args["--error-injection-type"] == "persistent_error"
    assert "--error-injection-rate is lowered" in notes(run)[0]


# ---- parallel sizes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tensor_model_parallel_size": 8}, {"tensor": 2}),
        (
            {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 8},
            {"tensor": 2, "pipeline": 2},
        ),
        ({"context_parallel_size": 4}, {"context": 2}),
        ({"context_parallel_size": 4, "cp_comm_type": "a2a+p2p"}, {"context": 4}),
        (
            {
                "context_parallel_size": 4,
                "cp_comm_type": "a2a+p2p",
                "pipeline_model_parallel_size": 2,
            },
            {"context": 4, "dropped": ("--pipeline-model-parallel-size",)},
        ),
        (
            {
                "tensor_model_parallel_size": 2,
                "pipeline_model_parallel_size": 2,
                "context_parallel_size": 2,
            },
            {"tensor": 2, "context": 2, "dropped": ("--pipeline-model-parallel-size",)},
        ),
        (
            {
                "tensor_model_parallel_size": 2,
                "pipeline_model_parallel_size": 2,
                "context_parallel_size": 2,
                "num_virtual_stages_per_pipeline_rank": 2,
            },
            {"tensor": 2, "pipeline": 2, "dropped": ("--context-parallel-size",)},
        ),
        ({"use_distributed_optimizer": True}, {"data": 2}),
        ({"num_distributed_optimizer_instances": 2}, {"data": 2}),
        (
            {"num_experts": 8, "expert_model_parallel_size": 8, "tensor_model_parallel_size": 1},
            {"expert": 2, "data": 2},
        ),
        (
            {
                "num_experts": 8,
                "expert_model_parallel_size": 2,
                "tensor_model_parallel_size": 2,
                "pipeline_model_parallel_size": 2,
                "expert_tensor_parallel_size": 1,
            },
            {"expert": 2, "tensor": 2, "pipeline": 2},
        ),
        (
            {
                "num_experts": 8,
                "expert_model_parallel_size": 2,
                "expert_tensor_parallel_size": 2,
                "tensor_model_parallel_size": 4,
            },
            {"expert": 2, "expert_tensor": 2, "tensor": 2, "data": 2},
        ),
        ({"expert_tensor_parallel_size": 4}, {}),
    ],
)
def test_which_dimensions_stay(changes: dict, expected: dict) -> None:
    sizes = parallel(**changes)
    assert sizes == ParallelSizes(**expected)
    assert sizes.processes <= PROCESSES


def test_what_does_not_fit_is_said_and_its_flags_go() -> None:
    run = small(
        tensor_model_parallel_size=2,
        context_parallel_size=2,
        pipeline_model_parallel_size=2,
    )
    assert notes(run) == ("--pipeline-model-parallel-size 2 doesn't fit 4 processes",)
    assert run.args["--pipeline-model-parallel-size"] == 1
    assert run.processes == 4


def test_experts_without_room_for_their_tensors_say_so_by_flag() -> None:
    run = small(
        num_experts=8,
        expert_model_parallel_size=2,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
    )
    assert run.args["--expert-tensor-parallel-size"] == 1
    assert notes(run) == ("--expert-tensor-parallel-size of experts doesn't fit 4 processes",)


def test_replicas_without_room_are_said_by_the_flags_that_want_them() -> None:
    wishes: dict[str, Value] = {"use_distributed_optimizer": True, "overlap_grad_reduce": True}
    layout: dict[str, Value] = {"tensor_model_parallel_size": 2, "context_parallel_size": 2}
    assert notes(small(**wishes, tensor_model_parallel_size=2)) == ()
    (note,) = notes(small(**wishes, **layout))
    wanted = "--use-distributed-optimizer, --overlap-grad-reduce"
    assert note == f"replicas for {wanted} don't fit 4 processes"


# ---- layers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"num_layers": 2}),
        (
            {"num_layers_per_virtual_pipeline_stage": 4},
            {"num_layers_per_virtual_pipeline_stage": 1, "num_layers": 4},
        ),
        (
            {"num_layers_per_virtual_pipeline_stage": 8},
            {"num_layers_per_virtual_pipeline_stage": 1, "num_layers": 2},
        ),
        (
            {"num_virtual_stages_per_pipeline_rank": 4},
            {"num_virtual_stages_per_pipeline_rank": 2, "num_layers": 4},
        ),
        (
            {
                "num_virtual_stages_per_pipeline_rank": 2,
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
            {"num_layers": 2},
        ),
        ({"account_for_loss_in_pipeline_split": True}, {"num_layers": 3}),
        ({"heterogeneous_layers_config_path": "layers.json"}, {"num_layers": 4}),
        (
            {"decoder_first_pipeline_num_layers": 4},
            {"decoder_first_pipeline_num_layers": 1, "num_layers": 3},
        ),
        (
            {"decoder_last_pipeline_num_layers": 4},
            {"decoder_last_pipeline_num_layers": 1, "num_layers": 3},
        ),
        (
            {"decoder_first_pipeline_num_layers": 4, "decoder_last_pipeline_num_layers": 4},
            {
                "decoder_first_pipeline_num_layers": 1,
                "decoder_last_pipeline_num_layers": 2,
                "num_layers": 3,
            },
        ),
        (
            {"pipeline_model_parallel_layout": "Ett|(tttt|)*6ttttttL"},
            {"pipeline_model_parallel_layout": "Et|t|t|tL", "num_layers": 4},
        ),
    ],
)
def test_layers_over_stages(changes: dict, expected: dict) -> None:
    args = small(pipeline_model_parallel_size=4, **changes).args
    for name, value in expected.items():
        assert args["--" + name.replace("_", "-")] == value


def test_flags_of_stages_go_where_there_is_one() -> None:
    run = small(account_for_loss_in_pipeline_split=True)
    assert "--account-for-loss-in-pipeline-split" not in run.args
    assert notes(run) == ("--account-for-loss-in-pipeline-split needs pipeline stages",)


@pytest.mark.parametrize(
    ("layout", "large", "expected"),
    [
        ("Et*2|(tt|)*5t|tmL", 4, "Et|t|t|tmL"),
        ("Et*7|t*7mL", 2, "Et|tmL"),
        ("Et*3|(tt|)*6L", 2, "Et|t|t|L"),
        ("E|(t|)*6,mL", 4, "E|t|t|mL"),
    ],
)
def test_layouts(layout: str, large: int, expected: str) -> None:
    assert shrink_layout(layout, 2, large) == expected


@pytest.mark.parametrize(
    ("text", "layers", "expected"),
    [
        ("([0]*3+[1]*11)", 4, [0, 1, 1, 1]),
        ("([0]*1+[1]*15)", 2, [0, 1]),
        ("[1]*9+[0]*1", 3, [1, 1, 0]),
        ("([0]+[1])*8", 4, [1, 0, 0, 0]),
        ("3", 2, 2),
        ("2", 4, 2),
    ],
)
def test_patterns_keep_every_kind_of_layer(text: str, layers: int, expected: object) -> None:
    pattern = parse_pattern(shrink_pattern(text, layers))
    assert (list(pattern) if isinstance(pattern, tuple) else pattern) == expected


def test_resampling_keeps_order_and_ends() -> None:
    assert resample(list(range(10)), 5) == [0, 2, 4, 6, 8]
    assert resample("ab", 4) == ["a", "a", "b", "b"]
    assert resample("abc", 2) == ["a", "b"]


def test_micro_batches_come_in_the_groups_of_virtual_stages() -> None:
    args = small(
        pipeline_model_parallel_size=4,
        num_layers_per_virtual_pipeline_stage=1,
        microbatch_group_size_per_virtual_pipeline_stage=5,
    ).args
    group = args["--microbatch-group-size-per-virtual-pipeline-stage"]
    assert group > args["--pipeline-model-parallel-size"]
    assert args["--global-batch-size"] // args["--micro-batch-size"] % group == 0
