"""Every cross-flag rule raises, with a message that names what it is about."""

from __future__ import annotations

import inspect
import re

import pytest

from megatron.packed.arguments import config_from_flags, override, rules
from megatron.packed.errors import ConfigurationError

from .broken_attention import BROKEN_ATTENTION
from .broken_faults import BROKEN_FAULTS
from .broken_layers import BROKEN_LAYERS
from .broken_optimizer import BROKEN_OPTIMIZER
from .broken_pipeline import BROKEN_PIPELINE
from .flags import MINIMAL

DELTA = "--experimental-attention-variant gated_delta_net"

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
    *BROKEN_FAULTS,
    *BROKEN_LAYERS,
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
    ("learning_rate", "--min-lr 0.1", "--min-lr 0.1: must be at most --lr 0.001", 1),
    ("learning_rate", "--lr-warmup-init 0.1", "--lr-warmup-init 0.1", 1),
    ("warmup", "--lr-warmup-fraction 0.1 --lr-warmup-iters 5", "exclude each other", 1),
    ("warmup", "--lr-warmup-iters 100", "warm-up of 100 iterations", 1),
    ("warmup", "--lr-warmup-fraction 1.0", "warm-up of 100 iterations", 1),
    ("final_decay", "--lr-decay-style WSD", "needs --lr-wsd-decay-iters", 1),
    ("final_decay", "--lr-wsd-decay-iters 5", "needs --lr-decay-style WSD", 1),
    (
        "final_decay",
        "--lr-decay-style WSD --lr-wsd-decay-iters 101",
        "--lr-wsd-decay-iters 101: must be at most",
        1,
    ),
    ("weight_decay", "--start-weight-decay 0.1", "need --weight-decay-incr-style", 1),
    ("weight_decay", "--weight-decay-incr-style cosine", "--start-weight-decay", 1),
    (
        "weight_decay",
        "--weight-decay-incr-style linear --start-weight-decay 0.2 --end-weight-decay 0.1",
        "--end-weight-decay 0.1",
        1,
    ),
    ("data_source", "--data-path a", "--data-path and --mock-data: exclude", 1),
    ("split_proportions", "--split 90,ten", "--split 90,ten", 1),
    ("split_proportions", "--split 0,0,0", "not all 0", 1),
    ("split_proportions", "--split 1,1,1,1", "up to three", 1),
    (
        "tokenizer",
        "--tokenizer-type HuggingFaceTokenizer",
        "HuggingFaceTokenizer: needs --tokenizer-model",
        1,
    ),
    (
        "fine_tuning",
        "--sft-tokenizer-prompt-format chatml",
        "--sft-tokenizer-prompt-format chatml: is how --sft",
        1,
    ),
    ("fill_in_the_middle", "--fim-data", "--fim-data: --mock-data has no text to change", 1),
    ("dataloader", "--dataloader-type external", "external is refused: it takes iterators", 1),
    (
        "validation_sets",
        "--multiple-validation-sets",
        "--multiple-validation-sets: needs --valid-data-path",
        1,
    ),
    ("validation_sets", "--validation-set-names a b", "--validation-set-names a b: names those", 1),
    (
        "evaluation_batch",
        "--eval-global-batch-size 3 --eval-micro-batch-size 2",
        "--eval-global-batch-size 3: must be a multiple of --eval-micro-batch-size 2 x 1",
        1,
    ),
    ("tokenizer", "--tokenizer-type Llama2Tokenizer", "Llama2Tokenizer: needs --tokenizer-mod", 1),
    (
        "tokenizer_options",
        "--tokenizer-special-tokens a",
        "--tokenizer-special-tokens a: are TikTokenizer's; those of NullTokenizer are in",
        1,
    ),
    ("tokenizer", "--tokenizer-type GPT2BPETokenizer", "needs --vocab-file and --merge-file", 1),
    (
        "tokenizer",
        "--tokenizer-type TikTokenizer --tokenizer-model x",
        "needs --tiktoken-pattern",
        1,
    ),
    (
        "tokenizer",
        "--tokenizer-type BertWordPieceCase",
        "BertWordPieceCase is refused: it belongs to BERT",
        1,
    ),
    ("packing_switch", "--packing-alignment pack", "pack: needs --use-packed-sequence", 1),
    ("packing_switch", "--packing-strategy next_fit", "next_fit: needs --use-packed-sequence", 1),
    ("packing_switch", "--document-boundaries index", "index: needs --use-packed-sequence", 1),
    ("packing_switch", "--packed-sequence-capacity 512", "512: needs --use-packed-sequence", 1),
    ("packing_switch", "--check-packing-metadata", "metadata: needs --use-packed-sequence", 1),
    (
        "packing_strategy",
        "--use-packed-sequence --packing-window 10 --packing-strategy next_fit",
        "--packing-window 10: is windowed_best_fit's, and --packing-strategy is next_fit",
        1,
    ),
    (
        "packing_strategy",
        "--use-packed-sequence --overlong-documents drop",
        "--overlong-documents drop: needs a --packing-strategy that packs whole documents",
        1,
    ),
    (
        "packing_strategy",
        "--use-packed-sequence --packing-strategy next_fit --document-boundaries eod",
        "--document-boundaries eod: --packing-strategy next_fit takes whole documents",
        1,
    ),
    (
        "packing_strategy",
        "--use-packed-sequence --packing-strategy next_fit --dataloader-type cyclic",
        "--dataloader-type cyclic: --packing-strategy next_fit shuffles the documents",
        1,
    ),
    (
        "pack_capacity",
        "--use-packed-sequence --packed-sequence-capacity 255",
        "--packed-sequence-capacity 255: must be at least --micro-batch-size 2 x --seq-length 128",
        1,
    ),
    (
        "exchange",
        "--cp-comm-type p2p a2a --context-parallel-size 2",
        "--cp-comm-type p2p a2a: 2 values for --num-layers 4",
        2,
    ),
    (
        "exchange",
        "--cp-comm-type dispatch --context-parallel-size 2",
        "--cp-comm-type dispatch: ContextParallelHelper has no such .* needs --use-packed-sequence",
        2,
    ),
    (
        "exchange",
        "--cp-comm-type p2p dispatch p2p p2p --context-parallel-size 2 --use-packed-sequence",
        "--cp-comm-type dispatch: RingAttnContextParallelHelper has no such exchange",
        2,
    ),
    (
        "exchange",
        "--cp-comm-type p2p striped p2p a2a --context-parallel-size 2 --use-packed-sequence",
        r"--cp-comm-type p2p striped a2a: all layers share one .*\(p2p zigzag, striped striped",
        2,
    ),
    (
        "hierarchical_sizes",
        "--cp-comm-type a2a+p2p --context-parallel-size 4",
        r"a2a\+p2p: needs --hierarchical-context-parallel-sizes",
        4,
    ),
    (
        "hierarchical_sizes",
        "--hierarchical-context-parallel-sizes 2 2 --context-parallel-size 4",
        "sizes 2 2: needs --cp-comm-type a2a",
        4,
    ),
    (
        "hierarchical_sizes",
        "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4 --context-parallel-size 4",
        "sizes 4: must be two numbers",
        4,
    ),
    (
        "hierarchical_sizes",
        "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4 "
        "--context-parallel-size 4",
        "sizes 2 4: multiply to 8, which must be --context-parallel-size 4",
        4,
    ),
    (
        "chunk_size",
        "--magi-attn-chunk-size 64 --use-packed-sequence --context-parallel-size 2",
        "--magi-attn-chunk-size 64: needs --attention-backend magi",
        2,
    ),
    (
        "chunk_size",
        "--magi-attn-chunk-size 48 --attention-backend magi --use-packed-sequence",
        "--magi-attn-chunk-size 48: must be a power of two.* 32 would do",
        1,
    ),
    (
        "heads_over_context_parallel",
        "--cp-comm-type a2a --context-parallel-size 3 --use-packed-sequence",
        "--cp-comm-type a2a: shares 4 heads of a tensor-parallel rank out over 3 context-parallel",
        3,
    ),
    (
        "heads_over_context_parallel",
        "--attention-backend flex --context-parallel-size 4 --use-packed-sequence "
        "--num-attention-heads 12 --hidden-size 96 --group-query-attention --num-query-groups 6",
        "--cp-comm-type a2a: 6 key-value heads .* multiple or a divisor of 4",
        4,
    ),
    (
        "heads_over_context_parallel",
        "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4 1 "
        "--tensor-model-parallel-size 2 --context-parallel-size 4 --use-packed-sequence",
        "p2p: shares 2 heads of a tensor-parallel rank out over 4",
        8,
    ),
    (
        "rows_over_context_parallel",
        "--context-parallel-size 2 --seq-length 126",
        "--seq-length 126: must be a multiple of 4, .*--use-packed-sequence",
        2,
    ),
    (
        "rows_over_context_parallel",
        "--context-parallel-size 2 --seq-length 126 --cp-comm-type striped "
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--seq-length 126: must be a multiple of 4",
        4,
    ),
    (
        "segment_alignment",
        "--context-parallel-size 2 --use-packed-sequence --packing-alignment pack",
        "--packing-alignment pack: --cp-comm-type p2p cuts every segment",
        2,
    ),
    (
        "attention_dropout",
        "--context-parallel-size 2 --attention-dropout 0.1",
        "--attention-dropout 0.1: must be 0 with --context-parallel-size 2",
        2,
    ),
    ("experiment_name", "--wandb-project p", "--wandb-exp-name", 1),
    (
        "linear_layers",
        "--linear-attention-freq 2",
        "--linear-attention-freq 2: needs --experimental-attention-variant gated_delta_net",
        1,
    ),
    (
        "linear_layers",
        f"{DELTA} --linear-attention-freq [1,0]",
        "--linear-attention-freq .*must have a 0 or 1 for each of --num-layers 4",
        1,
    ),
    (
        "linear_layers",
        f"{DELTA} --linear-attention-freq often",
        "--linear-attention-freq often: 'often': must be a whole number",
        1,
    ),
    ("linear_layers", f"{DELTA}", "is needed to say which layers", 1),
    (
        "linear_heads",
        f"{DELTA} --linear-attention-freq 2 --linear-num-key-heads 5",
        "--linear-num-value-heads 32: must be a multiple of --linear-num-key-heads 5",
        1,
    ),
    (
        "linear_heads",
        f"{DELTA} --linear-attention-freq 2 --linear-num-key-heads 2 "
        "--tensor-model-parallel-size 4",
        "--linear-num-key-heads 2: must be a multiple of --tensor-model-parallel-size 4",
        4,
    ),
    (
        "linear_layer_surroundings",
        f"{DELTA} --linear-attention-freq 2 --context-parallel-size 2",
        "isn't spread over --context-parallel-size 2",
        2,
    ),
    (
        "sparse_attention",
        "--experimental-attention-variant dsa",
        "--experimental-attention-variant dsa is refused: it attends to the keys",
        1,
    ),
    (
        "run_length",
        "--train-samples 400",
        "--train-iters 100 and --train-samples 400: exclude each other",
        1,
    ),
    (
        "run_length",
        "--lr-warmup-samples 20",
        "--lr-warmup-samples 20: the run is counted by --train-iters",
        1,
    ),
    (
        "run_length",
        "--lr-decay-samples 20",
        "use the flag that ends in -iters",
        1,
    ),
    (
        "sizes_of_batches",
        "--step-batch-size-schedule 0:2 --global-batch-size 4",
        "--step-batch-size-schedule and --global-batch-size: exclude each other",
        1,
    ),
    (
        "sizes_of_batches",
        "--step-batch-size-schedule 0:6",
        "--step-batch-size-schedule 0:6: 6 samples must be a multiple of --micro-batch-size 2 x 2",
        2,
    ),
    (
        "sizes_of_batches",
        "--step-batch-size-schedule '0:2 1K:8' --pipeline-model-parallel-size 2 "
        "--num-virtual-stages-per-pipeline-rank 2",
        "--step-batch-size-schedule 0:2 1K:8: gives 1 micro-batches a step, and virtual stages",
        2,
    ),
    ("sizes_of_batches", "--step-batch-size-schedule 4", "'4': must be tokens:samples", 1),
    (
        "sizes_of_batches",
        "--rampup-batch-size 2 4 100 --global-batch-size 8",
        "--rampup-batch-size 2 4 100: increments of 4 must lead from 2 to --global-batch-size 8",
        1,
    ),
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
