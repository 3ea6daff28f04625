"""Copies and sums of runs of rows between tensors `[rows, heads, width]` of any strides."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.packed.accelerator import cpu_ops
from megatron.packed.attention.row_runs import Int64, RowRuns

# Average rows of a run from which on torch copies run by run; below it, an index is faster.
LONG_RUN = 32


def copy_rows(target: Tensor, source: Tensor, runs: RowRuns) -> None:
    """Write some rows of a tensor to another.

    Args:
        target: `[rows, heads, width]`, changed in place.
        source: `[rows, heads, width]` of the same dtype.
        runs: which rows.
    """
    _put(target, source, runs, add=False)


def add_rows(target: Tensor, source: Tensor, runs: RowRuns) -> None:
    """Add some rows of a tensor to those of another; arguments as those of `copy_rows`."""
    _put(target, source, runs, add=True)


def laid_out(memory: Tensor, rows: int, heads: int, width: int, start: int = 0) -> Tensor:
    """`[rows, heads, width]` in memory, as kernels of the device read and write fastest.

    On a CPU the rows of a head lie side by side: elsewhere kernels have to gather them, since
    products of rows that lie apart are slow. On a GPU the heads of a row do.

    Args:
        memory: contiguous.
        rows, heads, width: the shape.
        start: values of `memory` before the first one.
    """
    on_cpu = memory.device.type == "cpu"
    strides = (width, rows * width, 1) if on_cpu else (heads * width, width, 1)
    return memory.as_strided((rows, heads, width), strides, memory.storage_offset() + start)


def laid_out_parts(message: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """What a message `[rows, columns]` holds, one after the other: `[rows, heads, width]` each."""
    rows = message.shape[0]
    parts, start = [], 0
    for heads, width in shapes:
        parts.append(laid_out(message, rows, heads, width, start))
        start += rows * heads * width
    return parts


def split_columns(buffer: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Views `[rows, heads, d]` of columns that lie side by side in `[rows, ...]`."""
    widths = [heads * width for heads, width in shapes]
    return [
        part.unflatten(1, shape)
        for part, shape in zip(buffer.split(widths, dim=1), shapes, strict=True)
    ]


def new_rows(
    like: Tensor,
    width: int,
    dtype: torch.dtype,
    padding: Int64 | None = None,
    together: bool = False,
) -> Tensor:
    """New rows with the heads and on the device of others, laid out for kernels.

    Args:
        like: `[rows, heads, any]`.
        width: of the new ones.
        dtype: theirs.
        padding: int64, rows that become zeros; others hold anything.
        together: whether to lay the heads of a row side by side all the same, for others to read.

    Returns:
        `[rows, heads, width]`.
    """
    rows, heads = like.shape[:2]
    is_padded, on_cpu = padding is not None and len(padding) > 0, like.device.type == "cpu"
    # Where clearing is cheap, all of it: an index would have to travel.
    make = like.new_zeros if is_padded and not on_cpu else like.new_empty
    memory = make(rows * heads * width, dtype=dtype)
    made = memory.view(rows, heads, width) if together else laid_out(memory, rows, heads, width)
    if is_padded and on_cpu:
        made.index_fill_(0, torch.from_numpy(padding), 0.0)
    return made


def _put(target: Tensor, source: Tensor, runs: RowRuns, add: bool) -> None:
    if _put_natively(target, source, runs, add):
        return
    put = Tensor.add_ if add else Tensor.copy_
    if _is_long(target, runs):
        for to, start, count in runs.table.tolist():
            put(target.narrow(0, to, count), source.narrow(0, start, count))
        return
    rows = _selected(source, runs)
    if runs.fills_target:
        put(target.narrow(0, 0, runs.rows), rows)
        return
    put_at = Tensor.index_add_ if add else Tensor.index_copy_
    put_at(target, 0, _on(target, runs.index[0]), rows)


def _is_long(x: Tensor, runs: RowRuns) -> bool:
    """Whether torch does better run by run."""
    count = len(runs.table)
    return count < 2 or (x.device.type == "cpu" and runs.rows >= LONG_RUN * count)


def _selected(source: Tensor, runs: RowRuns) -> Tensor:
    """The rows that runs take, in their order. An index is sent to the device only if it must."""
    if runs.inverse.fills_target:
        return source.narrow(0, 0, runs.rows)
    return source.index_select(0, _on(source, runs.index[1]))


def _on(x: Tensor, index: Int64) -> Tensor:
    return torch.from_numpy(index).to(x.device)


def _put_natively(target: Tensor, source: Tensor, runs: RowRuns, add: bool) -> bool:
    native = cpu_ops.suitable(target, source)
    if native is None or target.stride(2) != 1 or source.stride(2) != 1:
        return False
    table = runs.table
    native.put_rows(
        add,
        (target.data_ptr(), *target.stride()[:2]),
        (source.data_ptr(), *source.stride()[:2]),
        table.ctypes.data,
        len(table),
        *target.shape[1:],
        cpu_ops.threads(),
    )
    return True
