"""The adapter to TransformerEngine's attention, around a fake that asserts its call contract."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.packed.attention.core_attention import RowSeqParams
from megatron.packed.attention.kernels import tiles_reference
from megatron.packed.attention.task_graph import Mask
from megatron.packed.attention.transformer_engine import (
    TransformerEngineCoreAttention,
    _boundaries,
)
from megatron.packed.errors import ConfigurationError
from tests.unit.attention import fake_transformer_engine
from tests.unit.attention.fake_world import FakeGroup, World
from tests.unit.context_parallel.helper_cases import cut

# Documents with odd lengths, one token, and all-padding second chunks.
LENGTHS = {
    "padded": [9, 8, 8, 12, 8, 12, 1, 331],
    "no padding": [16, 8, 24],
}
HEADS, KV_HEADS = 4, 2


@pytest.fixture
def engine(monkeypatch):
    """Install the fake in place of the package."""
    monkeypatch.setitem(sys.modules, "transformer_engine", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", fake_transformer_engine.MODULE)
    monkeypatch.setattr(
        dist, "get_process_group_ranks", lambda group: list(range(group.world.size))
    )


def attention(world: World, rank: int, *, exchanges=("p2p",), layer_number=1, v=None, **changes):
    values = dict(num_layers=2, hidden_size=32, num_attention_heads=HEADS, attention_dropout=0.0)
    values |= dict(num_query_groups=KV_HEADS, context_parallel_size=world.size)
    return TransformerEngineCoreAttention(
        TransformerConfig(**{**values, **changes}),
        layer_number=layer_number,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        cp_comm_type="p2p",
        pg_collection=SimpleNamespace(tp="tp", cp=FakeGroup(world, rank)),
        k_channels=None if v is None else 8,
        v_channels=v,
        exchanges=exchanges,
    )


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize(
    ("size", "exchange", "window", "v"),
    [
        (2, "p2p", None, None),
        (3, "p2p", None, None),
        (2, "all_gather", 5, None),
        (2, "a2a", 5, None),
        (4, "p2p", None, 6),
    ],
)
def test_packs_through_the_fake_equal_dense_attention(engine, size, exchange, window, v, lengths):
    batch = cut("ring", size, lengths)
    params = [share.packed_seq_params for share in batch.shares]
    index = [torch.from_numpy(batch.partition.indices(rank)) for rank in range(size)]
    generator = torch.Generator().manual_seed(1)
    shapes = ((HEADS, 8), (KV_HEADS, 8), (KV_HEADS, v or 8), (HEADS, v or 8))
    total = batch.partition.total_tokens
    *whole, grad = [
        torch.randn(total, *shape, generator=generator, dtype=torch.float64) for shape in shapes
    ]
    leaves = [[x[i].requires_grad_() for i in index] for x in whole]
    world = World(size)
    settings = {} if window is None else {"window_size": (window, 0)}

    def work(rank: int) -> torch.Tensor:
        module = attention(world, rank, exchanges=(exchange,), v=v, **settings)
        return module(*(x[rank] for x in leaves), None, packed_seq_params=params[rank])

    outs = world.run(work)
    flat = [x for parts in leaves for x in parts]
    grads = torch.autograd.grad(outs, flat, [grad[i].flatten(1) for i in index])
    reals = [x.clone().requires_grad_() for x in whole]
    cu = params[0].cu_seqlens_host, params[0].cu_seqlens_padded_host
    dense = tiles_reference.packed_attention(*reals, *cu, Mask("causal", window), 8**-0.5)
    wanted = torch.autograd.grad(dense, reals, grad)
    order = torch.cat(index)
    parts = [outs, *(grads[i * size : (i + 1) * size] for i in range(3))]
    for local, expected in zip(parts, (dense.flatten(1), *wanted), strict=True):
        torch.testing.assert_close(torch.cat(list(local)), expected[order], rtol=0, atol=1e-12)
    padding = ~torch.cat([p.valid_local_token_mask[0] for p in params])
    assert torch.count_nonzero(torch.cat(outs)[padding]) == 0


def test_rows_through_the_fake_equal_dense_attention(engine):
    batch = cut("rows", 2, [9, 20])
    index = [torch.from_numpy(batch.partition.indices(rank)) for rank in range(2)]
    total, rows = batch.partition.total_tokens, 2
    whole = [torch.randn(total, n, 8, dtype=torch.float64) for n in (HEADS, KV_HEADS, KV_HEADS)]
    world = World(2)

    def work(rank: int) -> torch.Tensor:
        local = (x[index[rank]].unflatten(0, (rows, -1)).transpose(0, 1) for x in whole)
        params = RowSeqParams("sbhd", attention=batch.shares[rank].attention)
        return attention(world, rank)(*local, None, packed_seq_params=params)

    edges = [0, total // 2, total]
    dense = tiles_reference.packed_attention(*whole, edges, edges, Mask(), 8**-0.5).flatten(1)
    for out, i in zip(world.run(work), index, strict=True):
        expected = dense[i].unflatten(0, (rows, -1)).transpose(0, 1)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def test_packs_share_kernels_by_their_rounded_longest_sequence():
    for size, expected in ((2, 384), (3, 384), (5, 640)):
        params = cut("ring", size if size < 5 else 4, LENGTHS["padded"]).shares[0].packed_seq_params
        told = _boundaries(params, size)
        assert told["max_seqlen_q"] == told["max_seqlen_kv"] == expected


def test_every_layer_has_its_own_exchange_and_window(engine):
    world = World(2)
    skipping = {"window_size": (5, 0), "window_attn_skip_freq": 2}
    exchanges = ("all_gather", "p2p")
    first = attention(world, 0, exchanges=exchanges, layer_number=1, **skipping)
    second = attention(world, 0, exchanges=exchanges, layer_number=2, **skipping)
    assert (first._attend.kind, first._attend.window) == ("all_gather", (5, 0))
    assert (second._attend.kind, second._attend.window) == ("p2p", None)
    with pytest.raises(ConfigurationError, match="no sliding window with --cp-comm-type p2p"):
        attention(world, 0, window_size=(5, 0))


def test_a_missing_package_and_what_it_lacks_are_named(engine, monkeypatch):
    world = World(2)
    with pytest.raises(ConfigurationError, match="--attention-dropout 0.1"):
        attention(world, 0, attention_dropout=0.1)
    with pytest.raises(ConfigurationError, match="--softmax-type off-by-one"):
        attention(world, 0, softmax_type="off-by-one")
    q = torch.zeros(4, HEADS, 8)
    with pytest.raises(ValueError, match="attention_bias, attention_mask"):
        attention(world, 0)(q, q, q, torch.zeros(1))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    with pytest.raises(ConfigurationError, match="package transformer_engine can't be imported"):
        attention(world, 0)
