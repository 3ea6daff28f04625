"""Tile kernels on any list of bands, areas in closed form, and merging where nothing is seen."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.packed.attention.kernels import tiles_cpu, tiles_portable
from megatron.packed.attention.kernels.merge import merge_
from megatron.packed.attention.plans import Step
from megatron.packed.attention.task_graph import (
    UNBOUNDED,
    Tiles,
    band_areas,
    is_full,
    join_full_tiles,
)
from megatron.packed.attention.tile_calls import tile_calls

ROWS, KEYS, HEADS, KV_HEADS, WIDTH, VALUE_WIDTH = 300, 400, 4, 2, 8, 5
SCALE = 0.4


def visible(band) -> np.ndarray:
    """Pairs of rows and keys `[ROWS, KEYS]` that a tile computes."""
    q, m, k, n, low, high = band
    distance = np.arange(m)[:, None] - np.arange(n)
    seen = np.zeros((ROWS, KEYS), dtype=bool)
    seen[q : q + m, k : k + n] = (distance >= low) & (distance <= high)
    return seen


@st.composite
def bands(draw) -> list[int]:
    """A band in which every row sees a key."""
    m, n = draw(st.integers(1, 200)), draw(st.integers(1, 300))
    kind = draw(st.sampled_from(["full", "causal", "bottom right", "window"]))
    low, high = -UNBOUNDED, UNBOUNDED
    if kind == "causal":
        low = 0
    elif kind == "bottom right":
        low = -draw(st.integers(0, n - 1))
    elif kind == "window":
        low = -draw(st.integers(0, n - 1))
        high = max(m - n, low) + draw(st.integers(0, 60))
    q, k = draw(st.integers(0, ROWS - m)), draw(st.integers(0, KEYS - n))
    return [q, m, k, n, low, high]


def apart(tiles) -> int:
    """How many leading tiles share no query row and no key row with each other."""
    rows, keys = np.zeros(ROWS, dtype=bool), np.zeros(KEYS, dtype=bool)
    for index, (q, m, k, n, *_) in enumerate(tiles):
        if rows[q : q + m].any() or keys[k : k + n].any():
            return index
        rows[q : q + m] = keys[k : k + n] = True
    return len(tiles)


def dense(tensors, seen: torch.Tensor):
    """Output and gradients of attention under a mask; rows that see nothing give zeros."""
    q, k, v, grad = (x.double() for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    groups = HEADS // KV_HEADS
    keys, values = (x.repeat_interleave(groups, dim=1) for x in leaves[1:])
    scores = torch.einsum("qhd,khd->hqk", leaves[0], keys) * SCALE
    scores = scores.masked_fill(~seen, -torch.inf)
    weights = torch.where(seen.any(dim=1)[:, None], scores, 0.0).softmax(dim=-1)
    weights = weights * seen
    out = torch.einsum("hqk,khd->qhd", weights, values)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def torch_path(monkeypatch):
    monkeypatch.setattr(tiles_cpu, "_native", lambda x: None)
    return tiles_cpu


KERNELS = {
    "compiled": (lambda patch: tiles_cpu, torch.float32, 2e-6),
    "torch": (torch_path, torch.float32, 2e-6),
    "torch fp64": (lambda patch: tiles_cpu, torch.float64, 1e-12),
    "portable": (lambda patch: tiles_portable, torch.float64, 1e-12),
}


@pytest.mark.parametrize("kernel", KERNELS)
@given(st.lists(bands(), min_size=1, max_size=4))
def test_any_tiles_in_any_order(kernel, tiles):
    chosen, dtype, limit = KERNELS[kernel]
    seen = np.zeros((ROWS, KEYS), dtype=int)
    kept = []
    for band in tiles:  # a pair belongs to one tile
        if not (seen[visible(band)] > 0).any():
            seen += visible(band)
            kept.append(band)
    fresh = apart(kept)
    step = Step(0, (), (), Tiles(np.array(kept), fresh=fresh))
    # Kernels have to start what they are the first to touch, whatever it holds.
    first = torch.zeros(ROWS, dtype=torch.bool)
    for q_start, q_count, *_ in kept[:fresh]:
        first[q_start : q_start + q_count] = True
    shapes = [(ROWS, HEADS, WIDTH), (KEYS, KV_HEADS, WIDTH), (KEYS, KV_HEADS, VALUE_WIDTH)]
    shapes.append((ROWS, HEADS, VALUE_WIDTH))
    generator = torch.Generator().manual_seed(len(kept))
    tensors = [torch.randn(s, generator=generator).to(dtype) for s in shapes]
    with pytest.MonkeyPatch.context() as patch:
        module = chosen(patch)
        q, k, v, grad = (module.prepare(x, WIDTH) for x in tensors)
        out, lse = q.new_zeros(shapes[3]), q.new_full((ROWS, HEADS), -torch.inf)
        out[first] = torch.nan
        module.forward(q, k, v, step, SCALE, out, lse)
        grads = [q.new_full(s, torch.nan) for s in shapes[:3]]
        grads[0][~first] = 0.0
        delta = torch.where(first[:, None], torch.nan, (tensors[3] * out).sum(dim=-1))
        result = module.prepare(out, WIDTH)
        module.backward(grad, q, k, v, result, lse, step, SCALE, delta, *grads)
        used = torch.zeros(KEYS, dtype=torch.bool)
        for _, _, k_start, k_count, *_ in kept:
            used[k_start : k_start + k_count] = True
        for each in grads[1:]:
            each[~used] = 0.0
    mask = torch.from_numpy(seen > 0)
    # A row that sees one key has dq = 0 by cancellation: errors are measured beside the upstream
    # gradient where it is the larger one.
    scale = tensors[3].double().norm()
    for got, want in zip([out, *grads], dense(tensors, mask), strict=True):
        assert (got.double() - want).norm() <= limit * torch.maximum(want.norm(), scale)
    assert torch.equal(torch.isinf(lse), ~mask.any(dim=1, keepdim=True).expand_as(lse))


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("low", [0, -37])
@pytest.mark.parametrize("high", [UNBOUNDED, 1500])
def test_a_tile_of_many_blocks(low, high, heads):
    """Longer than the rows that are worked on together: against the portable kernel in fp64."""
    rows, keys = 4250, 4300
    band = [0, rows, 0, keys, low, high]
    step = Step(0, (), (), Tiles(np.array([band]), fresh=1))
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, heads, 4), (keys, 1, 4), (keys, 1, 4), (rows, heads, 4)]
    tensors = [torch.randn(s, generator=generator) for s in shapes]
    results = []
    for kernel, dtype in ((tiles_cpu, torch.float32), (tiles_portable, torch.float64)):
        q, k, v, grad = (x.to(dtype) for x in tensors)
        out, lse = torch.full_like(q, torch.nan), q.new_full((rows, heads), -torch.inf)
        kernel.forward(q, k, v, step, SCALE, out, lse)
        grads = [torch.full_like(x, torch.nan) for x in (lse, q, k, v)]
        kernel.backward(grad, q, k, v, out, lse, step, SCALE, *grads)
        results.append([out, lse, *grads[1:]])
    for got, want in zip(*results, strict=True):
        assert (got.double() - want).norm() <= 2e-6 * want.norm()


def test_bits_do_not_depend_on_how_rows_are_shared_out():
    """Two threads take fewer rows at a time than one; key blocks begin where they did."""
    rows, keys, heads = 600, 1400, 4
    step = Step(0, (), (), Tiles(np.array([[0, rows, 0, keys, -700, 150]]), fresh=1))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, heads, 8, generator=generator) for n in (rows, keys, keys))
    results, before = [], torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        out, lse = torch.empty_like(q), q.new_full((rows, heads), -torch.inf)
        tiles_cpu.forward(q, k, v, step, SCALE, out, lse)
        results.append((out, lse))
    torch.set_num_threads(before)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


@given(bands(), st.integers(-400, 400), st.integers(0, 500))
def test_areas_are_exact(band, low, width):
    _, m, _, n, *_ = band
    for edges in (band[4:], (low, low + width)):
        distance = np.arange(m)[:, None] - np.arange(n)
        wanted = int(((distance >= edges[0]) & (distance <= edges[1])).sum())
        got = band_areas(*(np.array([x]) for x in (m, n, *edges)))
        assert got.tolist() == [wanted]
        full = is_full(np.array([[0, m, 0, n, *edges]]))
        assert full.tolist() == [wanted == m * n]


@given(st.lists(bands(), min_size=1, max_size=3), st.integers(1, 64))
def test_calls_cover_their_tiles_once(tiles, block_rows):
    wanted = sum(visible(band).astype(int) for band in tiles)
    got = np.zeros((ROWS, KEYS), dtype=int)
    for call in tile_calls(Tiles(np.array(tiles)), block_rows):
        for index in range(call.repeat):
            q, k = call.q_start + index * call.q_stride, call.k_start + index * call.k_stride
            part = visible([q, call.q_count, k, call.k_count, call.low, call.high])
            assert part[q : q + call.q_count].any(axis=1).all()
            got += part
    assert np.array_equal(got, wanted)


def test_windows_become_few_batched_calls():
    tile = Tiles(np.array([[0, 2048, 0, 2048, 0, 256]]))
    calls = tile_calls(tile, block_rows=128)
    assert len(calls) <= 4
    assert sum(call.repeat * call.q_count * call.k_count for call in calls) <= 2 * tile.area


def test_neighbours_join():
    def full(q, m, k, n):
        return [q, m, k, n, -UNBOUNDED, UNBOUNDED]

    tiles = np.array([full(0, 4, 0, 2), full(4, 4, 2, 6), full(0, 4, 2, 6), full(4, 4, 0, 2)])
    assert join_full_tiles(tiles).tolist() == [full(0, 8, 0, 8)]
    apart = np.array([full(0, 4, 0, 2), full(0, 4, 3, 2), full(5, 4, 0, 2)])
    assert len(join_full_tiles(apart)) == 3
    causal = np.array([[0, 4, 0, 4, 0, UNBOUNDED], full(0, 4, 4, 4)])
    assert len(join_full_tiles(causal)) == 2


def test_merging_with_nothing_changes_nothing():
    out, lse = torch.randn(3, 2), torch.tensor([0.5, -torch.inf, -torch.inf])
    out[1:] = 0
    more, more_lse = torch.randn(3, 2), torch.tensor([-torch.inf, 1.5, -torch.inf])
    more[0] = more[2] = 0
    merged, total = out.clone(), lse.clone()
    merge_(merged, total, more, more_lse)
    assert torch.equal(merged, torch.stack([out[0], more[1], torch.zeros(2)]))
    assert total.tolist() == [0.5, 1.5, -torch.inf]
