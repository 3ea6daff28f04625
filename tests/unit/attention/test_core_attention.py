"""The core attention module behind megatron-core's contract."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.packed.attention.core_attention import PackedCoreAttention, layer_window
from megatron.packed.attention.plans import LayerPlans
from megatron.packed.errors import ConfigurationError


def config(**changes) -> TransformerConfig:
    values = dict(num_layers=2, hidden_size=32, num_attention_heads=4, attention_dropout=0.0)
    return TransformerConfig(**{**values, **changes})


def module(settings=None, layer_number=1, **arguments) -> PackedCoreAttention:
    return PackedCoreAttention(
        settings or config(),
        layer_number=layer_number,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        **arguments,
    )


def tensors(sequence=12, rows=2, kv_heads=4):
    return [torch.randn(sequence, rows, h, 8) for h in (4, kv_heads, kv_heads)]


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def dense(query, key, value, scale, window=None):
    """One causal row after another by plain softmax, `[S, B, heads * d]`."""
    repeat = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(repeat, dim=2) for x in (key, value))
    scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * scale
    scores = scores + torch.full(scores.shape[-2:], float("-inf")).triu(1)
    if window is not None:
        scores = scores + torch.full(scores.shape[-2:], float("-inf")).tril(-1 - window)
    return torch.einsum("bhqk,kbhd->qbhd", scores.softmax(-1), value).flatten(2)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_rows_are_causal(kv_heads):
    q, k, v = tensors(kv_heads=kv_heads)
    out = module()(q, k, v, None)
    assert out.shape == (12, 2, 32)
    assert out.is_contiguous()
    torch.testing.assert_close(out, dense(q, k, v, 8**-0.5))


def test_boundaries_cut_rows_into_blocks():
    q, k, v = tensors()
    out = module()(q, k, v, int32(0, 5, 12, 12, 24))
    torch.testing.assert_close(out[:5, :1], dense(*(x[:5, :1] for x in (q, k, v)), 8**-0.5))
    torch.testing.assert_close(out[5:, :1], dense(*(x[5:, :1] for x in (q, k, v)), 8**-0.5))
    torch.testing.assert_close(out[:, 1:], dense(*(x[:, 1:] for x in (q, k, v)), 8**-0.5))


@pytest.mark.parametrize("host_copies", [False, True])
def test_pack_equals_rows(host_copies):
    q, k, v = tensors()
    rows = module()(q, k, v, int32(0, 5, 12, 24))
    pack = [torch.full((28, *x.shape[2:]), float("nan")) for x in (q, k, v)]
    for packed, x in zip(pack, (q, k, v), strict=True):
        packed[0:5], packed[6:13], packed[14:26] = x[:5, 0], x[5:, 0], x[:, 1]
    params = SimpleNamespace(
        qkv_format="thd", cu_seqlens_q=int32(0, 5, 12, 24), cu_seqlens_q_padded=int32(0, 6, 14, 28)
    )
    if host_copies:
        params.cu_seqlens_host = params.cu_seqlens_q.numpy()
        params.cu_seqlens_padded_host = params.cu_seqlens_q_padded.numpy()
        params.cu_seqlens_q = params.cu_seqlens_q_padded = int32(0)  # must not be read
    out = module()(*pack, None, packed_seq_params=params)
    assert out.shape == (28, 32)
    assert torch.equal(out[0:5], rows[:5, 0])
    assert torch.equal(out[6:13], rows[5:, 0])
    assert torch.equal(out[14:26], rows[:, 1])
    assert torch.count_nonzero(out[[5, 13, 26, 27]]) == 0


def test_real_boundaries_serve_as_padded_ones():
    q, k, v = (x[:, 0] for x in tensors(rows=1))
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=int32(0, 5, 12))
    out = module()(q, k, v, None, packed_seq_params=params)
    rows = module()(*(x.unsqueeze(1) for x in (q, k, v)), int32(0, 5, 12))
    assert torch.equal(out, rows[:, 0])


@pytest.mark.parametrize("window", [0, 3, 11, 40])
def test_windows_in_rows_and_packs(window):
    q, k, v = tensors(kv_heads=2)
    windowed = module(config(window_size=(window, 0)))
    torch.testing.assert_close(windowed(q, k, v, None), dense(q, k, v, 8**-0.5, window))
    out = windowed(q, k, v, int32(0, 5, 12, 24))
    torch.testing.assert_close(out[5:, :1], dense(*(x[5:, :1] for x in (q, k, v)), 8**-0.5, window))
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=int32(0, 5, 12))
    packed = windowed(*(x[:, 0] for x in (q, k, v)), None, packed_seq_params=params)
    assert torch.equal(packed, out[:, 0])


def test_which_layers_have_a_window():
    def windows(size, frequency):
        return [layer_window(size, frequency, number) for number in range(1, 7)]

    assert windows(None, None) == [None] * 6
    assert windows((-1, 0), None) == [None] * 6
    assert windows((5, 0), None) == [5] * 6
    # Every third layer sees everything; or as the list says.
    assert windows((5, 0), 3) == [5, 5, None, 5, 5, None]
    assert windows((5, -1), [0, 1, 1, 0, 0, 1]) == [None, 5, 5, None, None, 5]
    skipping = config(num_layers=3, window_size=(5, 0), window_attn_skip_freq=2)
    assert [module(skipping, layer_number=n).window for n in (1, 2, 3)] == [5, None, 5]


def test_a_window_that_was_not_planned_is_named():
    plans = LayerPlans({("p2p", None): None}, ("p2p",))
    params = SimpleNamespace(qkv_format="thd", attention=plans)
    with pytest.raises(ConfigurationError, match="layer 3: wants attention by p2p with window 7"):
        module(config(num_layers=3, window_size=(7, 0)), layer_number=3)(
            *tensors(), None, packed_seq_params=params
        )


def test_scale():
    q, k, v = tensors()
    torch.testing.assert_close(module(softmax_scale=0.7)(q, k, v, None), dense(q, k, v, 0.7))
    layer_scaled = config(apply_query_key_layer_scaling=True)
    # Upstream divides the scores by the layer number and multiplies them in its fp32 softmax.
    torch.testing.assert_close(
        module(layer_scaled, layer_number=3)(q, k, v, None), dense(q, k, v, 8**-0.5)
    )


def test_value_width_may_differ():
    q, k, _ = tensors()
    v = torch.randn(12, 2, 4, 6)
    out = module(k_channels=8, v_channels=6)(q, k, v, None)
    torch.testing.assert_close(out, dense(q, k, v, 8**-0.5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_dropout": 0.1, "context_parallel_size": 2}, "--attention-dropout 0.1"),
        ({"window_size": (128, 4)}, "--window-size 128,4: must be"),
        (
            {"softmax_type": "learnable", "attention_dropout": 0.1},
            "--softmax-type learnable: .*set --attention-dropout 0",
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        module(config(**changes))


def test_context_parallelism_needs_a_plan():
    with pytest.raises(ValueError, match="no attention plan, which --context-parallel-size 2"):
        module(config(context_parallel_size=2))(*tensors(), None)


def test_other_masks_and_unknown_arguments_are_refused():
    with pytest.raises(ConfigurationError, match="only causal"):
        PackedCoreAttention(config(), 1, AttnMaskType.no_mask, "self")
    with pytest.raises(ConfigurationError, match="some_new_mode"):
        module(some_new_mode=True)
    module(some_new_mode=None)
    q, k, v = tensors()
    with pytest.raises(ValueError, match="never a mask matrix"):
        module()(q, k, v, torch.zeros(1, 1, 12, 12, dtype=torch.bool))
    with pytest.raises(ValueError, match="attention_bias"):
        module()(q, k, v, None, attention_bias=q)
    with pytest.raises(ValueError, match="only causal"):
        module()(q, k, v, None, attn_mask_type=AttnMaskType.no_mask)
