"""Descriptions of layers that differ: fewer blocks, every kind of them, sizes in proportion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.packed.arguments.heterogeneous import HeterogeneousConfig, LayerShape
from megatron.packed.cases.case import Case, Value
from megatron.packed.cases.layers import DESCRIPTION_FILE, DESCRIPTION_TEXT
from megatron.packed.cases.local_files import LocalFiles, localise
from megatron.packed.cases.shrink import SmallRun, shrink

FILES = LocalFiles(("a", "b"), "vocab.json", "merges.txt", "tokenizer.json", "sp.model")
LARGE: dict[str, Value] = {
    "--num-layers": 12,
    "--hidden-size": 8192,
    "--num-attention-heads": 64,
    "--micro-batch-size": 1,
    "--global-batch-size": 64,
    "--seq-length": 8192,
    "--train-iters": 1000,
    "--lr": 0.005,
}


def block(attention: Any, ffn: Any) -> dict[str, Any]:
    """An entry as Hugging Face's files have it; `no_op` or `linear` in place of a size."""

    def part(name: str, size: Any) -> dict[str, Any]:
        kept = size if not isinstance(size, str) else None
        return {name: kept, "no_op": size == "no_op", "replace_with_linear": size == "linear"}

    return {"attention": part("n_heads_in_group", attention), "ffn": part("ffn_mult", ffn)}


SHARED, WIDE, NARROW = block(8, 5.25), block(1, 5.25), block(64, 1.3125)
BARE, STRAIGHT = block("no_op", 2.625), block(8, "linear")


def text(blocks: list[dict[str, Any]], **document: Any) -> str:
    return json.dumps({"block_configs": blocks, **document})


def small(blocks: list[dict[str, Any]], document: Any = None, **changes: Value) -> SmallRun:
    flags = {"--" + name.replace("_", "-"): value for name, value in changes.items()}
    described: dict[str, Value] = {DESCRIPTION_TEXT: text(blocks, **(document or {}))}
    return shrink(Case("case", "regular", {**LARGE, **described, **flags}))


def shapes(description: Value, run: SmallRun) -> tuple[LayerShape, ...]:
    config = HeterogeneousConfig(heterogeneous_layers_config_encoded_json=str(description))
    hidden, heads = run.args["--hidden-size"], run.args["--num-attention-heads"]
    layers = config.layers(int(str(hidden)), int(str(heads)))
    assert layers is not None
    return layers


def test_four_blocks_of_four_kinds_are_left() -> None:
    run = small([SHARED] * 5 + [WIDE] + [BARE] * 5 + [STRAIGHT])
    assert run.args["--num-layers"] == 4 and run.notes == ()
    assert set(shapes(run.args[DESCRIPTION_TEXT], run)) == {
        LayerShape(True, False, 2, True, False, 224),  # 28,672 of 8,192
        LayerShape(True, False, 4, True, False, 224),
        LayerShape(False, False, None, True, False, 112),
        LayerShape(True, False, 2, True, True, None),
    }


def test_one_group_for_all_heads_stays_one_and_narrow_stays_narrow() -> None:
    run = small([NARROW, SHARED] * 6)
    first, *_ = shapes(run.args[DESCRIPTION_TEXT], run)
    assert (first.query_groups, first.ffn_hidden_size) == (1, 56)


def test_what_the_file_says_of_the_model_shrinks_too() -> None:
    said = {"num_hidden_layers": 12, "hidden_size": 8192, "num_attention_heads": 64}
    run = small([SHARED] * 12, {**said, "rope_theta": 10000})
    document = json.loads(str(run.args[DESCRIPTION_TEXT]))
    assert document["num_hidden_layers"] == run.args["--num-layers"]
    assert document["hidden_size"] == run.args["--hidden-size"]
    assert document["num_attention_heads"] == run.args["--num-attention-heads"]
    assert document["rope_theta"] == 10000


@pytest.mark.parametrize(
    ("changes", "layers", "groups"),
    [
        ({"num_layers": 3}, 3, 2),
        ({"pipeline_model_parallel_size": 4}, 4, 2),
        ({"pipeline_model_parallel_size": 4, "account_for_loss_in_pipeline_split": True}, 3, 2),
        ({"tensor_model_parallel_size": 8, "context_parallel_size": 2}, 4, 2),
        (
            {
                "tensor_model_parallel_size": 8,
                "context_parallel_size": 2,
                "cp_comm_type": "a2a",
            },
            4,
            4,
        ),
    ],
)
def test_stages_and_groups_suit_the_layout(
    changes: dict[str, Value], layers: int, groups: int
) -> None:
    run = small([SHARED] * int(str(changes.get("num_layers", 12))), **changes)
    described = shapes(run.args[DESCRIPTION_TEXT], run)
    assert run.args["--num-layers"] == len(described) == layers
    tensor = int(str(run.args.get("--tensor-model-parallel-size", 1)))
    for layer in described:
        assert layer.query_groups == groups
        assert layer.ffn_hidden_size is not None and layer.ffn_hidden_size % tensor == 0


def test_a_description_that_cannot_be_read_is_left_to_the_run() -> None:
    run = shrink(Case("case", "regular", {**LARGE, DESCRIPTION_TEXT: "{"}))
    assert run.args[DESCRIPTION_TEXT] == "{"


def test_a_file_is_read_and_a_small_one_written(tmp_path: Path) -> None:
    given = tmp_path / "config.json"
    given.write_text(text([SHARED] * 6 + [BARE] * 6))
    case = Case("case", "regular", {**LARGE, DESCRIPTION_FILE: str(given)})
    run = localise(shrink(case), FILES, tmp_path)
    path = Path(str(run.args[DESCRIPTION_FILE]))
    assert path.parent == tmp_path and path != given and run.notes == ()
    described = shapes(path.read_text(), run)
    assert [layer.attention for layer in described] == [True, True, False, False]
    assert described[0].ffn_hidden_size == 224


def test_a_cluster_s_file_has_a_stand_in_of_every_kind(tmp_path: Path) -> None:
    case = Case("case", "regular", {**LARGE, DESCRIPTION_FILE: "${MODELS}/config.json"})
    run = localise(shrink(case), FILES, tmp_path)
    assert run.notes == (
        f"{DESCRIPTION_FILE} ${{MODELS}}/config.json isn't here, layers of every kind stand in",
    )
    described = shapes(Path(str(run.args[DESCRIPTION_FILE])).read_text(), run)
    assert len(set(described)) == run.args["--num-layers"] == 4
    for linear in ("linear_attention", "linear_feed_forward"):
        assert {getattr(layer, linear) for layer in described} == {True, False}
