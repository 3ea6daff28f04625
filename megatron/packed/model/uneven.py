"""Gather and reduce-scatter of unequal parts, which gloo lacks, through all-to-all, which it has.

Ranks that share an expert's weights gather each other's tokens, as many as each has.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    _gather_along_first_dim as upstream_gather,
)
from megatron.core.tensor_parallel.mappings import (
    _reduce_scatter_along_first_dim as upstream_reduce_scatter,
)
from torch import Tensor


def gather_along_first_dim(
    input_: Tensor,
    group: dist.ProcessGroup,
    output_split_sizes: list[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """All ranks' rows, in order of rank; takes the place of megatron-core's function.

    Args:
        input_: [rows, ...], this rank's.
        group: ranks to gather from.
        output_split_sizes: rows of each rank; None for equally many.
        use_global_buffer: as upstream's.
    """
    if output_split_sizes is None or group.size() == 1 or input_.is_cuda:
        return upstream_gather(input_, group, output_split_sizes, use_global_buffer)
    size = group.size()
    output = input_.new_empty(sum(output_split_sizes), *input_.shape[1:])
    everyone = input_.repeat(size, *(1 for _ in input_.shape[1:]))
    dist.all_to_all_single(output, everyone, output_split_sizes, [len(input_)] * size, group=group)
    return output


def reduce_scatter_along_first_dim(
    input_: Tensor,
    group: dist.ProcessGroup,
    input_split_sizes: list[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """This rank's rows of the sum over ranks; takes the place of megatron-core's function.

    Args:
        input_: [rows of all ranks, ...].
        group: ranks to add over.
        input_split_sizes: rows of each rank; None for equally many.
        use_global_buffer: as upstream's.
    """
    if input_split_sizes is None or group.size() == 1 or input_.is_cuda:
        return upstream_reduce_scatter(input_, group, input_split_sizes, use_global_buffer)
    size, mine = group.size(), input_split_sizes[group.rank()]
    parts = input_.new_empty(size * mine, *input_.shape[1:])
    dist.all_to_all_single(
        parts, input_.contiguous(), [mine] * size, input_split_sizes, group=group
    )
    return torch.sum(parts.view(size, mine, *input_.shape[1:]), dim=0)
