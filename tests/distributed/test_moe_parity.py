"""Mixtures of experts: every layout against one process, in fp32."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron.packed.model.moe import moe_layers
from tests.distributed.harness import RankResult, assert_bitwise_equal, relative_l2, run
from tests.distributed.pool import WorkerPools

LOSS_TOLERANCE = 2e-6
GRADIENT_TOLERANCE = 1e-5
STEPS = 4

COMMON = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 "
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 4 "
    f"--train-iters {STEPS} --lr 2e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-decay-iters 20 "
    "--eval-iters 1 --eval-interval 100 --log-interval 1 --threads 1 "
)
LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --group-query-attention "
    "--num-query-groups 2 --disable-bias-linear --untie-embeddings-and-output-weights "
)
PACKED = "--use-packed-sequence "
EXPERTS = (
    f"{LLAMA} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 "
    "--moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.02 --moe-z-loss-coeff 0.01 "
)
SHARED = "--moe-shared-expert-intermediate-size 64 --moe-shared-expert-gate "
DEEPSEEK = (
    f"{LLAMA} --num-experts 8 --moe-router-topk 4 --moe-ffn-hidden-size 32 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 1e-2 --moe-router-num-groups 4 --moe-router-group-topk 2 "
    "--moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32 --moe-layer-freq ([0]+[1]) "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.02 "
    f"--moe-token-dispatcher-type alltoall {SHARED}"
)
ROWS = "--micro-batch-size 2 "  # losses that aren't counted by tokens
LATENT = (
    "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 8 "
)
GPT = "--position-embedding-type learned_absolute --num-experts 4 --moe-ffn-hidden-size 48 "
UNBALANCED = EXPERTS.replace("--moe-aux-loss-coeff 0.02", "")
RUNS = {
    "experts": EXPERTS + SHARED + PACKED,
    "deepseek": DEEPSEEK + PACKED,
    "rows": EXPERTS + ROWS,
    "sinkhorn": f"{UNBALANCED} --moe-router-load-balancing-type sinkhorn {PACKED}",
    "capacity": f"{EXPERTS} --moe-expert-capacity-factor 0.8 {PACKED}",
    "position": f"{EXPERTS} --moe-expert-capacity-factor 0.8 --moe-token-drop-policy position "
    + PACKED,
    "global": f"{EXPERTS} --moe-router-load-balancing-type global_aux_loss {PACKED}",
    "global-rows": f"{EXPERTS} --moe-router-load-balancing-type global_aux_loss {ROWS}",
    "latent": DEEPSEEK.replace("--group-query-attention --num-query-groups 2", LATENT) + PACKED,
    "deeper": f"{EXPERTS} --mtp-num-layers 1 {PACKED}",
    "biases": f"{GPT} --moe-aux-loss-coeff 0.02 --moe-token-dispatcher-type alltoall {PACKED}",
}
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
LAYOUTS = {
    "dp2": (2, ""),
    "ep2": (2, "--expert-model-parallel-size 2"),
    "tp2": (2, TP2),
    "tp2-etp1": (2, f"{TP2} --expert-tensor-parallel-size 1"),
    "tp2-ep2": (2, f"{TP2} --expert-tensor-parallel-size 1 --expert-model-parallel-size 2"),
    "cp2": (2, "--context-parallel-size 2"),
    "cp2-ep2": (2, "--context-parallel-size 2 --expert-model-parallel-size 2"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "allgather-ep2": (2, "--moe-token-dispatcher-type allgather --expert-model-parallel-size 2"),
    "allgather-tp2": (2, f"--moe-token-dispatcher-type allgather {TP2}"),
    "ep2-distributed-optimizer": (2, "--expert-model-parallel-size 2 --use-distributed-optimizer"),
    "tp2-pp2": (4, f"{TP2} --pipeline-model-parallel-size 2"),
    "ep2-tp2": (4, f"{TP2} --expert-model-parallel-size 2"),
}


def check_parity(result: RankResult, reference: RankResult) -> None:
    """Same start, same gradient, same curve, same evaluations."""
    assert_bitwise_equal(result.initial_weights, reference.initial_weights)
    assert relative_l2(result.gradient, reference.gradient) < GRADIENT_TOLERANCE
    for name, gradient in reference.gradient.items():
        if ".router." in name:  # small beside the others, and what layouts touch most
            one = {name: result.gradient[name]}
            assert relative_l2(one, {name: gradient}) < GRADIENT_TOLERANCE
    assert len(result.losses) == STEPS
    assert result.losses == pytest.approx(reference.losses, rel=LOSS_TOLERANCE)
    assert result.loss_counts == reference.loss_counts
    assert result.grad_norms == pytest.approx(reference.grad_norms, rel=GRADIENT_TOLERANCE)
    for (loss, tokens), (expected, count) in zip(
        result.validations, reference.validations, strict=True
    ):
        assert tokens == count
        assert loss == pytest.approx(expected, rel=LOSS_TOLERANCE)
    assert _logged(result.log) == pytest.approx(_logged(reference.log), rel=2e-6)
    result.statistics.padded_tokens = reference.statistics.padded_tokens  # alignment's own
    assert result.statistics == reference.statistics
    assert relative_l2(result.final_weights, reference.final_weights) < GRADIENT_TOLERANCE


OFTEN = {("deepseek", layout) for layout in ("ep2", "cp2-ep2", "pp2", "ep2-tp2")}
OFTEN |= {("experts", layout) for layout in LAYOUTS}
OFTEN |= {("rows", layout) for layout in ("dp2", "tp2", "cp2-ep2")}
OFTEN |= {("sinkhorn", "cp2-ep2"), ("capacity", "tp2"), ("position", "cp2"), ("global", "cp2-ep2")}
OFTEN |= {("global-rows", "tp2"), ("latent", "ep2"), ("deeper", "tp2")}
OFTEN |= {("biases", layout) for layout in ("ep2", "tp2-etp1", "tp2-ep2")}


def _makes_sense(kind: str, layout: str) -> bool:
    """Whether the objective is one that the layout can't change.

    The running counts of `global_aux_loss` see several replicas' micro-batches at once, or one
    after the other. Experts that are cut have no biases.
    """
    if kind.startswith("global"):
        return layout in ("tp2", "tp2-pp2", "tp2-etp1", "tp2-ep2", "cp2", "cp2-ep2", "pp2")
    whole = "tp2" not in layout or layout in ("tp2-etp1", "tp2-ep2")
    return kind != "biases" or whole


CASES = [
    pytest.param(*case, marks=() if case in OFTEN else pytest.mark.slow, id="-".join(case))
    for case in itertools.product(RUNS, LAYOUTS)
    if _makes_sense(*case)
]


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_layout_equals_one_process(
    kind: str,
    layout: str,
    worker_pool: WorkerPools,
    data_flags: str,
    one_process: Callable[[str], RankResult],
) -> None:
    world_size, flags = LAYOUTS[layout]
    result = run(worker_pool, world_size, f"{COMMON} {RUNS[kind]} {flags} {data_flags}")
    check_parity(result, one_process(COMMON + RUNS[kind]))


@pytest.mark.parametrize("kind", [PACKED, ""], ids=["packs", "rows"])
def test_global_loss_weighs_the_same_on_two_replicas(
    kind: str, worker_pool: WorkerPools, data_flags: str
) -> None:
    """Two replicas with a row each against one process with a micro-batch of both."""
    flags = f"{COMMON} {EXPERTS} {kind} --moe-router-load-balancing-type global_aux_loss "
    flags += f"{data_flags} --global-batch-size 2 --micro-batch-size "
    one, two = run(worker_pool, 1, flags + "2"), run(worker_pool, 2, flags + "1")
    one.statistics.packs = two.statistics.packs
    check_parity(two, one)
    assert "global_load_balancing_loss: " in one.log


def expert_biases(trainer: Any) -> list[torch.Tensor]:
    """In a rank, after training: the biases of its layers' experts."""
    layers = [layer for chunk in trainer.step.model for _, layer in moe_layers(chunk)]
    assert all(layer.router.local_tokens_per_expert.dtype == torch.float32 for layer in layers)
    return [layer.router.expert_bias for layer in layers]


