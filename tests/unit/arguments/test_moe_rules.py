"""Rules on experts: each raises, with a message that names what it is about; and what is legal."""

from __future__ import annotations

import inspect
import re

import pytest

from megatron.packed.arguments import config_from_flags, rules
from megatron.packed.errors import ConfigurationError

from .flags import MINIMAL

EXPERTS = "--num-experts 8 --disable-bias-linear"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"

# (rule, flags that break it and nothing else, what the message must hold, WORLD_SIZE)
BROKEN = [
    (
        "experts_are_there",
        "--expert-model-parallel-size 2",
        "--expert-model-parallel-size 2: needs --num-experts",
        2,
    ),
    (
        "experts_over_processes",
        f"{EXPERTS} --expert-model-parallel-size 3",
        "--num-experts 8: must be a multiple of --expert-model-parallel-size 3",
        3,
    ),
    (
        "expert_groups_of_processes",
        f"{EXPERTS} --expert-model-parallel-size 4",
        "2 processes started, .* expert tensor 1 x expert 4 x pipeline 1 = 4",
        2,
    ),
    (
        "experts_need_sequence_parallelism",
        f"{EXPERTS} --tensor-model-parallel-size 2",
        "--num-experts with --tensor-model-parallel-size 2: needs --sequence-parallel",
        2,
    ),
    (
        "expert_layers",
        f"{EXPERTS} --moe-layer-freq ([0]+[1]*4)",
        r"--moe-layer-freq \(\[0\]\+\[1\]\*4\): must hold 4 entries of 0 or 1.* holds 5",
        1,
    ),
    ("expert_layers", f"{EXPERTS} --moe-layer-freq [0,1,2,1]", "entries of 0 or 1", 1),
    ("expert_layers", f"{EXPERTS} --moe-layer-freq 0", "--moe-layer-freq 0: .* at least 1", 1),
    ("expert_layers", f"{EXPERTS} --moe-layer-freq [0]*4", "gives no layer experts", 1),
    (
        "expert_layers",
        f"{EXPERTS} --moe-layer-freq __import__('os')",
        "--moe-layer-freq .*must be a whole number or a list",
        1,
    ),
    (
        "experts_of_a_token",
        f"{EXPERTS} --moe-router-topk 9",
        "--moe-router-topk 9: must be at most --num-experts 8",
        1,
    ),
    (
        "experts_of_a_token",
        f"{EXPERTS} --moe-router-topk 1",
        "--moe-router-topk 1: .*--moe-router-pre-softmax",
        1,
    ),
    (
        "groups_of_experts",
        f"{EXPERTS} --moe-router-num-groups 4",
        "--moe-router-num-groups: needs --moe-router-group-topk",
        1,
    ),
    (
        "groups_of_experts",
        f"{EXPERTS} --moe-router-group-topk 4",
        "--moe-router-group-topk: needs --moe-router-num-groups",
        1,
    ),
    (
        "groups_of_experts",
        f"{EXPERTS} --moe-router-num-groups 3 --moe-router-group-topk 1",
        "--moe-router-num-groups 3: must divide --num-experts 8",
        1,
    ),
    (
        "groups_of_experts",
        f"{EXPERTS} --moe-router-num-groups 2 --moe-router-group-topk 3",
        "--moe-router-group-topk 3: must be at most --moe-router-num-groups 2",
        1,
    ),
    (
        "groups_of_experts",
        f"{EXPERTS} --moe-router-num-groups 4 --moe-router-group-topk 3 --moe-router-topk 4",
        "--moe-router-topk 4: must be a multiple of --moe-router-group-topk 3",
        1,
    ),
    (
        "groups_of_experts",
        f"{EXPERTS} --moe-router-num-groups 4 --moe-router-group-topk 1 --moe-router-topk 4",
        "--moe-router-topk 4: 1 of 4 groups hold only 2 experts",
        1,
    ),
    (
        "balancing",
        f"{EXPERTS} --moe-router-load-balancing-type aux_loss seq_aux_loss",
        "--moe-aux-loss-coeff 0: needs one value for each",
        1,
    ),
    (
        "balancing",
        f"{EXPERTS} --moe-router-load-balancing-type aux_loss aux_loss --moe-aux-loss-coeff 1 1",
        "name each kind once",
        1,
    ),
    (
        "balancing",
        f"{EXPERTS} --moe-router-load-balancing-type aux_loss none --moe-aux-loss-coeff 1 1",
        "sinkhorn and none stand alone",
        1,
    ),
    (
        "balancing",
        f"{EXPERTS} --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0.1",
        "--moe-aux-loss-coeff: sinkhorn has no loss",
        1,
    ),
    (
        "balancing",
        f"{EXPERTS} --moe-router-load-balancing-type sinkhorn --moe-router-num-groups 4 "
        "--moe-router-group-topk 2",
        "sinkhorn: chooses experts by itself, without groups",
        1,
    ),
    (
        "expert_bias",
        f"{EXPERTS} --moe-router-enable-expert-bias",
        "--moe-router-enable-expert-bias: needs --moe-router-score-function sigmoid, not softmax",
        1,
    ),
    (
        "capacity",
        f"{EXPERTS} --moe-pad-expert-input-to-capacity",
        "--moe-pad-expert-input-to-capacity: needs --moe-expert-capacity-factor",
        1,
    ),
    (
        "capacity",
        f"{EXPERTS} --moe-expert-capacity-factor 1.5 --moe-router-load-balancing-type sinkhorn",
        "--moe-expert-capacity-factor 1.5: goes with .*aux_loss, seq_aux_loss, none, not sinkhorn",
        1,
    ),
    (
        "biases_of_experts",
        "--num-experts 8 --moe-shared-expert-intermediate-size 64",
        "--moe-shared-expert-intermediate-size: .*--disable-bias-linear",
        1,
    ),
    (
        "biases_of_experts",
        f"--num-experts 8 {TP2}",
        "--expert-tensor-parallel-size 2: experts that are cut have no biases; .*or pass 1",
        2,
    ),
    (
        "width_over_expert_tensor_parallel",
        f"{EXPERTS} {TP2} --moe-ffn-hidden-size 33",
        "--moe-ffn-hidden-size 33: must be a multiple of --expert-tensor-parallel-size 2",
        2,
    ),
    (
        "width_over_expert_tensor_parallel",
        f"{EXPERTS} {TP2} --moe-shared-expert-intermediate-size 33",
        "intermediate-size 33: must be a multiple of --tensor-model-parallel-size 2",
        2,
    ),
    (
        "shared_expert",
        f"{EXPERTS} --moe-shared-expert-gate",
        "--moe-shared-expert-gate: needs --moe-shared-expert-intermediate-size",
        1,
    ),
    (
        "shared_expert",
        f"{EXPERTS} --moe-shared-expert-overlap",
        "--moe-shared-expert-overlap: needs --moe-shared-expert-intermediate-size",
        1,
    ),
    (
        "shared_expert",
        f"{EXPERTS} --moe-shared-expert-overlap --moe-shared-expert-intermediate-size 64",
        "--moe-shared-expert-overlap: needs --moe-token-dispatcher-type alltoall",
        1,
    ),
    (
        "probabilities_on_input",
        f"{EXPERTS} --moe-apply-probs-on-input",
        "--moe-apply-probs-on-input: needs --moe-router-topk 1, not 2",
        1,
    ),
]


