"""Position-indexed rotary embedding against megatron-core's functions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from megatron.packed.model.rotary import PositionIndexedRotaryEmbedding, apply_rotary_pos_emb

WIDTH = 32
VARIANTS = {
    "plain": {},
    "interleaved": {"rotary_interleaved": True},
    "part": {"rotary_percent": 0.5},
    "part_interleaved": {"rotary_percent": 0.5, "rotary_interleaved": True},
    "interpolated": {"seq_len_interpolation_factor": 4.0},
    "base": {"rotary_base": 500000},
    "llama3": {"rope_scaling": True, "rope_scaling_factor": 8.0},
}


def embedding(kind, **options):
    arguments = {"kv_channels": WIDTH, "rotary_percent": 1.0, "use_cpu_initialization": True}
    return kind(**{**arguments, **options})


def angles_upstream(positions: torch.Tensor, **options) -> torch.Tensor:
    """Upstream's angles at any positions, `[S, B, 1, r]`."""
    module = embedding(RotaryEmbedding, **options)
    freqs = module.get_freqs_non_repeated(int(positions.max()) + 1)[positions.t()]
    if options.get("rotary_interleaved"):
        return freqs.repeat_interleave(2, dim=-1).unsqueeze(2)
    return torch.cat((freqs, freqs), dim=-1).unsqueeze(2)


def settings(interleaved=False):
    return SimpleNamespace(
        rotary_interleaved=interleaved, multi_latent_attention=False, apply_rope_fusion=False
    )


def at(positions, **options):
    module = embedding(PositionIndexedRotaryEmbedding, **options)
    with module.positions(positions):
        return module(module.get_rotary_seq_len(None, None, None, None, None), packed_seq=True)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-7), (torch.float32, 2e-6), (torch.bfloat16, 4e-3)]
)
def test_equals_upstream_at_any_positions(options, dtype, limit, implementation):
    positions = torch.randint(0, 5000, (3, 11))
    interleaved = options.get("rotary_interleaved", False)
    t = torch.randn(11, 3, 4, WIDTH).to(dtype).requires_grad_()
    got = apply_rotary_pos_emb(t, at(positions, **options), settings(interleaved))
    want = rope_utils._apply_rotary_pos_emb_bshd(
        t, angles_upstream(positions, **options), rotary_interleaved=interleaved
    )
    assert got.dtype == dtype
    assert got.is_contiguous()
    grad = torch.randn_like(got)
    pairs = [(got, want)]
    pairs.append(tuple(torch.autograd.grad(x, t, grad)[0] for x in (got, want)))
    for a, b in pairs:
        assert (a - b).norm() <= limit * b.norm()


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_pack_equals_upstream_packed(options, implementation):
    lengths = [5, 1, 7]
    cu_seqlens = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    interleaved = options.get("rotary_interleaved", False)
    t = torch.randn(13, 4, WIDTH)
    got = apply_rotary_pos_emb(t, at(positions, **options), settings(interleaved), cu_seqlens)
    want = rope_utils._apply_rotary_pos_emb_thd(
        t,
        cu_seqlens,
        angles_upstream(torch.arange(8).unsqueeze(0), **options),
        rotary_interleaved=interleaved,
        cp_group=SimpleNamespace(size=lambda: 1, rank=lambda: 0),
    )
    assert (got - want).norm() <= 2e-6 * want.norm()


def test_one_row_of_positions_serves_all_rows(implementation):
    positions = torch.arange(9)
    t = torch.randn(9, 3, 4, WIDTH)
    shared = apply_rotary_pos_emb(t, at(positions.unsqueeze(0)), settings())
    each = apply_rotary_pos_emb(t, at(positions.repeat(3, 1)), settings())
    assert torch.equal(shared, each)