@pytest.mark.parametrize("precision", ["", "--bf16"])
def test_biases_of_experts_move_alike_on_every_rank(
    precision: str, worker_pool: WorkerPools, data_flags: str
) -> None:
    """By the rate, each step, towards the even share of the global batch; in fp32."""
    flags = f"{COMMON} {RUNS['deepseek']} {precision} {data_flags}"
    one = run(worker_pool, 1, flags, inspect=expert_biases)
    two = run(worker_pool, 2, f"{flags} {LAYOUTS['cp2-ep2'][1]}", inspect=expert_biases)
    (bias,) = one.extra[0]
    assert bias.dtype == torch.float32
    moves = bias / 1e-2
    assert moves.abs().max() >= 2 and torch.allclose(moves, moves.round(), atol=1e-4)
    assert torch.equal(two.extra[0][0], two.extra[1][0])
    if not precision:
        assert torch.equal(two.extra[0][0], bias)


def _logged(log: str) -> list[float]:
    """Losses of routers in the lines of a log, in order."""
    return [float(value) for value in re.findall(r"\w+_loss: (\S+)", log)]


def test_reference_is_worth_comparing_with(one_process: Callable[[str], RankResult]) -> None:
    for flags in RUNS.values():
        reference = one_process(COMMON + flags)
        assert reference.losses[0] == pytest.approx(math.log(258), abs=0.15)
        assert reference.losses[-1] < reference.losses[0] - 0.05
        names = [name for name in reference.gradient if name.endswith("router.weight")]
        assert names and all(reference.gradient[name].any() for name in names)
        losses = _logged(reference.log)
        assert bool(losses) == ("coeff" in flags) and all(0 < loss < 9 for loss in losses)