@pytest.mark.parametrize(
    ("rule", "flags", "message", "world"), BROKEN, ids=[f"{row[0]}-{row[1]}" for row in BROKEN]
)
def test_a_broken_rule_is_refused_alone(rule: str, flags: str, message: str, world: int) -> None:
    with pytest.raises(ConfigurationError) as caught:
        config_from_flags(f"{MINIMAL} {flags}", {"WORLD_SIZE": str(world)})
    text = str(caught.value)
    assert "\n" not in text, "one broken rule must give one message"
    assert re.search(message, text), text


def test_every_rule_is_listed_and_broken_by_some_test() -> None:
    defined = {
        name
        for name, function in inspect.getmembers(rules.moe, inspect.isfunction)
        if function.__module__ == rules.moe.__name__ and not name.startswith("_")
    }
    on_hardware = {rule.__name__ for rule in rules.moe.HARDWARE_RULES}  # tested by themselves
    assert defined - on_hardware == {rule.__name__ for rule in rules.moe.RULES}
    assert defined - on_hardware == {row[0] for row in BROKEN}
    assert set(rules.moe.RULES) <= set(rules.RULES)


@pytest.mark.parametrize(
    "flag",
    [
        "--moe-router-topk-limited-devices 2",
        "--moe-enable-routing-replay",
        "--moe-latent-size 32",
        "--moe-token-dropping",
        "--moe-use-upcycling",
        "--moe-upcycling-granularity 2",
        "--moe-extended-tp",
    ],
)
def test_a_refused_flag_is_refused_by_name(flag: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{flag} is refused: "):
        config_from_flags(f"{MINIMAL} {EXPERTS} {flag}")


@pytest.mark.parametrize(
    ("flags", "world"),
    [
        ("--num-experts 8", 1),
        ("--num-experts 8 --moe-layer-freq 2 --moe-ffn-hidden-size 48", 1),
        (f"{EXPERTS} --expert-model-parallel-size 4", 4),
        (f"{EXPERTS} {TP2} --expert-tensor-parallel-size 1 --expert-model-parallel-size 2", 2),
        (f"{EXPERTS} --moe-router-topk 1 --moe-router-pre-softmax --moe-apply-probs-on-input", 1),
        (f"{EXPERTS} --moe-router-topk 1 --moe-router-score-function sigmoid", 1),
        (f"{EXPERTS} --moe-expert-capacity-factor -1", 1),
        (
            f"{EXPERTS} --moe-router-load-balancing-type seq_aux_loss global_aux_loss "
            "--moe-aux-loss-coeff 1e-4 1e-2",
            1,
        ),
    ],
)
def test_what_is_legal_passes(flags: str, world: int) -> None:
    config_from_flags(f"{MINIMAL} {flags}", {"WORLD_SIZE": str(world)})


def test_what_follows_from_other_flags() -> None:
    config = config_from_flags(f"{MINIMAL} {EXPERTS} --ffn-hidden-size 96 {TP2}", WORLD_OF_2)
    assert config.moe.moe_ffn_hidden_size == 96
    assert config.moe.expert_tensor_parallel_size == 2
    assert config.moe.expert_layers(4) == (True,) * 4
    assert config_from_flags(f"{MINIMAL} {EXPERTS} --swiglu").moe.moe_ffn_hidden_size == 128
    freq = "--moe-layer-freq ([0]*1+[1]*3)"
    layers = config_from_flags(f"{MINIMAL} {EXPERTS} {freq}").moe.expert_layers(4)
    assert layers == (False, True, True, True)
    assert config_from_flags(MINIMAL).moe.expert_layers(4) == (False,) * 4
    every_second = config_from_flags(f"{MINIMAL} {EXPERTS} --moe-layer-freq 2").moe
    assert every_second.expert_layers(5) == (True, False, True, False, True)
    assert config_from_flags(f"{MINIMAL} --num-experts 2").moe.capacity_factor is None


def test_biases_of_experts_under_transformer_engine() -> None:
    flags = f"{MINIMAL} --num-experts 8 {TP2} --expert-tensor-parallel-size 1"
    config_from_flags(flags, WORLD_OF_2)
    with pytest.raises(ConfigurationError, match="size 2: TransformerEngine's experts have no bi"):
        config_from_flags(flags, WORLD_OF_2, accelerator="cuda")
    config_from_flags(f"{flags} --transformer-impl local", WORLD_OF_2, accelerator="cuda")
    config_from_flags(f"{flags} --disable-bias-linear", WORLD_OF_2, accelerator="cuda")


WORLD_OF_2 = {"WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("flags", "world", "used", "why"),
    [
        ("--moe-token-dispatcher-type flex", 1, "alltoall", "the libraries of flex need CUDA"),
        (
            "--use-packed-sequence --context-parallel-size 2 --expert-model-parallel-size 2 "
            "--moe-token-dispatcher-type allgather",
            2,
            "alltoall",
            "packs of different processes differ in length",
        ),
        ("--moe-grouped-gemm", 1, "one matrix product an expert", "grouped kernel needs CUDA"),
        ("--moe-permute-fusion", 1, "PyTorch's gathers", "fused kernel needs CUDA"),
        ("--moe-router-fusion", 1, "PyTorch's top-k and softmax", "fused kernel needs CUDA"),
        ("--moe-enable-deepep", 1, "alltoall", "needs CUDA"),
        ("--moe-flex-dispatcher-backend hybridep", 1, "alltoall", "needs CUDA"),
        ("--moe-deepep-num-sms 24", 1, "alltoall", "needs CUDA"),
        ("--moe-hybridep-num-sms 24", 1, "alltoall", "needs CUDA"),
        (
            "--moe-shared-expert-overlap --moe-shared-expert-intermediate-size 64 "
            "--moe-token-dispatcher-type alltoall",
            1,
            "one after the other",
            "the CPU does both jobs",
        ),
        (
            "--moe-pad-expert-input-to-capacity --moe-expert-capacity-factor 1",
            1,
            "no padding",
            "slots that pad an expert have weight zero",
        ),
        ("--moe-use-legacy-grouped-gemm", 1, "--moe-grouped-gemm's module", "upstream retires it"),
        ("--moe-router-padding-for-quantization", 1, "no padding", "products aren't quantised"),
        ("--moe-router-padding-for-fp8", 1, "no padding", "products aren't quantised"),
    ],
)
def test_a_replacement_is_listed(flags: str, world: int, used: str, why: str) -> None:
    config = config_from_flags(f"{MINIMAL} {EXPERTS} {flags}", {"WORLD_SIZE": str(world)})
    rows = {row.flag: row for row in config.replacements}
    flag = next(each for each in flags.split() if each in rows and rows[each].used == used)
    assert why in rows[flag].why
