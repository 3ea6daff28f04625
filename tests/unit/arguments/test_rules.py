"""Every cross-flag rule raises, with a message that names what it is about."""

from __future__ import annotations

import inspect
import re

import pytest

from megatron.packed.arguments import config_from_flags, override, rules
from megatron.packed.errors import ConfigurationError

from .broken_attention import BROKEN_ATTENTION
from .broken_context_parallel import BROKEN_CONTEXT_PARALLEL
from .broken_data import BROKEN_DATA
from .broken_faults import BROKEN_FAULTS
from .broken_layers import BROKEN_LAYERS
from .broken_linear_attention import BROKEN_LINEAR_ATTENTION
from .broken_optimizer import BROKEN_OPTIMIZER
from .broken_pipeline import BROKEN_PIPELINE
from .broken_schedules import BROKEN_SCHEDULES
from .flags import MINIMAL

# (rule, flags that break it and nothing else, what the message must hold, WORLD_SIZE)
BROKEN = [
    ("maximal_update", "--mup-base-hidden-size 32", "size 32: needs --use-mup", 1),
    ("maximal_update", "--use-mup --optimizer muon", "not of --optimizer muon", 1),
    ("maximal_update", "--mup-output-mult 0.5", "--mup-output-mult 0.5: needs --use-mup", 1),
    (
        "recomputed_modules",
        "--recompute-modules mlp",
        "--recompute-modules mlp: needs --recompute-granularity selective",
        1,
    ),
    *(
        (
            "recomputed_modules",
            f"--recompute-granularity selective --recompute-modules mlp {name}",
            f"--recompute-modules {name}: needs {flag}",
            1,
        )
        for name, flag in (
            ("mla_up_proj", "--multi-latent-attention"),
            ("moe", "--num-experts"),
            ("shared_experts", "--num-experts"),
            ("moe_act", "--moe-grouped-gemm"),
        )
    ),
    *BROKEN_ATTENTION,
    *BROKEN_CONTEXT_PARALLEL,
    *BROKEN_DATA,
    *BROKEN_FAULTS,
    *BROKEN_LAYERS,
    *BROKEN_LINEAR_ATTENTION,
    *BROKEN_SCHEDULES,
    (
        "retention_keeps_what_is_saved",
        "--save x --save-interval 4 --save-retain-interval 6",
        r"--save-retain-interval 6: must be a multiple of --save-interval \(4\)",
        1,
    ),
    (
        "one_source_of_schedules",
        "--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler",
        "give one of them",
        1,
    ),
    ("a_step_needs_a_folder", "--ckpt-step 7", "--ckpt-step 7: needs --load", 1),
    ("world_size", "--tensor-model-parallel-size 2", "3 processes started", 3),
    ("world_size", "--context-parallel-size 2", "context 2 = 2 parallel processes", 3),
    (
        "global_batch",
        "--global-batch-size 6",
        r"--global-batch-size 6: .* 2 x 2 data-parallel replicas = 4; 8 would do",
        2,
    ),
    ("overlapped_parameter_gather", "--overlap-param-gather", "--use-distributed-optimizer", 1),
    (
        "overlapped_parameter_gather",
        "--overlap-param-gather --use-distributed-optimizer",
        "--overlap-grad-reduce",
        1,
    ),
    ("distributed_optimizer", "--optimizer sgd --use-distributed-optimizer", "--optimizer sgd", 1),
    *BROKEN_OPTIMIZER,
    ("head_width", "--hidden-size 66", "--hidden-size 66: .*--num-attention-heads 4", 1),
    (
        "heads_over_tensor_parallel",
        "--tensor-model-parallel-size 3 --ffn-hidden-size 96",
        "--num-attention-heads 4: .*--tensor-model-parallel-size 3",
        3,
    ),
    (
        "query_groups",
        "--group-query-attention --num-query-groups 3",
        "--num-query-groups 3: must divide --num-attention-heads 4",
        1,
    ),
    (
        "query_groups",
        "--num-attention-heads 12 --hidden-size 96 --tensor-model-parallel-size 4 "
        "--group-query-attention --num-query-groups 6",
        "--num-query-groups 6: must be a multiple or a divisor of",
        4,
    ),
    ("feed_forward_width", "--swiglu --hidden-size 16", "give --ffn-hidden-size", 1),
    (
        "feed_forward_width",
        "--ffn-hidden-size 97 --tensor-model-parallel-size 2",
        "--ffn-hidden-size 97",
        2,
    ),
    ("activation", "--swiglu --squared-relu", "--swiglu and --squared-relu", 1),
    ("activation", "--quick-geglu --squared-relu", "--squared-relu and --quick-geglu", 1),
    ("activation", "--swiglu --glu-linear-offset 1", "--glu-linear-offset 1: needs --quick", 1),
    (
        "activation",
        "--activation-func-clamp-value 7",
        "--activation-func-clamp-value 7: needs --quick-geglu",
        1,
    ),
    ("flash_attention", "--use-flash-attn --attention-backend fused", "contradict each other", 1),
    (
        "position_table",
        "--max-position-embeddings 64",
        "--seq-length 128: .*--max-position-embeddings 64",
        1,
    ),
    (
        "sequence_shards",
        "--sequence-parallel --tensor-model-parallel-size 2 --seq-length 127",
        "--seq-length 127",
        2,
    ),
    ("precision", "--fp32-residual-connection", "residual-connection: needs --bf16 or --fp16", 1),
    ("recompute", "--recompute-granularity full", "needs --recompute-method", 1),
    (
        "recompute",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 5",
        "--recompute-num-layers 5: a pipeline stage has 4 layers",
        1,
    ),
    (
        "recompute",
        "--recompute-granularity selective --recompute-method block",
        "not selective",
        1,
    ),
    ("experiment_name", "--wandb-project p", "--wandb-exp-name", 1),
    *BROKEN_PIPELINE,
    (
        "deeper_predictions",
        "--mtp-loss-scaling-factor 0.2",
        "--mtp-loss-scaling-factor 0.2: needs --mtp-num-layers",
        1,
    ),
    (
        "deeper_predictions",
        "--mtp-num-layers 1 --pipeline-model-parallel-size 2",
        "--mtp-num-layers 1: .* use --position-embedding-type rope",
        2,
    ),
    (
        "deeper_predictions",
        "--mtp-num-layers 2 --pipeline-model-parallel-layout EttttmL",
        "places 1 predictions .m., and --mtp-num-layers is 2",
        1,
    ),
    (
        "deeper_predictions",
        "--mtp-num-layers 1 --position-embedding-type rope --pipeline-model-parallel-size 2 "
        "--pipeline-model-parallel-layout Ettt|tm||L --global-batch-size 4",
        "places m in stage 1, whose copy of the word embeddings",
        2,
    ),
    (
        "documents_need_packs",
        "--loss-reduction sqrt",
        "--loss-reduction sqrt: needs --use-packed-sequence",
        1,
    ),
    ("documents_need_packs", "--use-document-weights", "needs --use-packed-sequence", 1),
    (
        "document_length",
        "--use-packed-sequence --document-length document",
        "--document-length document: needs --loss-reduction document or sqrt",
        1,
    ),
    (
        "document_losses_file",
        "--use-packed-sequence --log-document-losses 3",
        "--log-document-losses 3: .* give --document-losses-path or --tensorboard-dir",
        1,
    ),
    (
        "document_losses_file",
        "--document-losses-path x.jsonl",
        "--document-losses-path x.jsonl: needs --log-document-losses",
        1,
    ),
]


