"""Every family of models: a packed step is its documents one at a time, on every layout.

What a family reads of a document (positions, windows, latents, sinks) is compared with the same
model run over each document alone in fp64; so are all layouts, which therefore agree.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable

import pytest

from tests.distributed.documents import DocumentResult, run_documents, run_pack
from tests.distributed.harness import RankResult, assert_bitwise_equal, relative_l2, run
from tests.distributed.pool import WorkerPools
from tests.distributed.test_packed_documents import COMMON, PIECES, SAMPLES

LOSS_TOLERANCE = 2e-6
GRADIENT_TOLERANCE = 1e-5

ROPE = "--position-embedding-type rope "
LLAMA = (
    f"{ROPE} --normalization RMSNorm --swiglu --group-query-attention --num-query-groups 2 "
    "--disable-bias-linear --untie-embeddings-and-output-weights "
)
LATENT = (
    f"{ROPE} --normalization RMSNorm --swiglu --disable-bias-linear --multi-latent-attention "
    "--untie-embeddings-and-output-weights --kv-lora-rank 16 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 12 "
)
# Plain; a linear layer alone; both; attention alone.
LAYERS = [
    {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_hidden_size": 96}},
    {
        "attention": {"n_heads_in_group": None, "no_op": True},
        "ffn": {"ffn_mult": None, "replace_with_linear": True},
    },
    {
        "attention": {"num_query_groups": None, "replace_with_linear": True},
        "ffn": {"ffn_mult": 2.0},
    },
    {"attention": {"num_query_groups": 4}, "ffn": {"ffn_mult": None, "no_op": True}},
]
FAMILIES = {
    "heterogeneous": (
        f"{LLAMA} --num-layers 4 --heterogeneous-layers-config-encoded-json "
        + shlex.quote(json.dumps({"block_configs": LAYERS}))
    ),
    "gpt3": "--position-embedding-type learned_absolute",
    "llama": LLAMA,
    "no-positions": "--position-embedding-type none --squared-relu --apply-layernorm-1p",
    "query-key-norm": f"{LLAMA} --qk-layernorm --rotary-percent 0.5 --rotary-interleaved",
    "query-key-l2-norm": f"{LLAMA} --qk-l2-norm --no-rope-freq 2",
    "squared-relu": f"{ROPE} --squared-relu --apply-layernorm-1p --rotary-percent 0.5",
    "geglu": f"{ROPE} --quick-geglu --glu-linear-offset 1 --activation-func-clamp-value 0.01",
    "gated-attention": f"{LLAMA} --attention-output-gate --qk-layernorm --apply-layernorm-1p",
    "yarn": (
        f"{LLAMA} --position-embedding-type yarn --rotary-scaling-factor 32 "
        "--yarn-original-max-position-embeddings 8 --rotary-base 150"
    ),
    "llama-3-rope": f"{LLAMA} --use-rope-scaling --rope-scaling-factor 4 --rotary-base 500",
    "window": f"{LLAMA} --window-size 2,0",
    "window-in-some-layers": f"{LLAMA} --window-size (3,0) --window-attn-skip-freq 2",
    "window-by-pattern": f"{LLAMA} --window-size 0,-1 --window-attn-skip-freq ([0]+[1])",
    "latent-window": f"{LATENT} --window-size 4,0",
    "sinks": f"{LLAMA} --softmax-type learnable --init-method-std 0.1",
    "off-by-one": f"{ROPE} --softmax-type off-by-one --window-size 5,0",
    "latent-sinks": f"{LATENT} --softmax-type learnable --init-method-xavier-uniform",
    "maximal-update": (
        f"{LLAMA} --use-mup --mup-base-hidden-size 16 --mup-embedding-mult 3 --mup-base-head-dim 8"
    ),
    "latent": (
        f"{LATENT} --q-lora-rank 24 --qk-layernorm --rotary-scaling-factor 40 --mscale-all-dim 1.0"
    ),
    "latent-direct-queries": f"{LATENT} --rope-type rope --rotary-base 100",
}
LAYOUTS = {
    "one": (1, "--micro-batch-size 6"),
    "tp2": (2, "--micro-batch-size 3 --tensor-model-parallel-size 2"),
    "tp2-sp": (2, "--micro-batch-size 3 --tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--micro-batch-size 3 --pipeline-model-parallel-size 2"),
    "ring": (2, "--micro-batch-size 3 --context-parallel-size 2"),
    "a2a": (2, "--micro-batch-size 3 --context-parallel-size 2 --cp-comm-type a2a"),
    "magi": (2, "--micro-batch-size 3 --context-parallel-size 2 --attention-backend magi"),
    "ring-tp2": (
        4,
        "--micro-batch-size 3 --context-parallel-size 2 --tensor-model-parallel-size 2",
    ),
    "ring-pp2": (
        4,
        "--micro-batch-size 3 --context-parallel-size 2 --pipeline-model-parallel-size 2",
    ),
}
# What every run of the tests holds; the others are `slow`.
ALWAYS = {
    *(("latent", layout) for layout in LAYOUTS),
    *((family, "tp2") for family in FAMILIES),
    *(
        (family, layout)
        for family in ("window-in-some-layers", "sinks")
        for layout in ("ring", "a2a", "magi", "pp2")
    ),
    ("latent-direct-queries", "tp2-sp"),
    ("query-key-norm", "pp2"),
    ("heterogeneous", "pp2"),
    ("heterogeneous", "tp2-sp"),
    ("gated-attention", "magi"),
    ("yarn", "ring"),
}


def _grid() -> list[object]:
    return [
        pytest.param(
            family,
            layout,
            marks=() if (family, layout) in ALWAYS else pytest.mark.slow,
            id=f"{family}-{layout}",
        )
        for family in FAMILIES
        for layout in LAYOUTS
    ]


@pytest.fixture(scope="module")
def one_by_one(worker_pool: WorkerPools) -> Callable[[str], DocumentResult]:
    """Every document of a family alone, in fp64; made once."""
    known: dict[str, DocumentResult] = {}

    def get(family: str) -> DocumentResult:
        if family not in known:
            flags = f"{COMMON} {FAMILIES[family]} --micro-batch-size 1"
            (known[family],) = worker_pool(1).run(run_documents, flags, PIECES, True)
        return known[family]

    return get


@pytest.mark.parametrize(("family", "layout"), _grid())
def test_a_step_equals_its_documents(
    family: str,
    layout: str,
    worker_pool: WorkerPools,
    one_by_one: Callable[[str], DocumentResult],
) -> None:
    world_size, flags = LAYOUTS[layout]
    result = run(worker_pool, world_size, f"{COMMON} {FAMILIES[family]} {flags}", rows=SAMPLES)
    check(result, one_by_one(family))


def check(result: RankResult, reference: DocumentResult) -> None:
    """The same count, loss and gradient."""
    assert result.loss_counts == [reference.count]
    assert result.losses[0] == pytest.approx(reference.loss, rel=LOSS_TOLERANCE)
    assert relative_l2(result.gradient, reference.gradient) < GRADIENT_TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_in_double_precision(
    family: str, worker_pool: WorkerPools, one_by_one: Callable[[str], DocumentResult]
) -> None:
    """Document by document, in a pack with padding after every segment."""
    command = f"{COMMON} {FAMILIES[family]} --micro-batch-size 6"
    (result,) = worker_pool(1).run(run_pack, command, SAMPLES, 8)
    reference = one_by_one(family)
    assert result.count == reference.count
    assert result.losses == pytest.approx(reference.losses, rel=1e-12, abs=1e-12)
    assert relative_l2(result.gradient, reference.gradient) < 1e-12


def test_families_are_different_models(one_by_one: Callable[[str], DocumentResult]) -> None:
    """No flag of a family is without effect: no two agree in what their documents lose."""
    losses = {family: one_by_one(family).loss for family in FAMILIES}
    by_value = sorted(losses.items(), key=lambda item: item[1])
    for (one, first), (other, second) in zip(by_value, by_value[1:], strict=False):
        assert second - first > 1e-6 * first, f"{one} and {other} are the same"


RECOMPUTED = {
    "core_attn": ("llama", "one", "core_attn"),
    "layernorm": ("gpt3", "tp2-sp", "layernorm"),
    "mlp": ("squared-relu", "pp2", "mlp"),
    "mla_up_proj": ("latent", "ring", "mla_up_proj"),
    "all": ("latent-sinks", "magi", "core_attn layernorm mla_up_proj mlp"),
}


@pytest.mark.parametrize("name", RECOMPUTED)
def test_recomputed_modules_change_no_bit(name: str, worker_pool: WorkerPools) -> None:
    family, layout, modules = RECOMPUTED[name]
    world_size, flags = LAYOUTS[layout]
    command = f"{COMMON} {FAMILIES[family]} {flags}"
    selective = f"--recompute-granularity selective --recompute-modules {modules}"
    _same_bits(run(worker_pool, world_size, command, rows=SAMPLES), command, selective, worker_pool)


@pytest.mark.parametrize(("family", "layout"), [("latent", "magi"), ("sinks", "ring-pp2")])
@pytest.mark.parametrize("method", ["uniform", "block"])
def test_recomputed_layers_change_no_bit(
    family: str, layout: str, method: str, worker_pool: WorkerPools
) -> None:
    world_size, flags = LAYOUTS[layout]
    command = f"{COMMON} {FAMILIES[family]} {flags}"
    full = f"--recompute-granularity full --recompute-method {method} --recompute-num-layers 1"
    _same_bits(run(worker_pool, world_size, command, rows=SAMPLES), command, full, worker_pool)


def _same_bits(plain: RankResult, command: str, more: str, pools: WorkerPools) -> None:
    again = run(pools, len(plain.extra), f"{command} {more}", rows=SAMPLES)
    assert again.losses == plain.losses
    assert_bitwise_equal(again.gradient, plain.gradient)
    assert_bitwise_equal(again.final_weights, plain.final_weights)
