"""Maximal update parameterisation by its definition, where a run uses it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.distributed.harness import run
from tests.distributed.pool import WorkerPools
from tests.distributed.test_model_families import LLAMA
from tests.distributed.test_packed_documents import COMMON, SAMPLES

WIDTH = "--use-mup --mup-base-hidden-size 16 "  # a quarter of the model's 64


def _look(trainer: Any) -> dict[str, Any]:
    """What a run's model multiplies, and how fast each of its parameters learns."""
    import torch
    from megatron.core.utils import unwrap_model

    (model,) = unwrap_model(trainer.step.model)
    ids = torch.arange(6)[None]
    table = model.embedding.word_embeddings.weight
    hidden = torch.randn(6, 1, 64)
    logits, _ = model.output_layer(hidden)
    plain = hidden @ model.output_layer.weight.t()
    attention = model.decoder.layers[0].self_attention.core_attention
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = {}
    for member in getattr(trainer.step.optimizer, "chained_optimizers", [trainer.step.optimizer]):
        for group in member.optimizer.param_groups:
            for parameter in group["params"]:
                groups[by_id[id(parameter)]] = {
                    key: group.get(key) for key in ("max_lr", "min_lr", "lr", "eps", "wd_mult")
                }
    return {
        "embedding": float((model.embedding(ids, ids)[:, 0] / table[:6]).mean()),
        "logits": float((logits / plain)[..., :256].mean()),  # the others are padding
        "scale": attention.softmax_scale,
        "groups": groups,
    }


def _stds(flags: str, pools: WorkerPools) -> tuple[dict[str, float], dict[str, Any]]:
    result = run(
        pools, 1, f"{COMMON} {LLAMA} {flags} --micro-batch-size 6", rows=SAMPLES, inspect=_look
    )
    weights = result.initial_weights
    return {name: float(w[:256].std()) for name, w in weights.items()}, result.extra[0]


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_by_definition(optimizer: str, worker_pool: WorkerPools) -> None:
    chosen = f"--optimizer {optimizer} --min-lr 1e-4 "
    plain, plainly = _stds(chosen, worker_pool)
    narrow, seen = _stds(chosen + WIDTH + "--mup-embedding-mult 3", worker_pool)
    assert (plainly["embedding"], plainly["logits"]) == pytest.approx((1, 1))
    assert (seen["embedding"], seen["logits"]) == pytest.approx((3, 1 / 4))
    assert plainly["scale"] == pytest.approx(1 / 4)  # heads of 16 channels
    assert seen["scale"] == pytest.approx(1 / 16)
    for name, groups in seen["groups"].items():
        matrix = "linear" in name or name == "output_layer.weight"
        if "linear" in name:  # hidden weights start narrower; embeddings and outputs don't
            assert narrow[name] == pytest.approx(plain[name] / math.sqrt(4), rel=1e-5)
        elif name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            assert narrow[name] == plain[name]
        rates = plainly["groups"][name]
        factor = 1.0
        if optimizer == "adam" and matrix:
            factor = 1 / 4
            assert groups["eps"] == pytest.approx(rates["eps"] / 4)
        elif optimizer == "adam":
            assert groups["eps"] == rates["eps"]
        elif not matrix:
            factor = 4.0
        for key in ("max_lr", "min_lr", "lr"):
            assert groups[key] == pytest.approx(rates[key] * factor), name
        assert groups["wd_mult"] == rates["wd_mult"]


def test_other_multipliers(worker_pool: WorkerPools) -> None:
    flags = f"{WIDTH} --mup-output-mult 0.7 --mup-base-head-dim 9 --mup-attn-scale-power 0.5"
    _, seen = _stds(flags, worker_pool)
    assert (seen["embedding"], seen["logits"]) == pytest.approx((1, 0.7))
    assert seen["scale"] == pytest.approx(3 / 4)


def test_the_base_model_is_itself(worker_pool: WorkerPools) -> None:
    plain, plainly = _stds("", worker_pool)
    base, seen = _stds("--use-mup --mup-attn-scale-power 0.5", worker_pool)
    assert base == plain
    assert seen == plainly