def refusal(flags: str, world_size: int = 1, accelerator: str = "cpu") -> str:
    with pytest.raises(ConfigurationError) as caught:
        config_from_flags(flags, {"WORLD_SIZE": str(world_size)}, accelerator=accelerator)
    return str(caught.value)


@pytest.mark.parametrize(
    ("rule", "flags", "message", "world"), BROKEN, ids=[f"{row[0]}-{row[1]}" for row in BROKEN]
)
def test_a_broken_rule_is_refused_alone(rule: str, flags: str, message: str, world: int) -> None:
    text = refusal(f"{MINIMAL} {flags}", world)
    assert "\n" not in text, "one broken rule must give one message"
    assert re.search(message, text), text
    assert rule in {r.__name__ for r in (*rules.RULES, *rules.HARDWARE_RULES)}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--mock-data", "--sft: needs JSON lines files as --data-path"),
        ("--data-path a --tokenizer-type NullTokenizer", "--sft: NullTokenizer can't write a"),
        ("--data-path a --dataloader-type cyclic", "--sft shuffles every epoch itself"),
        ("--data-path a --use-packed-sequence --packing-strategy rows", "rows: cuts conversations"),
        (
            "--data-path a --sft-mock-dataset-config-json x",
            "config-json x is refused: conversations",
        ),
    ],
)
def test_rules_on_fine_tuning(flags: str, message: str) -> None:
    base = MINIMAL.replace("--mock-data", "").replace("NullTokenizer", "ByteTokenizer")
    assert message in refusal(f"{base} --sft {flags}")


def test_rules_on_data_without_mock_data() -> None:
    real = MINIMAL.replace("--mock-data", "")
    assert refusal(real).startswith("no data: give one of --data-path")
    assert "need --train-data-path" in refusal(f"{real} --valid-data-path v")
    assert "--split 9,1: splits --data-path" in refusal(f"{real} --train-data-path t --split 9,1")
    assert "exclude each other" in refusal(f"{real} --data-path a --train-data-path b")
    assert "NullTokenizer: needs --vocab-size" in refusal(MINIMAL.replace("--vocab-size 100", ""))


def test_a_rank_outside_the_job() -> None:
    with pytest.raises(ConfigurationError, match="RANK=2: must be less than WORLD_SIZE=2"):
        config_from_flags(MINIMAL, {"RANK": "2", "WORLD_SIZE": "2"})


