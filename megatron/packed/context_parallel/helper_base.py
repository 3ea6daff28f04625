"""What every context-parallel helper does: cut tensors into ranks' shares and put them together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron.packed.attention.plans import LayerPlans, PlanKey, build_attention_plan
from megatron.packed.context_parallel.capabilities import (
    CAPABILITIES,
    Capability,
    Selection,
    unsupported,
)
from megatron.packed.errors import ConfigurationError
from megatron.packed.packing.alignment import Alignment
from megatron.packed.packing.partition import Partition

BatchHook = Callable[[Any], Any]
"""Gets a batch that was cut; returns what takes its place, or None to leave it."""


@dataclass(frozen=True)
class HelperSettings:
    """What a helper needs to know of a run; plain numbers, no process group.

    Attributes:
        selection: helper, exchanges and partition.
        cp_size: context-parallel ranks.
        cp_rank: this one.
        tp_size: tensor-parallel ranks.
        sequence_parallel: they share the tokens between their regions.
        hierarchical_sizes: for a2a+p2p, ranks of a group that shares heads, and groups.
        chunk_size: for dispatch, tokens of the largest chunk, dealt as MagiAttention does; None for
            16 or more chunks a rank that keep documents together.
        alignment_mode: `--packing-alignment`.
        layer_windows: sliding window of every layer, or of all of them; None for a layer that
            sees everything.
        quantisation: of matrix products, which then take tokens in multiples: None, "fp8" or
            "mxfp8".
    """

    selection: Selection
    cp_size: int = 1
    cp_rank: int = 0
    tp_size: int = 1
    sequence_parallel: bool = False
    hierarchical_sizes: tuple[int, ...] | None = None
    chunk_size: int | None = None
    alignment_mode: str = "default"
    layer_windows: tuple[int | None, ...] = (None,)
    quantisation: str | None = None

    @property
    def attention_kinds(self) -> tuple[PlanKey, ...]:
        """Exchange and window of every layer, each pair once, in order of first use."""
        kinds, windows = self.selection.communications, self.layer_windows
        layers = max(len(kinds), len(windows))
        every_kind = kinds if len(kinds) > 1 else kinds * layers
        every_window = windows if len(windows) > 1 else windows * layers
        return tuple(dict.fromkeys(zip(every_kind, every_window, strict=True)))

    @property
    def alignment(self) -> Alignment:
        """Multiples that segments and packs are padded to."""
        partition = self.selection.partition or "contiguous"
        chunks = self.chunk_size if partition == "dispatch" and self.cp_size > 1 else None
        return Alignment.for_layout(
            partition=partition,
            cp_size=self.cp_size,
            tp_size=self.tp_size,
            sequence_parallel=self.sequence_parallel,
            quantisation=self.quantisation,
            mode=self.alignment_mode,
            chunk_size=chunks or 1,
        )


class ContextParallelHelperBase(ABC):
    """One rank's view of how a micro-batch is spread over context-parallel ranks.

    A helper is host code: it can be built, tested and sent to data-loader workers without a
    process group. `pack` makes this rank's share of a micro-batch, with the plan of its
    attention; the other methods cut any tensor the same way, and put it together again.

    Args:
        settings: the layout.

    Raises:
        ConfigurationError: for an exchange that this helper lacks.
    """

    name: ClassVar[str]

    def __init__(self, settings: HelperSettings) -> None:
        self.settings = settings
        able = settings.selection.capability
        if able.helper != self.name:
            raise ConfigurationError(f"{self.name}: the flags choose {able.helper}")
        if settings.cp_size > 1:
            for problem in unsupported(settings.selection):
                raise ConfigurationError(problem)
        self._hooks: list[BatchHook] = []

    def uncut(self) -> Self:
        """A helper of this kind for packs that an external engine cuts: it leaves them whole."""
        return type(self)(replace(self.settings, cp_size=1, cp_rank=0))

    @property
    def capability(self) -> Capability:
        """What this helper supports."""
        return next(each for each in CAPABILITIES if each.helper == self.name)

    @property
    def cp_size(self) -> int:
        """Context-parallel ranks."""
        return self.settings.cp_size

    @property
    def cp_rank(self) -> int:
        """This context-parallel rank."""
        return self.settings.cp_rank

    @property
    def alignment(self) -> Alignment:
        """Multiples that segments and packs are padded to."""
        return self.settings.alignment

    @abstractmethod
    def slice(self, tensors: Any, partition: Partition | None) -> Any:
        """This rank's share of a tensor in the helper's layout, or of each one of a mapping."""

    def get_slice_index(self, partition: Partition | None) -> NDArray[np.int64] | None:
        """Where this rank's tokens lie in the whole micro-batch.

        Args:
            partition: of the micro-batch, from the helper's `partition`.

        Returns:
            int64 `[T / CP]` in local order; None with one rank, which holds them as they are.
        """
        if self.cp_size == 1 or partition is None:
            return None
        return partition.indices(self.cp_rank)

    def slice_thd(self, x: Tensor, partition: Partition | None, dim: int = 1) -> Tensor:
        """This rank's share of a packed tensor.

        Args:
            x: `[1, T, ...]` in pack order, any dtype.
            partition: of the pack.
            dim: the dimension of the tokens.

        Returns:
            `[1, T / CP, ...]`; `x` itself with one rank.
        """
        index = self.get_slice_index(partition)
        if index is None:
            return x
        _check_size(x.shape[dim], partition)
        return x.index_select(dim, torch.from_numpy(index).to(x.device))

    def slice_bshd(self, x: Tensor, partition: Partition | None) -> Tensor:
        """This rank's share of every row.

        Args:
            x: `[B, S, ...]`, any dtype.
            partition: of the rows, laid end to end.

        Returns:
            `[B, S / CP, ...]`; `x` itself with one rank.
        """
        if self.get_slice_index(partition) is None:
            return x
        rows = x.shape[0]
        return self.slice_thd(x.flatten(0, 1), partition, dim=0).unflatten(0, (rows, -1))

    def _slice_each(self, tensors: Any, cut: Callable[[Tensor], Tensor]) -> Any:
        if isinstance(tensors, Mapping):
            return {name: cut(x) for name, x in tensors.items()}
        return cut(tensors)

    def unslice(
        self,
        shares: Sequence[Tensor] | Tensor,
        partition: Partition | None,
        *,
        group: dist.ProcessGroup | None = None,
        dim: int = 1,
    ) -> Tensor:
        """Put shares back into the order of the whole micro-batch: for logits, and for tests.

        Args:
            shares: of all ranks in order; or this rank's alone, with the group to gather from.
            partition: of the micro-batch.
            group: the context-parallel group; gathering is a collective call, without gradients.
            dim: dimension of a pack's tokens; rows are always `[B, S / CP, ...]`.
        """
        if isinstance(shares, Tensor):
            if self.cp_size == 1 or group is None:
                shares = [shares]
            else:
                parts = [torch.empty_like(shares) for _ in range(self.cp_size)]
                dist.all_gather(parts, shares.contiguous(), group=group)
                shares = parts
        if len(shares) != self.cp_size:
            raise ValueError(f"shares: {len(shares)} of {self.cp_size} ranks; pass all, or a group")
        if self.cp_size == 1 or partition is None:
            return shares[0]
        if self.capability.packed:
            return self._in_order(torch.cat(list(shares), dim=dim), partition, dim)
        rows = shares[0].shape[0]
        flat = torch.cat([share.flatten(0, 1) for share in shares])
        return self._in_order(flat, partition, 0).unflatten(0, (rows, -1))

    def _in_order(self, x: Tensor, partition: Partition, dim: int) -> Tensor:
        _check_size(x.shape[dim], partition)
        return x.index_select(dim, torch.from_numpy(partition.inverse()).to(x.device))

    def register_batch_sliced_hook(self, hook: BatchHook) -> None:
        """Call `hook` with every batch that `pack` has cut, where it is cut: in the workers.

        One rank's share is the whole pack, and hooks see it too.

        Hooks run in the order they were registered; what one returns (unless None) goes on.
        """
        self._hooks.append(hook)

    def _cut(self, batch: Any) -> Any:
        for hook in self._hooks:
            changed = hook(batch)
            batch = batch if changed is None else changed
        return batch

    def plans(
        self,
        cu_seqlens: NDArray[np.int32],
        cu_seqlens_padded: NDArray[np.int32],
        partition: Partition | None,
    ) -> LayerPlans | None:
        """This rank's attention plans; None with one rank.

        Args:
            cu_seqlens: int32 `[n + 1]`, real boundaries of what attends among itself.
            cu_seqlens_padded: int32 `[n + 1]`, where it starts.
            partition: of the micro-batch.
        """
        if self.cp_size == 1 or partition is None:
            return None
        settings = self.settings
        made = {
            (kind, window): build_attention_plan(
                kind,
                cu_seqlens,
                cu_seqlens_padded,
                cp_size=self.cp_size,
                cp_rank=self.cp_rank,
                window=window,
                partition=partition,
                hierarchical_sizes=settings.hierarchical_sizes if kind == "a2a+p2p" else None,
            )
            for kind, window in settings.attention_kinds
        }
        return LayerPlans(made, settings.selection.communications)


def _check_size(tokens: int, partition: Partition | None) -> None:
    assert partition is not None
    if tokens != partition.total_tokens:
        raise ValueError(f"x: has {tokens} tokens, the partition {partition.total_tokens}")
