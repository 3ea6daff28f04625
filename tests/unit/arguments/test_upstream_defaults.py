"""Names, kinds and defaults of flags against upstream's own parser, where a wheel brings it.

From 0.17 on the package megatron-core holds `megatron.training`, whose parser is asked here. What
differs on purpose is listed with the reason, and docs/compatibility.md says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.packed.arguments import FlagSpec, all_specs

REPOSITORY = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is None,
    reason="this megatron-core brings no parser",
)

# Flags whose default differs: upstream's, ours.
DELIBERATE = {
    "--rerun-mode": ("validate_results", "disabled"),
    "--tokenizer-type": (None, "GPT2BPETokenizer"),
    "--eval-interval": (None, 1000),
    "--num-query-groups": (1, None),
    "--cp-comm-type": (["p2p"], None),
    "--yarn-original-max-position-embeddings": (None, 4096),
    "--yarn-beta-fast": (None, 32.0),
    "--yarn-beta-slow": (None, 1.0),
    "--moe-deepep-num-sms": (None, 20),
    "--moe-hybridep-num-sms": (None, 16),
}


@pytest.fixture(scope="module")
def upstream() -> dict[str, argparse.Action]:
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    return {name: action for action in parser._actions for name in action.option_strings}


def shared(upstream: dict[str, argparse.Action]) -> list[tuple[str, FlagSpec, argparse.Action]]:
    return [
        (name, spec, upstream[name])
        for spec in all_specs().values()
        for name in spec.names
        if name in upstream
    ]


def plain(value: Any) -> Any:
    """A default as a user would write it; what is unset or empty alike."""
    if isinstance(value, (list, tuple)):
        value = [plain(each) for each in value]
        value = value[0] if len(value) == 1 else value
    if value in ("", [], False):
        return None
    return value


def test_defaults(upstream: dict[str, argparse.Action]) -> None:
    differing = {}
    for name, spec, action in shared(upstream):
        if spec.required or (spec.default_rule and action.default is None):
            continue
        theirs, ours = getattr(action.default, "name", action.default), spec.default
        if spec.dest == action.dest.removeprefix("no_") != action.dest:  # no_x, here x turned off
            ours = not ours
        if isinstance(ours, str) and isinstance(theirs, int):  # a pattern, or its number
            theirs = str(theirs)
        if plain(theirs) != plain(ours):
            differing[name] = (theirs, ours)
    assert differing == DELIBERATE


def test_kinds_of_values(upstream: dict[str, argparse.Action]) -> None:
    checked = 0
    for name, spec, action in shared(upstream):
        switch = action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction)
        assert switch is not spec.takes_value, name
        if action.type in (int, float, str):
            assert spec.value_type is action.type, name
        if not switch:
            assert (action.nargs is not None) is spec.is_list, name
        checked += 1
    assert checked > 400


# Flags of programs of upstream's that don't train a GPT: inference, reinforcement learning, images,
# retrieval, BERT and T5.
OTHER_PROGRAMS = re.compile(
    r"-h$|--(help|(no-)?rl|grpo|langrl|refit|(no-)?inference|biencoder|ict|retriever|indexer|bert|img"
    r"|vision|swin|dino|mask|mamba|flash-decode|mlp-chunks-for-prefill|relative-attention|onnx"
    r"|sample-rate|short-seq-prob|titles|query-in-block|use-one-sent|evidence|block-data|embedding"
    r"|num-classes|num-channels|patch-dim|classes-fraction|data-per-class|head-lr|iter-per-epoch"
    r"|max-tokens-to-oom|output-bert|use-legacy-static|decode-only|enable-chunked|num-speculative"
    r"|use-same-sampling|mtp-standalone)"
)


def test_every_flag_of_a_training_is_known(upstream: dict[str, argparse.Action]) -> None:
    known = {name for spec in all_specs().values() for name in spec.names}
    left = [name for name in upstream if name not in known and not OTHER_PROGRAMS.match(name)]
    assert left == []


def test_the_differences_are_written_down() -> None:
    page = (REPOSITORY / "docs" / "compatibility.md").read_text(encoding="utf-8")
    assert [name for name in DELIBERATE if f"`{name}`" not in page] == []