def test_every_rule_is_listed_and_broken_by_some_test() -> None:
    listed = [
        rule
        for rule in (*rules.RULES, *rules.HARDWARE_RULES)
        if rule.__module__ != rules.moe.__name__  # they have a file of their own
    ]
    modules = (
        rules.layout,
        rules.pipeline,
        rules.loss,
        rules.model,
        rules.attention,
        rules.heterogeneous,
        rules.training,
        rules.data,
        rules.packing,
        rules.sft,
        rules.context_parallel,
        rules.schedule,
        rules.linear_attention,
        rules.checkpoint,
        rules.faults,
        rules.hardware,
    )
    defined = {
        name
        for module in modules
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    }
    assert defined == {rule.__name__ for rule in listed}
    assert defined - {row[0] for row in BROKEN} == {"launcher_rank"}  # tested by itself above


def test_several_broken_rules_come_together() -> None:
    text = refusal(f"{MINIMAL} --num-layers 3 --pipeline-model-parallel-size 2 --min-lr 1", 2)
    assert text.startswith("2 problems in the flags:\n  - --num-layers 3")
    assert "\n  - --min-lr 1" in text


@pytest.mark.parametrize("flag", ["--apply-residual-connection-post-layernorm"])
def test_a_refused_flag_is_refused_by_name(flag: str) -> None:
    assert refusal(f"{MINIMAL} {flag}").startswith(f"{flag} is refused: ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--train-samples 1", "--train-samples 1: are fewer than one global batch of 2"),
        ("--train-samples 99 --lr-warmup-iters 2", "--lr-warmup-iters 2: the run is counted by"),
        (
            "--train-samples 99 --lr-warmup-samples 99",
            "--lr-warmup-samples 99: must be fewer than --lr-decay-samples 99",
        ),
        (
            "--train-samples 99 --lr-warmup-samples 9 --lr-warmup-fraction 0.1",
            "--lr-warmup-fraction 0.1 and --lr-warmup-samples 9: exclude each other",
        ),
    ],
)
def test_rules_of_runs_counted_in_samples(flags: str, message: str) -> None:
    assert message in refusal(MINIMAL.replace("--train-iters 100", flags))


@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_attention_dropout_is_fine_on_every_device(accelerator: str) -> None:
    config = config_from_flags(f"{MINIMAL} --attention-dropout 0.1", accelerator=accelerator)
    assert config.model.attention_dropout == 0.1


def test_values_set_in_code_are_checked_like_those_of_flags() -> None:
    config = config_from_flags(MINIMAL)
    with pytest.raises(ConfigurationError, match="--num-layers 0: must be at least 1"):
        override(config, num_layers=0)
    with pytest.raises(ConfigurationError, match="must be one of LayerNorm, RMSNorm"):
        override(config, normalization="BatchNorm")
    with pytest.raises(ConfigurationError, match="no config field is called 'layers'"):
        override(config, layers=3)


@pytest.mark.parametrize(
    ("flags", "world"),
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel", 2),
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 4),
        ("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", 2),
        ("--group-query-attention --num-query-groups 2 --tensor-model-parallel-size 4", 4),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 1),
        ("--weight-decay-incr-style cosine --start-weight-decay 0 --end-weight-decay 0.1", 1),
        ("--split 949,50,1", 1),
        ("--split 1", 1),
        ("--split .9,.1", 1),
        (
            "--use-packed-sequence --sequence-parallel --tensor-model-parallel-size 2 "
            "--seq-length 127",
            2,
        ),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 10 --lr-warmup-fraction 0.1", 1),
        ("--use-packed-sequence --document-boundaries index --dataloader-type cyclic", 1),
        ("--use-packed-sequence --packing-strategy windowed_best_fit --packing-window 8", 1),
        ("--use-packed-sequence --packing-strategy greedy_workload --document-boundaries index", 1),
        ("--use-packed-sequence --packed-sequence-capacity 256 --check-packing-metadata", 1),
        ("--context-parallel-size 2", 2),
        ("--context-parallel-size 2 --seq-length 126 --cp-comm-type striped", 2),
        ("--context-parallel-size 3 --use-packed-sequence --seq-length 127", 3),
        ("--context-parallel-size 2 --use-packed-sequence --cp-comm-type p2p a2a a2a p2p", 2),
        ("--context-parallel-size 2 --use-packed-sequence --cp-comm-type dispatch", 2),
        ("--context-parallel-size 4 --use-packed-sequence --attention-backend flex", 4),
        (
            "--context-parallel-size 4 --use-packed-sequence --attention-backend magi "
            "--magi-attn-chunk-size 64 --packing-alignment pack",
            4,
        ),
        (
            "--context-parallel-size 8 --use-packed-sequence --cp-comm-type a2a+p2p "
            "--hierarchical-context-parallel-sizes 4 2",
            8,
        ),
    ],
)
def test_what_is_legal_passes(flags: str, world: int) -> None:
    config_from_flags(f"{MINIMAL} {flags}", {"WORLD_SIZE": str(world)})
