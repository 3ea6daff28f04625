"""Which attention the layers get, decided without any of the packages it is about."""

from __future__ import annotations

import pytest
import torch

from megatron.packed.accelerator import Accelerator
from megatron.packed.attention import magi, transformer_engine
from megatron.packed.attention.core_attention import PackedCoreAttention
from megatron.packed.attention.transformer_engine import TransformerEngineCoreAttention
from megatron.packed.errors import ConfigurationError
from megatron.packed.model.attention_engine import magi_shape, select_core_attention
from megatron.packed.model.transformer_config import build_transformer_config
from tests.unit.context_parallel.helper_cases import PACKED, config_of

CUDA = Accelerator("cuda", torch.device("cpu"), "nccl")
CPU = Accelerator("cpu", torch.device("cpu"), "gloo")
FUSED = PACKED + "--bf16 --attention-backend fused "


def select(flags: str, cp_size: int, accelerator: Accelerator = CUDA, **changes):
    config = config_of(flags, cp_size)
    transformer_config = build_transformer_config(config)
    for name, value in changes.items():
        setattr(transformer_config, name, value)
    return select_core_attention(config, transformer_config, accelerator)


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(transformer_engine, "is_installed", lambda: True)


def test_on_a_cpu_it_is_always_this_projects(installed):
    for flags, size in ((PACKED, 1), (FUSED, 2), ("--reset-attention-mask ", 1)):
        assert select(flags, size, CPU).module is PackedCoreAttention


def test_one_rank_keeps_what_the_layers_come_with():
    assert select(PACKED, 1) is None
    # These rows come with boundaries where TransformerEngine expects a mask.
    assert select("--reset-attention-mask ", 1).module is PackedCoreAttention


@pytest.mark.parametrize("backend", ["flash", "auto", "local"])
def test_other_backends_run_plans(installed, backend):
    flags = PACKED + f"--bf16 --attention-backend {backend} "
    assert select(flags, 2).module is PackedCoreAttention


def test_fused_is_transformer_engines_where_it_can(installed):
    for flags, exchanges in (
        (FUSED, ("p2p",)),
        (FUSED + "--cp-comm-type all_gather ", ("all_gather",)),
        (FUSED + "--cp-comm-type p2p a2a ", ("p2p", "a2a")),
        ("--bf16 --attention-backend fused ", ("p2p",)),
    ):
        spec = select(flags, 2)
        assert spec.module is TransformerEngineCoreAttention
        assert spec.params == {"exchanges": exchanges}


@pytest.mark.parametrize(
    ("flags", "cp_size", "changes", "reason"),
    [
        (FUSED + "--cp-comm-type striped ", 2, {}, "no exchange like striped"),
        (FUSED + "--cp-comm-type a2a ", 2, {}, "wants the zigzag of every segment"),
        (FUSED, 2, {"window_size": (5, 0)}, "sliding windows with all_gather and a2a alone"),
        (
            # Ours gives the one key-value head to both ranks.
            FUSED + "--cp-comm-type p2p a2a --group-query-attention --num-query-groups 1 ",
            2,
            {},
            "4 heads and 1 key-value heads",
        ),
        (FUSED, 2, {"softmax_type": "learnable"}, "asked for sinks"),
        (FUSED, 2, {"fp8": "hybrid"}, "no FP8 with packed sequences"),
        (PACKED + "--attention-backend fused ", 2, {}, "bf16 and fp16 alone"),
        (
            "--bf16 --attention-backend fused --reset-attention-mask ",
            2,
            {},
            "inside their documents alone",
        ),
    ],
)
def test_where_it_cannot_this_projects_runs_and_says_why(
    installed, flags, cp_size, changes, reason
):
    with pytest.warns(UserWarning, match=reason):
        assert select(flags, cp_size, **changes).module is PackedCoreAttention


def test_windows_go_to_transformer_engine_with_all_gather(installed):
    spec = select(FUSED + "--cp-comm-type all_gather ", 2, window_size=(5, 0))
    assert spec.module is TransformerEngineCoreAttention


def test_a_missing_package_is_named():
    with pytest.raises(ConfigurationError, match="package transformer_engine isn't installed"):
        select(FUSED, 2)


MAGI = PACKED + "--bf16 --attention-backend magi "


def shape_of(flags: str, cp_size: int = 2, accelerator: Accelerator = CUDA):
    return magi_shape(config_of(flags, cp_size), accelerator)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(magi, "is_installed", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_magi_runs_where_it_can(hopper):
    grouped = "--group-query-attention --num-query-groups 2 --magi-attn-chunk-size 4 "
    shape = shape_of(MAGI + grouped)
    assert (shape.heads, shape.kv_heads, shape.width, shape.cp_size) == (4, 2, 16, 2)
    assert (shape.chunk_size, shape.windows) == (4, (None,))
    windows = shape_of(MAGI + "--window-size 8,0 --window-attn-skip-freq 2 ").windows
    assert windows == (8, None)


def test_elsewhere_nobody_asks_for_magi(hopper):
    assert shape_of(MAGI, accelerator=CPU) is None
    assert shape_of(MAGI, 1) is None
    assert shape_of(PACKED + "--bf16 --cp-comm-type dispatch ") is None


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (MAGI + "--cp-comm-type dispatch a2a ", "no exchange like a2a"),
        (MAGI + "--packing-alignment segment ", "padded at their end alone"),
        (MAGI + "--softmax-type off-by-one ", "asked for sinks"),
        (MAGI + "--kv-channels 12 ", "12 channels are no multiple of 8"),
        (PACKED + "--attention-backend magi ", "bf16 and fp16 alone"),
    ],
)
def test_where_magi_cannot_this_projects_dispatch_runs(hopper, flags, reason):
    with pytest.warns(UserWarning, match=f"{reason}.*this project's own dispatch runs"):
        assert shape_of(flags) is None


def test_an_older_device_and_a_missing_package_are_named(hopper, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.warns(UserWarning, match="need a Hopper GPU"):
        assert shape_of(MAGI) is None
    monkeypatch.setattr(magi, "is_installed", lambda: False)
    with pytest.warns(UserWarning, match="the package magi_attention isn't installed"):
        assert shape_of(MAGI) is None
