"""Consumers of a chunk read this chunk's fields: attention, positions and loss of every chunk are
slices of the whole micro-batch's, although the chunk also carries whole-batch counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.packed.attention.core_attention import PackedCoreAttention
from megatron.packed.loss.token import token_loss
from megatron.packed.model.rotary import PositionIndexedRotaryEmbedding
from megatron.packed.packing import PackedBatch, build_pack_plan

EOD = 9
HEADS, WIDTH = 2, 8


def _attention() -> PackedCoreAttention:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * WIDTH,
        num_attention_heads=HEADS,
        attention_dropout=0.0,
    )
    return PackedCoreAttention(config, 1, AttnMaskType.causal)


def _plan(alignment: int):
    rng = np.random.default_rng(5)
    rows = rng.integers(0, EOD, (2, 25))
    rows[:, [3, 4, 11, 19]] = EOD
    plan = build_pack_plan(rows[:, :-1], EOD, -1, extra_token=rows[:, -1], alignment=alignment)
    return plan, rows


@pytest.mark.parametrize("alignment", [1, 8])
@pytest.mark.parametrize("num_chunks", [2, 3])
def test_attention_of_a_chunk_is_a_slice_of_the_whole(alignment: int, num_chunks: int) -> None:
    plan, rows = _plan(alignment)
    whole = PackedBatch.from_plan(plan, rows)
    q, k, v = torch.randn(3, plan.total_tokens, HEADS, WIDTH, dtype=torch.float64)
    module = _attention()
    expected = module(q, k, v, packed_seq_params=whole.packed_seq_params)
    begin = 0
    for chunk in whole.packed_seq_params.chunk(num_chunks):
        end = begin + chunk.chunk_total_tokens
        out = module(q[begin:end], k[begin:end], v[begin:end], packed_seq_params=chunk)
        torch.testing.assert_close(out, expected[begin:end], rtol=0, atol=1e-12)
        begin = end
    assert begin == plan.total_tokens
    # Boundaries of the whole batch don't fit the tokens of a chunk: an error, never a guess.
    first = whole.packed_seq_params.chunk(num_chunks)[0].chunk_total_tokens
    with pytest.raises(ValueError):
        module(q[:first], k[:first], v[:first], packed_seq_params=whole.packed_seq_params)


@pytest.mark.parametrize("alignment", [1, 8])
def test_positions_and_losses_of_chunks_add_up(alignment: int) -> None:
    plan, rows = _plan(alignment)
    whole = PackedBatch.from_plan(plan, rows)
    losses = torch.rand(1, plan.total_tokens)
    rotary = PositionIndexedRotaryEmbedding(WIDTH, 1.0, use_cpu_initialization=True)
    with rotary.positions(whole.position_ids):
        angles = rotary()
    expected = token_loss(losses, whole.loss_mask)
    totals = []
    begin = 0
    for index, part in enumerate(plan.chunk(3)):
        batch = PackedBatch.from_plan(part, rows, chunk_index=index, num_chunks=3)
        end = begin + part.total_tokens
        with rotary.positions(batch.packed_seq_params.position_ids):
            assert torch.equal(rotary(), angles[begin:end])
        totals.append(token_loss(losses[:, begin:end], batch.loss_mask))
        begin = end
    assert sum(int(each.count) for each in totals) == int(expected.count)
    total = sum(each.total for each in totals)
    torch.testing.assert_close(total, expected.total)
