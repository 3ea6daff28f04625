"""Which layers every stage holds, against megatron-core's own arithmetic."""

from __future__ import annotations

import pytest

from megatron.packed.arguments import config_from_flags
from megatron.packed.arguments.stages import LayoutError, parse_layout, stages_of, virtual_size

from .flags import MINIMAL

PP2, PP4 = "--pipeline-model-parallel-size 2 ", "--pipeline-model-parallel-size 4 "
LAYOUTS = {
    "one process": ("--num-layers 8", 1),
    "equal": (PP4 + "--num-layers 8", 4),
    "virtual": (PP2 + "--num-layers 8 --num-virtual-stages-per-pipeline-rank 4", 2),
    "virtual by layers": (PP4 + "--num-layers 8 --num-layers-per-virtual-pipeline-stage 1", 4),
    "first": (PP2 + "--num-layers 5 --decoder-first-pipeline-num-layers 2", 2),
    "first and last": (
        PP4 + "--num-layers 9 --decoder-first-pipeline-num-layers 1 "
        "--decoder-last-pipeline-num-layers 2",
        4,
    ),
    "uneven, virtual": (
        PP4 + "--num-layers 12 --decoder-first-pipeline-num-layers 2 "
        "--decoder-last-pipeline-num-layers 2 --num-virtual-stages-per-pipeline-rank 2",
        4,
    ),
    "embedding": (PP2 + "--num-layers 7 --account-for-embedding-in-pipeline-split", 2),
    "embedding and loss, virtual": (
        PP4 + "--num-layers 6 --account-for-embedding-in-pipeline-split "
        "--account-for-loss-in-pipeline-split --num-virtual-stages-per-pipeline-rank 2",
        4,
    ),
    "explicit": (PP4 + "--num-layers 6 --pipeline-model-parallel-layout Et*3|(t|)*2tL", 4),
    "explicit, virtual": (PP2 + "--num-layers 6 --pipeline-model-parallel-layout Et|tt|tt|tL", 2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_stages_are_those_of_megatron_core(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from megatron.packed.model.transformer_config import build_transformer_config

    flags, world_size = LAYOUTS[name]
    # Micro-batches enough for any group of virtual stages.
    flags = f"{MINIMAL} {flags} --global-batch-size {2 * world_size}"
    config = config_from_flags(flags, {"WORLD_SIZE": str(world_size)}, accelerator="cpu")
    stages = stages_of(config)
    assert sum(stages.layers) == config.model.num_layers
    assert len(stages.layers) == stages.processes * stages.virtual
    core = build_transformer_config(config)
    virtual = virtual_size(config)
    assert core.virtual_pipeline_model_parallel_size == virtual
    monkeypatch.setattr(
        parallel_state, "get_virtual_pipeline_model_parallel_world_size", lambda: virtual
    )
    for process in range(stages.processes):
        monkeypatch.setattr(
            parallel_state, "get_pipeline_model_parallel_rank", lambda rank=process: rank
        )
        for chunk in range(stages.virtual):
            number = chunk if virtual else None
            stage = stages.stage(process, chunk)
            assert get_num_layers_to_build(core, number) == stages.layers[stage]
            offset = get_transformer_layer_offset(core, number)
            # Where a stage holds no layer, nothing asks for the number of its first.
            assert offset == sum(stages.layers[:stage]) or not stages.layers[stage]


@pytest.mark.parametrize(
    "text",
    ["Ettt|(tt|)*29,m|L", "Et*3|(tt|)*6tmL", "Et*7|t*7mL", "E|(t|)*3(tt)*2|L", "Et*2|(tt|)*5t|tmL"],
)
def test_layouts_are_read_as_megatron_core_reads_them(text: str) -> None:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    expected = PipelineParallelLayerLayout.parse_str_to_list(text)
    assert parse_layout(text) == ["".join(letters[kind.name] for kind in s) for s in expected]


def test_where_further_tokens_are_predicted() -> None:
    from megatron.packed.arguments.stages import Stages

    assert Stages(4, 1, (1, 1, 0, 0), (0, 0, 2, 0)).first_prediction == 2
    assert Stages(4, 1, (1, 1, 1, 0), (0, 0, 0, 2)).first_prediction is None
    assert Stages(2, 1, (1, 1), (0, 0)).first_prediction is None
    with pytest.raises(LayoutError, match="holds 'q'"):
        parse_layout("Etq|L")
