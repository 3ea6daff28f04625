"""Cross entropy over a vocabulary that is split over tensor-parallel ranks, lean in memory.

Only one number per row is kept for backward beside the logits, which backward turns into their own
gradient in place: no second `[tokens, vocabulary]` buffer exists at any time. Rows are worked on
in chunks that stay in cache.

Source: ``megatron/core/tensor_parallel/cross_entropy.py`` (0.16.1), which this replaces.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.packed.accelerator import cpu_ops

_CHUNK_BYTES_CPU = 1 << 20
_CHUNK_BYTES_DEVICE = 1 << 28


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    tp_group: dist.ProcessGroup | None = None,
    vocab_size_real: int | None = None,
    *,
    overwrite_logits: bool = True,
) -> Tensor:
    """Negative log-likelihood of every label.

    Columns from ``vocab_size_real`` on (padding of the vocabulary) take no part in the softmax and
    get zero gradient. A row whose incoming gradient is zero gets exactly zero gradient, whatever
    its logits hold, NaN included; so callers select supervised rows with `torch.where`.

    Args:
        logits: ``[S, B, V/tp]``, this rank's columns; fp64, fp32, bf16 or fp16.
        labels: ``[S, B]`` global ids, any integer dtype. At rows the caller leaves out, any value.
        tp_group: Ranks that share the vocabulary, or None for one.
        vocab_size_real: Number of real ids, or None if every column is one.
        overwrite_logits: Let backward write the gradient over the logits, which are then gone.
            Logits that are leaves, such as a parameter, are never overwritten; an operation that
            still needs the old values makes torch raise.

    Returns:
        ``[S, B]`` loss in fp32 (fp64 for fp64 logits), the same on every rank.

    Raises:
        ValueError: If shapes do not fit.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels {tuple(labels.shape)} do not fit logits {tuple(logits.shape)}: one id per row"
        )
    columns = _columns(logits.shape[-1], tp_group, vocab_size_real)
    return _CrossEntropy.apply(
        logits, labels, columns, tp_group, overwrite_logits and not logits.is_leaf
    )


@dataclass(frozen=True)
class _Columns:
    """This rank's share of the vocabulary: global id of its first column, and its real columns."""

    first: int
    real: int


def _columns(
    width: int, tp_group: dist.ProcessGroup | None, vocab_size_real: int | None
) -> _Columns:
    rank = tp_group.rank() if tp_group is not None else 0
    first = rank * width
    if vocab_size_real is None:
        return _Columns(first, width)
    return _Columns(first, min(max(vocab_size_real - first, 0), width))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, columns, tp_group, overwrite):
        rows = logits.reshape(-1, logits.shape[-1])
        lse = _log_sum_exp(rows, columns.real)
        index = labels.reshape(-1).long() - columns.first
        hit = (index >= 0) & (index < columns.real)
        index = index.clamp(0, max(columns.real - 1, 0)).unsqueeze(1)
        predicted = rows.gather(1, index).squeeze(1).to(lse.dtype)
        predicted = torch.where(hit, predicted, torch.zeros_like(predicted))
        if tp_group is not None and tp_group.size() > 1:
            lse, predicted = _combine(lse, predicted, tp_group)
        ctx.save_for_backward(logits, index, hit, lse)
        ctx.columns, ctx.overwrite = columns, overwrite
        return (lse - predicted).view(labels.shape)

    @staticmethod
    def backward(ctx, grad_loss):
        logits, index, hit, lse = ctx.saved_tensors
        rows = logits.reshape(-1, logits.shape[-1])
        real = ctx.columns.real
        grad = grad_loss.reshape(-1, 1).to(lse.dtype)
        out = rows if ctx.overwrite else torch.empty_like(rows)
        at_label = torch.where(hit.unsqueeze(1), -grad, torch.zeros_like(grad))
        native = cpu_ops.suitable(rows, out)
        if native is not None and rows.is_contiguous():
            label = torch.where(hit, index.squeeze(1), -1)
            grad = grad.contiguous()
            pointers = (x.data_ptr() for x in (rows, out, lse, grad, label))
            native.cross_entropy_backward(
                *pointers, rows.shape[0], real, rows.shape[1], cpu_ops.threads()
            )
            return out.view(logits.shape), None, None, None, None
        # Zero times NaN is NaN: rows without a gradient are set, not scaled. On an accelerator
        # the question whether there are any would cost a synchronisation.
        dead = grad == 0
        select = rows.device.type != "cpu" or bool(dead.any())
        for part in _chunks(rows):
            work = rows[part, :real].to(lse.dtype)
            target = work if work.data_ptr() == out[part].data_ptr() else None
            if target is None:
                work = torch.sub(work, lse[part].unsqueeze(1))
            else:
                work.sub_(lse[part].unsqueeze(1))
            work.exp_().mul_(grad[part])
            if real:
                work.scatter_add_(1, index[part], at_label[part])
            if select:
                work.masked_fill_(dead[part], 0)
            if target is None:
                out[part, :real] = work
        if real < rows.shape[1]:
            out[:, real:] = 0
        return out.view(logits.shape), None, None, None, None


def _chunks(rows: Tensor) -> list[slice]:
    """Row ranges whose fp32 copy stays in cache."""
    limit = _CHUNK_BYTES_CPU if rows.device.type == "cpu" else _CHUNK_BYTES_DEVICE
    step = max(1, limit // (4 * max(rows.shape[1], 1)))
    return [slice(i, i + step) for i in range(0, rows.shape[0], step)]


def _log_sum_exp(rows: Tensor, real: int) -> Tensor:
    """Log-sum-exp of the first ``real`` columns; ``[tokens]``, -inf where there are none."""
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    lse = torch.full((rows.shape[0],), float("-inf"), dtype=dtype, device=rows.device)
    if real == 0:
        return lse
    native = cpu_ops.suitable(rows)
    if native is not None and rows.stride(1) == 1:
        native.log_sum_exp(
            rows.data_ptr(), lse.data_ptr(), rows.shape[0], real, rows.stride(0), cpu_ops.threads()
        )
        return lse
    for part in _chunks(rows):
        chunk = rows[part, :real].to(dtype)
        # Clamped so that a row of -inf gives log(0) and not inf - inf.
        top = chunk.amax(dim=1, keepdim=True).clamp_(min=torch.finfo(dtype).min)
        lse[part] = torch.sub(chunk, top).exp_().sum(dim=1).log_().add_(top.squeeze(1))
    return lse


def _combine(lse: Tensor, predicted: Tensor, tp_group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Global log-sum-exp and label logit from every rank's share, in two small all-reduces."""
    top = lse.clone()
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=tp_group)
    both = torch.stack((torch.exp(lse - top), predicted))
    dist.all_reduce(both, group=tp_group)
    return both[0].log() + top, both[1]
