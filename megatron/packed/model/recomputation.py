"""Recomputing parts of a layer, where megatron-core stumbles over its own defaults and outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import random as upstream
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.tensor_parallel.random import checkpoint as upstream_checkpoint
from torch import Tensor
from torch.nn import Parameter

# Of the generation whose `compat.compiles_recomputation` it is.
_upstream_sharing = vars(upstream).get("_get_share_storage")


class PlainCheckpointWithoutOutput(CheckpointWithoutOutput):
    """megatron-core's, which takes its own default `fp8=False` for fp8 and asks TransformerEngine.

    Args:
        fp8: the fp8 format, if any; None and False are none.
    """

    def __init__(self, fp8: Any = None) -> None:
        super().__init__(fp8 or None)


def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
    """megatron-core's checkpoint, for functions that hand a parameter on.

    A layer returns the bias of its last projection, to be added with the residual. As the output
    of an autograd function the parameter itself would get that function as its history, whose
    backward pass then runs into itself. A view of it doesn't.

    Args:
        function: what is run now, and again in the backward pass.
        distribute_saved_activations: keep a share of the saved input on each rank.
        *args: its inputs.
    """

    def run(*inputs: Any) -> Any:
        outputs = function(*inputs)
        return tuple(map(_not_itself, outputs)) if isinstance(outputs, tuple) else outputs

    return upstream_checkpoint(run, distribute_saved_activations, *args)


def _not_itself(x: Any) -> Any:
    return x.view_as(x) if isinstance(x, Parameter) else x


def recomputed_storage() -> Callable[[Tensor, Tensor], None]:
    """How a recomputed output takes the place of the dropped one; stands in for megatron-core's.

    Returns:
        A function of the dropped output and the recomputed one. On a CPU it copies values, as
        0.16 does everywhere.
    """

    def share(dropped: Tensor, recomputed: Tensor) -> None:
        if dropped.is_cuda:
            assert _upstream_sharing is not None
            _upstream_sharing()(dropped, recomputed)
            return
        with torch.no_grad():
            storage, source = dropped.untyped_storage(), recomputed.untyped_storage()
            storage.resize_(source.size())
            storage.copy_(source)

    return share
