"""The adapter to MagiAttention, around a fake that asserts its call contract."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.packed.attention import magi
from megatron.packed.attention.core_attention import PackedCoreAttention
from megatron.packed.attention.kernels import tiles_reference
from megatron.packed.attention.magi import MagiEngine, MagiShape, chunk_of_share
from megatron.packed.attention.task_graph import Mask
from megatron.packed.context_parallel import build_context_parallel_helper
from megatron.packed.errors import ConfigurationError, TrainingError
from megatron.packed.packing import PackedBatch, PackPlan
from tests.unit.attention.fake_magi import API
from tests.unit.attention.fake_world import FakeGroup, World
from tests.unit.context_parallel.helper_cases import PACKED, config_of

HEADS, KV_HEADS = 4, 2
LENGTHS = [9, 0, 70, 1, 33, 128, 5]


def whole_pack(size: int, mtp_depths: int = 0, flags: str = "") -> PackedBatch:
    helper = build_context_parallel_helper(
        config_of(PACKED + "--attention-backend magi " + flags, size)
    )
    alignment = replace(helper.alignment, pack=16 * size)
    plan = PackPlan.from_documents(LENGTHS, 0, alignment=alignment)
    assert plan.total_tokens > sum(LENGTHS)  # there is a tail
    tokens = np.arange(1, 1 + sum(LENGTHS))
    return PackedBatch.from_plan(plan, tokens, mtp_depths=mtp_depths)


def engine(world: World, rank: int, api=API, **changes) -> MagiEngine:
    shape = MagiShape(HEADS, KV_HEADS, 8, world.size, **changes)
    return MagiEngine(shape, FakeGroup(world, rank), api)


def module(size: int, **changes) -> PackedCoreAttention:
    values = dict(num_layers=2, hidden_size=32, num_attention_heads=HEADS, attention_dropout=0.0)
    values |= dict(num_query_groups=KV_HEADS, context_parallel_size=size)
    return PackedCoreAttention(
        TransformerConfig(**{**values, **changes}), 1, AttnMaskType.causal, "self"
    )


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_gets_its_share_of_everything(size):
    world, whole = World(size), whole_pack(size, mtp_depths=2)
    shares = world.run(lambda rank: engine(world, rank).share(whole))
    index = torch.cat([s.packed_seq_params.attention.keys[None].mine for s in shares])
    assert sorted(index.tolist()) == list(range(whole.tokens.shape[1]))

    def joined(name: str) -> torch.Tensor:
        return torch.cat([getattr(share, name) for share in shares], dim=1)

    for name in ("tokens", "labels", "loss_mask", "position_ids", "valid_mask", "document_ids"):
        assert torch.equal(joined(name), getattr(whole, name)[:, index]), name
    for depth in range(2):
        parts = [share.mtp_labels[depth] for share in shares]
        assert torch.equal(torch.cat(parts, dim=1), whole.mtp_labels[depth][:, index])
        parts = [share.mtp_loss_masks[depth] for share in shares]
        assert torch.equal(torch.cat(parts, dim=1), whole.mtp_loss_masks[depth][:, index])
    for share in shares:
        params = share.packed_seq_params
        assert params.position_ids is share.position_ids
        assert params.valid_local_token_mask is share.valid_mask
        assert params.attention.cp_size == size
        assert np.array_equal(params.cu_seqlens_host, whole.packed_seq_params.cu_seqlens_host)
    assert whole.packed_seq_params.attention is None  # untouched


@pytest.mark.parametrize(("size", "window"), [(2, None), (3, None), (2, 5)])
def test_attention_through_the_fake_equals_dense(size, window):
    world, whole = World(size), whole_pack(size)
    total = whole.tokens.shape[1]
    tensors = [torch.randn(total, n, 8).double() for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    *inputs, grad = tensors
    leaves = [x.clone().requires_grad_() for x in inputs]
    settings = {} if window is None else {"window_size": (window, 0)}
    windows = (None,) if window is None else (window,)

    def work(rank: int):
        share = engine(world, rank, windows=windows).share(whole)
        attention = share.packed_seq_params.attention
        (key,) = attention.keys.values()
        local = (x[key.mine] for x in leaves)
        out = module(size, **settings)(*local, packed_seq_params=share.packed_seq_params)
        return key.mine, out, attention.gather(out)

    results = world.run(work)
    order = torch.cat([mine for mine, _, _ in results])
    outs = [out for _, out, _ in results]
    grads = torch.autograd.grad(
        outs, leaves, [grad.flatten(1)[mine] for mine, _, _ in results], retain_graph=True
    )
    reals = [x.clone().requires_grad_() for x in inputs]
    params = whole.packed_seq_params
    cu = params.cu_seqlens_host, params.cu_seqlens_padded_host
    dense = tiles_reference.packed_attention(*reals, *cu, Mask("causal", window), 8**-0.5)
    wanted = torch.autograd.grad(dense, reals, grad)
    torch.testing.assert_close(torch.cat(outs), dense.flatten(1)[order], rtol=0, atol=1e-12)
    for got, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    for _, _, gathered in results:
        torch.testing.assert_close(gathered, dense.flatten(1), rtol=0, atol=1e-12)
    # What every rank makes of the gathered rows is its part of one loss.
    (twice,) = torch.autograd.grad([g.sum() for *_, g in results], [outs[0]])
    assert torch.equal(twice, torch.full_like(outs[0], float(size)))


def test_layers_with_and_without_windows_share_one_layout():
    world, whole = World(2), whole_pack(2)
    share = world.run(lambda rank: engine(world, rank, windows=(7, None)).share(whole))[0]
    keys = share.packed_seq_params.attention.keys
    assert [key.window for key in keys.values()] == [7, None]
    assert keys[7].layout == keys[None].layout


def test_chunks_divide_shares():
    assert [chunk_of_share(share, None) for share in (4096, 100, 16, 7, 1)] == [256, 5, 1, 1, 1]
    assert chunk_of_share(4096, 64) == 64
    assert chunk_of_share(4096, 1000) == 256
    assert chunk_of_share(96, 4) == 4


def test_an_uneven_layout_and_another_version_are_named(monkeypatch):
    world, whole = World(1), whole_pack(2)
    uneven = replace(API, dispatch=lambda x, key, pad_value: x[:-1])
    with pytest.raises(TrainingError, match="magi_attention: gives"):
        engine(world, 0, uneven).share(whole)
    with pytest.raises(ConfigurationError, match="package magi_attention can't be used"):
        magi.load_api()
