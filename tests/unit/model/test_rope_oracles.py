"""Rotary variants against formulas from the papers, in double precision, and Hugging Face's code.

The formulas are written here once more, channel by channel, and always run; the comparison with
`transformers` runs where it is installed.
"""

from __future__ import annotations

import cmath
import math
from types import SimpleNamespace

import pytest
import torch

from megatron.packed.model.rotary import (
    PositionIndexedRotaryEmbedding,
    Yarn,
    YarnPositionIndexedRotaryEmbedding,
    apply_rotary_pos_emb,
)

WIDTH = 16
POSITIONS = [0, 1, 2, 17, 300]

# Our keyword arguments (yarn: see `Yarn`), and the same as Hugging Face's `rope_parameters`.
VARIANTS = {
    "plain": ({}, {"rope_type": "default", "rope_theta": 10000.0}),
    "base": ({"rotary_base": 500000}, {"rope_type": "default", "rope_theta": 500000.0}),
    "percent": (
        {"rotary_percent": 0.5},
        {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    "interpolated": (
        {"seq_len_interpolation_factor": 4},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    ),
    "llama3": (
        {"rotary_base": 500000, "rope_scaling": True, "rope_scaling_factor": 8.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "yarn": (
        {"yarn": Yarn(40.0, mscale_all_dim=0.0)},
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
        },
    ),
    "yarn-deepseek": (
        {"yarn": Yarn(40.0, mscale=1.0, mscale_all_dim=1.0)},
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    ),
    "yarn-odd": (
        {
            "rotary_base": 150000,
            "yarn": Yarn(
                32.0,
                original_length=512,
                beta_fast=24.0,
                beta_slow=2.0,
                mscale=0.7,
                mscale_all_dim=0.3,
                round_to_int=False,
            ),
        },
        {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "mscale": 0.7,
            "mscale_all_dim": 0.3,
            "beta_fast": 24.0,
            "beta_slow": 2.0,
            "truncate": False,
            "original_max_position_embeddings": 512,
        },
    ),
}


def ours(options: dict) -> PositionIndexedRotaryEmbedding:
    if "yarn" in options:
        return YarnPositionIndexedRotaryEmbedding(WIDTH, use_cpu_initialization=True, **options)
    arguments = {"rotary_percent": 1.0, **options}
    return PositionIndexedRotaryEmbedding(WIDTH, use_cpu_initialization=True, **arguments)


def turns_by_hand(parameters: dict) -> tuple[list[float], float]:
    """Angle per position of each pair of channels, and the factor of cosines and sines."""
    width = int(WIDTH * parameters.get("partial_rotary_factor", 1.0))
    base, factor = parameters["rope_theta"], parameters.get("factor", 1.0)
    plain = [base ** (-2 * pair / width) for pair in range(width // 2)]
    match parameters["rope_type"]:
        case "default":
            return plain, 1.0
        case "linear":
            return [angle / factor for angle in plain], 1.0
        case "llama3":
            return [_llama3(angle, parameters) for angle in plain], 1.0
    length = parameters["original_max_position_embeddings"]

    def pair_with(turns: float) -> float:
        """Pair p whose angle base^(-2p/width) makes so many turns in the original length."""
        return width / 2 * math.log(length / (2 * math.pi * turns), base)

    low = pair_with(parameters.get("beta_fast", 32.0))
    high = pair_with(parameters.get("beta_slow", 1.0))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    angles = []
    for pair, angle in enumerate(plain):
        blend = min(max((pair - low) / (high - low), 0.0), 1.0)
        angles.append(angle / factor * blend + angle * (1 - blend))

    def scale(mscale: float) -> float:
        return 1 + 0.1 * mscale * math.log(factor)

    return angles, scale(parameters.get("mscale", 1.0)) / scale(parameters.get("mscale_all_dim", 0))


def _llama3(angle: float, parameters: dict) -> float:
    turns = parameters["original_max_position_embeddings"] * angle / (2 * math.pi)
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    if turns < low:
        return angle / parameters["factor"]
    if turns > high:
        return angle
    smooth = (turns - low) / (high - low)
    return (1 - smooth) * angle / parameters["factor"] + smooth * angle


def rotate(module: PositionIndexedRotaryEmbedding, t: torch.Tensor, **config: bool) -> torch.Tensor:
    with module.positions(torch.tensor([POSITIONS])):
        freqs = module()
    settings = {"rotary_interleaved": False, "multi_latent_attention": False, **config}
    return apply_rotary_pos_emb(t, freqs, SimpleNamespace(**settings))


@pytest.mark.parametrize("pairs", ["halves", "neighbours", "latent"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_rotation_is_a_product_of_complex_numbers(name: str, pairs: str) -> None:
    options, parameters = VARIANTS[name]
    if pairs == "neighbours" and "yarn" in options:
        pytest.skip("refused on the command line")
    angles, amplitude = turns_by_hand(parameters)
    half = len(angles)
    t = torch.randn(len(POSITIONS), 1, 2, WIDTH, dtype=torch.float64)
    got = rotate(
        ours(options),
        t,
        rotary_interleaved=pairs == "neighbours",
        multi_latent_attention=pairs == "latent",
    )
    expected = t.clone()
    for row, position in enumerate(POSITIONS):
        for head in range(2):
            for pair, angle in enumerate(angles):
                a, b = (pair, pair + half) if pairs == "halves" else (2 * pair, 2 * pair + 1)
                x = t[row, 0, head]
                turned = complex(x[a], x[b]) * amplitude * cmath.exp(1j * position * angle)
                expected[row, 0, head, a], expected[row, 0, head, b] = turned.real, turned.imag
    # Angles are fp32, as everywhere: 300 radians are known to 2e-5.
    assert (got - expected).abs().max() < 1e-4
    assert (got[:4] - expected[:4]).abs().max() < 1e-5
    angles_fp32 = ours(options).inv_freq.double() / options.get("seq_len_interpolation_factor", 1)
    assert torch.allclose(angles_fp32, torch.tensor(angles).double(), rtol=1e-6, atol=0)
    assert ours(options).amplitude == pytest.approx(amplitude, rel=1e-12)


@pytest.mark.parametrize("name", VARIANTS)
def test_hugging_face_rotates_alike(name: str) -> None:
    pytest.importorskip("transformers", reason="the formulas above are tested without it")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

    options, parameters = VARIANTS[name]
    config = LlamaConfig(
        hidden_size=2 * WIDTH,
        num_attention_heads=2,
        head_dim=WIDTH,
        max_position_embeddings=131072,
        rope_parameters=dict(parameters),
    )
    if parameters["rope_type"] == "default":
        frequencies, amplitude = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        kind = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
        frequencies, amplitude = kind(config, device=torch.device("cpu"))
    rotated = 2 * len(frequencies)
    if rotated != int(WIDTH * parameters.get("partial_rotary_factor", 1.0)):
        pytest.skip("this version of Llama knows no partial rotation")
    angles = torch.tensor(POSITIONS).float().unsqueeze(1) * frequencies
    waves = torch.cat((angles, angles), dim=-1)[:, None, None]
    t = torch.randn(len(POSITIONS), 1, 2, WIDTH)
    part = t[..., :rotated]
    turned = (part * waves.cos() + rotate_half(part) * waves.sin()) * amplitude
    expected = torch.cat((turned, t[..., rotated:]), dim=-1)
    got = rotate(ours(options), t)
    # Where both round an angle of 300 radians, they may do so differently.
    assert (got - expected)[:4].abs().max() < 1e-6
    assert (got - expected).abs().max() < (1e-4 if name == "interpolated" else 1e-5)


def test_latent_scores_are_those_of_hugging_face() -> None:
    """DeepSeek's rotation brings pairs apart first: other channels, the same scores."""
    module = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    q, k = torch.randn(2, len(POSITIONS), 1, 2, WIDTH)
    rotary = ours({"yarn": Yarn(40.0, mscale_all_dim=1.0)})
    with rotary.positions(torch.tensor([POSITIONS])):
        cos, sin = rotary()[:, 0].unbind(dim=1)
    batched = (x.permute(1, 2, 0, 3) for x in (q, k))
    cos, sin = (torch.cat((x, x), dim=-1).unsqueeze(0) for x in (cos, sin))
    turned_q, turned_k = module.apply_rotary_pos_emb_interleave(*batched, cos, sin)
    expected = turned_q @ turned_k.transpose(-1, -2)
    got = (rotate(rotary, x, multi_latent_attention=True).permute(1, 2, 0, 3) for x in (q, k))
    ours_q, ours_k = got
    assert torch.allclose(ours_q @ ours_k.transpose(-1, -2), expected, rtol=1e-5, atol=1e-5)
