"""Cross entropy against torch's own in fp64, on one rank and on two."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

from megatron.packed.accelerator import cpu_ops
from megatron.packed.loss import cross_entropy
from megatron.packed.loss.cross_entropy import vocab_parallel_cross_entropy

SEQUENCE, BATCH, VOCABULARY, REAL = 7, 3, 40, 37


@pytest.fixture(autouse=True, params=["native", "torch"])
def _implementation(request, monkeypatch):
    """Run each test with and without the extension; three rows a chunk, to cross chunk borders."""
    monkeypatch.setattr(cross_entropy, "_CHUNK_BYTES_CPU", 3 * 4 * VOCABULARY)
    if request.param == "torch":
        monkeypatch.setattr(cpu_ops, "load", lambda: None)
    elif cpu_ops.load() is None:
        pytest.skip("the extension megatron.packed._cpu_ops is not built")


def problem(dtype=torch.float64, real=REAL):
    logits = torch.randn(SEQUENCE, BATCH, VOCABULARY, dtype=torch.float64).mul(5).to(dtype)
    labels = torch.randint(0, real, (SEQUENCE, BATCH))
    grad = torch.rand(SEQUENCE, BATCH, dtype=torch.float64)
    grad[2:4] = 0
    return logits, labels, grad


def wanted(logits, labels, grad, real=REAL):
    """Loss and logit gradient by torch in fp64 over the real columns."""
    leaf = logits.double().requires_grad_()
    loss = F.cross_entropy(
        leaf[..., :real].reshape(-1, real), labels.flatten(), reduction="none"
    ).view(labels.shape)
    return loss.detach(), torch.autograd.grad(loss, leaf, grad)[0]


def ours(logits, labels, grad, real=REAL, **options):
    leaf = logits.clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(leaf * 1, labels, None, real, **options)
    return loss, torch.autograd.grad(loss, leaf, grad.to(loss.dtype))[0]


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize(
    ("dtype", "loss_limit", "grad_limit"),
    [
        (torch.float64, 1e-12, 1e-12),
        (torch.float32, 2e-6, 2e-6),
        (torch.bfloat16, 2e-6, 4e-3),
        (torch.float16, 2e-6, 5e-4),
    ],
    ids=str,
)
@pytest.mark.parametrize("real", [REAL, VOCABULARY])
def test_matches_torch(dtype, loss_limit, grad_limit, real, overwrite):
    logits, labels, grad = problem(dtype, real)
    loss, gradient = ours(logits, labels, grad, real, overwrite_logits=overwrite)
    loss_wanted, gradient_wanted = wanted(logits, labels, grad, real)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert gradient.dtype == dtype
    assert (loss - loss_wanted).norm() <= loss_limit * loss_wanted.norm()
    assert (gradient - gradient_wanted).norm() <= grad_limit * gradient_wanted.norm()
    assert torch.count_nonzero(gradient[..., real:]) == 0
    assert torch.count_nonzero(gradient[2:4]) == 0


def test_none_means_every_column():
    logits, labels, grad = problem()
    pairs = zip(
        ours(logits, labels, grad, None), ours(logits, labels, grad, VOCABULARY), strict=True
    )
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_garbage_in_unsupervised_rows_and_padded_columns_is_inert(dtype):
    logits, labels, grad = problem(dtype)
    clean_loss, clean = ours(logits, labels, grad)
    logits[2], logits[3] = float("nan"), float("inf")
    logits[..., REAL:] = float("nan")
    labels[2:4] = -100
    loss, gradient = ours(logits, labels, grad)
    assert torch.equal(gradient, clean)
    assert torch.equal(loss[[0, 1, 4, 5, 6]], clean_loss[[0, 1, 4, 5, 6]])


def test_large_logits_do_not_overflow():
    logits, labels, grad = problem(torch.float32)
    loss, gradient = ours(logits + 3e4, labels, grad)
    assert torch.isfinite(loss).all()
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_leaf_is_never_overwritten(dtype):
    logits, labels, grad = problem(dtype)
    leaf = logits.clone().requires_grad_()
    vocab_parallel_cross_entropy(leaf, labels, None, REAL).backward(grad)
    assert torch.equal(leaf, logits)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_backward_needs_no_second_buffer(dtype):
    logits, labels, grad = problem(dtype)
    output = logits.requires_grad_() * 1
    buffers = []
    output.register_hook(lambda gradient: buffers.append(gradient.data_ptr()))
    vocab_parallel_cross_entropy(output, labels, None, REAL).backward(grad)
    assert buffers == [output.data_ptr()]


def test_an_operation_that_still_needs_the_logits_makes_torch_raise():
    logits, labels, grad = problem()
    output = logits.requires_grad_() * 1
    loss = vocab_parallel_cross_entropy(output, labels, None, REAL)
    other = output.square().sum()
    loss.backward(grad, retain_graph=True)
    for again in (other, loss.sum()):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            again.backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_logits_that_are_a_transposed_view(dtype):
    logits, labels, grad = problem(dtype)
    _, plain = ours(logits, labels, grad)
    leaf = logits.transpose(0, 1).contiguous().requires_grad_()
    loss = vocab_parallel_cross_entropy(leaf.transpose(0, 1), labels, None, REAL)
    assert torch.equal(torch.autograd.grad(loss, leaf, grad)[0].transpose(0, 1), plain)


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"labels \(3, 7\)"):
        vocab_parallel_cross_entropy(torch.zeros(7, 3, 5), torch.zeros(3, 7, dtype=torch.long))


SPLITS = {"padding on the last rank": REAL, "a rank of padding": 20, "most is padding": 11}


def _two_ranks(rank: int, address: str, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{address}", rank=rank, world_size=2)
    half = VOCABULARY // 2
    results = {}
    for name, real in SPLITS.items():
        for dtype in (torch.float64, torch.float32):
            torch.manual_seed(0)
            logits, labels, grad = problem(dtype, real)
            shard = logits[..., rank * half : (rank + 1) * half].clone().requires_grad_()
            loss = vocab_parallel_cross_entropy(shard * 1, labels, dist.group.WORLD, real)
            (gradient,) = torch.autograd.grad(loss, shard, grad.to(loss.dtype))
            results[name, dtype] = loss.detach(), gradient
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_equal_one(tmp_path, request):
    if "torch" in request.node.callspec.id:
        pytest.skip("the ranks run both: fp64 on torch, fp32 on the extension")
    mp.spawn(_two_ranks, args=(str(tmp_path / "store"), str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for (name, dtype), (loss, gradient) in first.items():
        other_loss, other_gradient = second[name, dtype]
        torch.manual_seed(0)
        logits, labels, grad = problem(dtype, SPLITS[name])
        loss_wanted, gradient_wanted = wanted(logits, labels, grad, SPLITS[name])
        limit = 1e-12 if dtype == torch.float64 else 2e-6
        assert torch.equal(loss, other_loss)
        assert (loss - loss_wanted).norm() <= limit * loss_wanted.norm()
        error = torch.cat((gradient, other_gradient), dim=-1) - gradient_wanted
        assert error.norm() <= limit * gradient_wanted.norm()
