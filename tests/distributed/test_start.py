"""What a run starts from, against megatron-core itself: initial weights, and FLOPs of the model."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.distributed.documents import build_model
from tests.distributed.pool import WorkerPools

FLAGS = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 64 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 1000 --attention-dropout 0 --hidden-dropout 0 "
    "--micro-batch-size 2 --train-iters 1 --lr 1e-3 --init-method-std 0.03 --threads 1 "
)
GPT = "--position-embedding-type learned_absolute "
LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --group-query-attention "
    "--num-query-groups 2 --disable-bias-linear --untie-embeddings-and-output-weights "
)


def _weights(flags: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Our initial weights, and those of megatron-core's own model and init methods."""
    from megatron.core.models.gpt import GPTModel

    from megatron.packed.accelerator import select_accelerator
    from megatron.packed.arguments import config_from_flags
    from megatron.packed.model.layer_specs import build_layer_spec
    from megatron.packed.model.transformer_config import build_transformer_config

    ours, _ = build_model(flags, double=False)
    config = config_from_flags(flags, os.environ)
    upstream_config = build_transformer_config(config)
    for name in ("init_method", "output_layer_init_method", "embedding_init_method"):
        setattr(upstream_config, name, None)
    upstream_config.__post_init__()
    upstream = GPTModel(
        config=upstream_config,
        transformer_layer_spec=build_layer_spec(config, upstream_config, select_accelerator("cpu")),
        vocab_size=ours.vocab_size,
        max_sequence_length=64,
        share_embeddings_and_output_weights=ours.share_embeddings_and_output_weights,
        position_embedding_type=config.model.position_embedding_type,
    )
    return tuple(
        {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for model in (ours, upstream)
    )  # type: ignore[return-value]


@pytest.mark.parametrize("kind", [GPT, LLAMA], ids=["gpt", "llama"])
def test_initial_weights_are_distributed_as_upstreams(kind: str, worker_pool: WorkerPools) -> None:
    ((ours, upstream),) = worker_pool(1).run(_weights, FLAGS + kind)
    assert ours.keys() == upstream.keys()
    for name, expected in upstream.items():
        values = ours[name]
        assert values.shape == expected.shape
        if expected.unique().numel() == 1:
            assert torch.equal(values, expected), name
            continue
        assert not torch.equal(values, expected), name
        count = values.numel()
        # Means and deviations of two samples of one distribution, within five standard errors.
        error = 5 * (2 / count) ** 0.5
        assert abs(values.mean() - expected.mean()) < error * expected.std(), name
        assert values.std() == pytest.approx(expected.std().item(), rel=error), name


def _counted_flops(flags: str) -> tuple[int, int, int]:
    """What torch's counter sees of a step, what ours says, and what ours says of attention."""
    from torch.utils.flop_counter import FlopCounterMode

    from megatron.packed.arguments import config_from_flags
    from megatron.packed.training.flops import FlopsCounter

    model, _ = build_model(flags, double=False)
    tokens = torch.randint(0, 1000, (2, 64))
    positions = torch.arange(64).expand(2, -1)
    with FlopCounterMode(display=False) as counter:
        model(tokens, positions, None, labels=tokens).sum().backward()
    counts: dict[Any, int] = counter.get_flop_counts()["Global"]
    products = sum(count for operator, count in counts.items() if "attention" not in str(operator))
    ours = FlopsCounter.from_config(config_from_flags(flags, os.environ), model.vocab_size)
    return products, ours.count(128, 2 * 64**2), ours.count(128, 2 * 64**2) - ours.count(128, -128)


@pytest.mark.parametrize("kind", [GPT, LLAMA], ids=["gpt", "llama"])
def test_flops_are_those_of_the_model(kind: str, worker_pool: WorkerPools) -> None:
    """Matrix products as torch counts them; attention as causal pairs, half of the square."""
    ((products, total, attention),) = worker_pool(1).run(_counted_flops, FLAGS + kind)
    assert total - attention == products
    pairs = 2 * 64 * 65 // 2
    assert attention == 2 * pairs * 3 * (2 * 2 * 256)
