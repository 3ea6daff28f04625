"""Windows as flags say them: the plans of batches, and megatron-core's layers, agree."""

from __future__ import annotations

import pytest
import torch

from megatron.packed.arguments import config_from_flags
from megatron.packed.attention.core_attention import layer_window
from megatron.packed.context_parallel.context_parallel_helper import helper_settings
from megatron.packed.model.transformer_config import build_transformer_config
from tests.unit.arguments.flags import MINIMAL


@pytest.mark.parametrize(
    ("flags", "windows"),
    [
        ("", (None,) * 4),
        ("--window-size 7,0", (7,) * 4),
        ("--window-size (0,-1)", (0,) * 4),
        ("--window-size -1,0", (None,) * 4),
        ("--window-size 7,0 --window-attn-skip-freq 2", (7, None, 7, None)),
        ("--window-size 7,0 --window-attn-skip-freq 3", (7, 7, None, 7)),
        ("--window-size 7,0 --window-attn-skip-freq 1", (None,) * 4),
        ("--window-size 7,0 --window-attn-skip-freq ([1]+[0])*2", (7, None, 7, None)),
    ],
)
def test_every_layer_has_its_window(flags: str, windows: tuple[int | None, ...]) -> None:
    config = config_from_flags(f"{MINIMAL} {flags.replace('size -1,0', 'size=-1,0')}")
    assert config.attention.layer_windows(4) == windows
    core = build_transformer_config(config)
    layers = range(1, 5)
    by_core = tuple(layer_window(core.window_size, core.window_attn_skip_freq, n) for n in layers)
    assert by_core == windows
    assert helper_settings(config, 0).layer_windows == windows


def test_a_window_is_a_band_of_the_mask() -> None:
    """The core attention of a windowed layer against scores masked one by one."""
    from megatron.core.transformer.enums import AttnMaskType

    from megatron.packed.attention.core_attention import PackedCoreAttention

    config = build_transformer_config(config_from_flags(f"{MINIMAL} --window-size 3,0"))
    module = PackedCoreAttention(config, 1, AttnMaskType.causal)
    q, k, v = torch.randn(3, 11, 2, 4, 16, dtype=torch.float64)
    boundaries = torch.tensor([0, 5, 11, 12, 22], dtype=torch.int32)
    got = module(q, k, v, boundaries).unflatten(2, (4, 16))
    segment = torch.bucketize(torch.arange(22), boundaries, right=True).view(2, 11)
    for row in range(2):
        for i in range(11):
            seen = [j for j in range(i + 1) if i - j <= 3 and segment[row, i] == segment[row, j]]
            for head in range(4):
                scores = torch.stack([q[i, row, head] @ k[j, row, head] / 4 for j in seen])
                expected = scores.softmax(0) @ torch.stack([v[j, row, head] for j in seen])
                assert torch.allclose(got[i, row, head], expected, rtol=1e-12, atol=1e-12)
