"""Initial weights: a pure function of seed, global name and element index."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from megatron.packed.model.initialization import (
    InitializationConfig,
    counter_normal,
    global_parameter_name,
    initialize_weights,
    stream_key,
    weight_std,
)

STD, LAYERS = 0.02, 8


class _Stage(torch.nn.Module):
    """Parameters under the names of a GPTModel, shards as tensor parallelism makes them."""

    def __init__(self, shapes: dict[str, tuple[tuple[int, ...], int | None]], tp_size: int) -> None:
        super().__init__()
        self.parameters_by_name = {}
        for name, (shape, dim) in shapes.items():
            local = [size // tp_size if dim == i else size for i, size in enumerate(shape)]
            parameter = torch.nn.Parameter(torch.full(local, 7.0))
            if dim is not None:
                parameter.tensor_model_parallel, parameter.partition_dim = True, dim
            self.parameters_by_name[name] = parameter

    def named_parameters(self, *args: object, **kwargs: object) -> Iterator:  # type: ignore[override]
        return iter(self.parameters_by_name.items())


def _config(tp_rank: int = 0, tp_size: int = 1, **changes: object) -> InitializationConfig:
    values = {"seed": 1234, "std": STD, "num_layers": LAYERS, "gated_linear_unit": True}
    values["vocab_size"] = 1 << 20
    return InitializationConfig(**(values | changes), tp_rank=tp_rank, tp_size=tp_size)


def _fill(shapes: dict, offset: int = 0, **config: object) -> dict[str, torch.Tensor]:
    stage = _Stage(shapes, int(config.get("tp_size", 1)))
    initialize_weights(stage, _config(**config), offset)
    return {name: parameter.data for name, parameter in stage.parameters_by_name.items()}


WORDS = "embedding.word_embeddings.weight"
SHAPES = {
    "embedding.word_embeddings.weight": ((48, 12), 0),
    "embedding.position_embeddings.weight": ((20, 12), None),
    "decoder.layers.0.self_attention.linear_qkv.weight": ((24, 12), 0),
    "decoder.layers.0.self_attention.linear_proj.weight": ((12, 24), 1),
    "decoder.layers.0.mlp.linear_fc1.weight": ((32, 12), 0),
    "decoder.layers.0.mlp.linear_fc2.weight": ((12, 16), 1),
    "output_layer.weight": ((48, 12), 0),
}


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize("gated", [True, False])
def test_shards_tile_the_whole(tp_size: int, gated: bool) -> None:
    whole = _fill(SHAPES, gated_linear_unit=gated)
    parts = [
        _fill(SHAPES, tp_rank=rank, tp_size=tp_size, gated_linear_unit=gated)
        for rank in range(tp_size)
    ]
    for name, (_, dim) in SHAPES.items():
        shards = [part[name] for part in parts]
        if dim is None:
            assert all(torch.equal(shard, whole[name]) for shard in shards)
        elif gated and "linear_fc1" in name:
            # A rank holds its gates, then its up projections; the whole, all gates first.
            gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
            assert torch.equal(torch.cat((*gates, *ups)), whole[name])
        else:
            assert torch.equal(torch.cat(shards, dim=dim), whole[name])


def test_pipeline_stages_continue_the_layers() -> None:
    first = "decoder.layers.{}.mlp.linear_fc1.weight"
    whole = _fill({first.format(i): ((8, 4), 0) for i in range(4)})
    last_stage = _fill({first.format(i): ((8, 4), 0) for i in range(2)}, offset=2)
    for layer in (0, 1):
        assert torch.equal(last_stage[first.format(layer)], whole[first.format(layer + 2)])
    assert len({weight.sum().item() for weight in whole.values()}) == 4


@pytest.mark.parametrize("options", [{"xavier": True}, {"embedding_std": 0.5}, {"width_mult": 4.0}])
def test_shards_of_other_distributions_tile_the_whole(options: dict) -> None:
    whole = _fill(SHAPES, vocab_size=48, **options)
    parts = [_fill(SHAPES, tp_rank=r, tp_size=2, vocab_size=48, **options) for r in (0, 1)]
    for name, (_, dim) in SHAPES.items():
        if dim is not None and "fc1" not in name:
            assert torch.equal(torch.cat([part[name] for part in parts], dim=dim), whole[name])


def test_xavier_uniform_by_the_fans_of_the_whole_parameter() -> None:
    shapes = {
        "decoder.layers.0.mlp.linear_fc2.weight": ((300, 500), 1),
        "embedding.word_embeddings.weight": ((400, 100), 0),
    }
    whole = _fill(shapes, xavier=True, vocab_size=350)
    for name, fans in (("decoder.layers.0.mlp.linear_fc2.weight", 800), (WORDS, 450)):
        values, bound = whole[name].double(), math.sqrt(6 / fans)
        values = values[:350] if name == WORDS else values
        assert values.abs().max() <= bound
        assert values.abs().max() > 0.99 * bound
        assert values.std() == pytest.approx(bound / math.sqrt(3), rel=0.02)
        assert abs(values.mean()) < 0.02 * bound
        # Not merely the right moments: a fifth of the values in a fifth of the range.
        assert (values.abs() < bound / 5).double().mean() == pytest.approx(0.2, abs=0.01)
    normal = _fill(shapes, xavier=True, embedding_std=0.25, vocab_size=350)[WORDS]
    assert normal[:350].std() == pytest.approx(0.25, rel=0.02)


def test_embeddings_and_sinks_have_distributions_of_their_own() -> None:
    sinks = "decoder.layers.3.self_attention.core_attention.softmax_offset"
    bias = "decoder.layers.3.mlp.linear_fc2.bias"
    shapes = {WORDS: ((400, 100), 0), sinks: ((4000,), 0), bias: ((40,), None)}
    filled = _fill(shapes, embedding_std=0.5)
    assert filled[WORDS].std() == pytest.approx(0.5, rel=0.02)
    assert filled[sinks].std() == pytest.approx(STD, rel=0.05)
    assert bool((filled[bias] == 7.0).all())
    halves = [_fill(shapes, tp_rank=rank, tp_size=2)[sinks] for rank in (0, 1)]
    assert torch.equal(torch.cat(halves), filled[sinks])


def test_maximal_update_narrows_hidden_weights_alone() -> None:
    wide = _config(width_mult=4.0)
    assert weight_std("decoder.layers.0.mlp.linear_fc1.weight", wide) == STD / 2
    residual = weight_std("decoder.layers.0.mlp.linear_fc2.weight", wide)
    assert residual == pytest.approx(STD / 2 / math.sqrt(2 * LAYERS))
    assert weight_std(WORDS, wide) == weight_std("output_layer.weight", wide) == STD


def test_names() -> None:
    assert global_parameter_name("decoder.layers.11.mlp.w", 20) == "decoder.layers.31.mlp.w"
    assert global_parameter_name("decoder.final_layernorm.weight", 20) == (
        "decoder.final_layernorm.weight"
    )
    assert global_parameter_name("mtp.layers.0.mtp_model_layer.mlp.w", 20) == (
        "mtp.layers.0.transformer_layer.mlp.w"
    )
    assert global_parameter_name("embedding.word_embeddings.weight", 3) == (
        "embedding.word_embeddings.weight"
    )


def test_tied_copy_starts_as_the_embedding() -> None:
    shapes = {"output_layer.weight": ((48, 12), 0)}
    stage = _Stage(shapes, 1)
    stage.parameters_by_name["output_layer.weight"].shared_embedding = True
    initialize_weights(stage, _config())
    embedding = _fill(SHAPES)["embedding.word_embeddings.weight"]
    assert torch.equal(stage.parameters_by_name["output_layer.weight"], embedding)
    assert not torch.equal(_fill(SHAPES)["output_layer.weight"], embedding)


def test_vectors_keep_what_they_have() -> None:
    filled = _fill({"decoder.final_layernorm.weight": ((12,), None), "x.bias": ((8,), 0)})
    assert all((values == 7.0).all() for values in filled.values())


def test_more_rows_do_not_move_the_first() -> None:
    """The vocabulary's padding depends on the layout, its real rows don't."""
    name = "embedding.word_embeddings.weight"
    small, large = (_fill({name: ((rows, 12), 0)})[name] for rows in (48, 96))
    assert torch.equal(large[:48], small)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_vocabulary_padding_starts_at_zero(tp_size: int) -> None:
    """So that the norm of the parameters is that of the real ones, whatever the padding."""
    name = "output_layer.weight"
    whole = _fill({name: ((48, 12), 0)})[name]
    shards = [
        _fill({name: ((48, 12), 0)}, tp_rank=rank, tp_size=tp_size, vocab_size=37)[name]
        for rank in range(tp_size)
    ]
    joined = torch.cat(shards)
    assert torch.equal(joined[:37], whole[:37])
    assert not joined[37:].any()


def test_depends_on_seed_name_and_nothing_else() -> None:
    first = _fill(SHAPES)
    torch.manual_seed(99)
    assert all(torch.equal(values, first[name]) for name, values in _fill(SHAPES).items())
    other = _fill(SHAPES, seed=1235)
    assert all(not torch.equal(values, first[name]) for name, values in other.items())
    # Keys and values are part of every checkpoint's reproducibility: they never change.
    assert stream_key(1234, "embedding.word_embeddings.weight") == 7233295772300154001
    drawn = counter_normal(42, torch.arange(3), 1.0).tolist()
    assert drawn == pytest.approx([0.8330065, 0.3309565, -0.6314353], rel=1e-6)


def test_chunks_are_seamless() -> None:
    """A parameter larger than the generator's working set."""
    name, width = "embedding.word_embeddings.weight", 640
    whole = _fill({name: ((1000, width), 0)})[name]
    key = stream_key(1234, name)
    for row in (0, 408, 409, 410, 818, 819, 999):
        indices = torch.arange(width) + row * width
        assert torch.equal(whole[row], counter_normal(key, indices, STD))