def test_views_of_a_projection(implementation):
    freqs = at(torch.randint(0, 99, (2, 6)))
    mixed = torch.randn(6, 2, 4, 3 * WIDTH)
    for view in (mixed.split(WIDTH, dim=3)[1], mixed[..., : 2 * WIDTH : 2]):
        got = apply_rotary_pos_emb(view, freqs, settings())
        assert torch.equal(got, apply_rotary_pos_emb(view.contiguous(), freqs, settings()))
    pack = at(torch.randint(0, 99, (1, 6)))
    view = mixed[:, 0].split(WIDTH, dim=2)[2]
    got = apply_rotary_pos_emb(view, pack, settings())
    assert torch.equal(got, apply_rotary_pos_emb(view.contiguous(), pack, settings()))


def test_scores_depend_on_distance_alone(implementation):
    q, k = (x.expand(8, 1, 1, WIDTH) for x in torch.randn(2, 1, 1, 1, WIDTH))
    near, far = at(torch.arange(8).unsqueeze(0)), at(1000 + torch.arange(8).unsqueeze(0))
    scores = [
        apply_rotary_pos_emb(q, freqs, settings())[5, 0, 0]
        @ apply_rotary_pos_emb(k, freqs, settings())[2, 0, 0]
        for freqs in (near, far)
    ]
    torch.testing.assert_close(*scores, rtol=1e-3, atol=1e-3)


def test_gradient_is_exact(implementation):
    freqs = at(torch.randint(0, 9, (1, 4)))
    t = torch.randn(4, 2, WIDTH, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: apply_rotary_pos_emb(x, freqs, settings()), (t,))


def test_mscale_scales(implementation):
    freqs, t = at(torch.arange(4).unsqueeze(0)), torch.randn(4, 2, WIDTH)
    got = apply_rotary_pos_emb(t, freqs, settings(), mscale=1.5)
    torch.testing.assert_close(got, 1.5 * apply_rotary_pos_emb(t, freqs, settings()))


def test_upstream_layout_goes_to_upstream():
    t = torch.randn(4, 2, 3, WIDTH)
    freqs = angles_upstream(torch.arange(4).unsqueeze(0))
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    got = apply_rotary_pos_emb(t, freqs, settings(), cp_group=group)
    assert torch.equal(got, rope_utils._apply_rotary_pos_emb_bshd(t, freqs))


def test_survives_activation_recomputation():
    module = embedding(PositionIndexedRotaryEmbedding)
    with module.positions(torch.randint(0, 99, (2, 6))):
        freqs = module()
    assert type(freqs) is torch.Tensor
    t = torch.randn(6, 2, 4, WIDTH, requires_grad=True)

    def layer(x, f):
        return apply_rotary_pos_emb(x, f, settings())

    grad = torch.randn_like(t)
    (plain,) = torch.autograd.grad(layer(t, freqs), t, grad)
    torch.utils.checkpoint.checkpoint(layer, t, freqs, use_reentrant=True).backward(grad)
    assert torch.equal(t.grad, plain)


def test_positions_are_scoped():
    module = embedding(PositionIndexedRotaryEmbedding)
    with pytest.raises(RuntimeError, match="without position ids"):
        module(4)
    with module.positions(torch.zeros(1, 3, dtype=torch.long)):
        with module.positions(torch.zeros(1, 5, dtype=torch.long)):
            assert module(0).shape == (5, 1, 2, WIDTH // 2)
        assert module(0).shape == (3, 1, 2, WIDTH // 2)
    with pytest.raises(RuntimeError, match="without position ids"):
        module(4)
    with pytest.raises(ValueError, match=r"\[rows, tokens\]"), module.positions(torch.zeros(3)):
        pass


def test_wrong_number_of_positions_is_named():
    freqs = at(torch.arange(5).unsqueeze(0))
    for t in (torch.zeros(4, 2, WIDTH), torch.zeros(4, 3, 2, WIDTH), torch.zeros(5, 2, 16)):
        with pytest.raises(ValueError, match="does not fit queries or keys"):
            apply_rotary_pos_emb(t, freqs, settings())