def test_standard_deviations() -> None:
    for name, expected in (
        ("decoder.layers.3.self_attention.linear_qkv.weight", STD),
        ("decoder.layers.3.self_attention.linear_proj.weight", STD / math.sqrt(2 * LAYERS)),
        ("decoder.layers.3.mlp.linear_fc1.weight", STD),
        ("decoder.layers.3.mlp.linear_fc2.weight", STD / math.sqrt(2 * LAYERS)),
        ("embedding.word_embeddings.weight", STD),
    ):
        assert weight_std(name, _config()) == pytest.approx(expected)
        values = _fill({name: ((512, 256), 0)})[name].double()
        count = values.numel()
        # Five standard errors.
        assert abs(values.mean()) < 5 * expected / math.sqrt(count)
        assert values.std() == pytest.approx(expected, rel=5 / math.sqrt(2 * count))


def test_values_are_normal_and_independent() -> None:
    count = 1 << 18
    values = counter_normal(stream_key(1, "a"), torch.arange(count), 1.0).double().numpy()
    grid = np.linspace(-3, 3, 61)
    empirical = np.searchsorted(np.sort(values), grid) / count
    exact = np.array([0.5 * (1 + math.erf(x / math.sqrt(2))) for x in grid])
    assert np.abs(empirical - exact).max() < 1.95 / math.sqrt(count)  # Kolmogorov-Smirnov, 0.1 %
    assert abs((values**3).mean()) < 5 * math.sqrt(15 / count)
    assert (values**4).mean() == pytest.approx(3, abs=5 * math.sqrt(96 / count))
    bound = 5 / math.sqrt(count)
    other = counter_normal(stream_key(1, "b"), torch.arange(count), 1.0).double().numpy()
    for lag in (1, 2, 64, 256, 4096):
        assert abs((values[:-lag] * values[lag:]).mean()) < bound
        assert abs((values[:-lag] ** 2 * values[lag:] ** 2).mean() - 1) < 5 * bound
    assert abs((values * other).mean()) < bound
    assert len(np.unique(values)) > 0.98 * count
