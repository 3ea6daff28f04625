"""The four helpers: rows, and packs by ring, by heads and by dispatched chunks.

```
4 ranks, a pack of two segments: which rank holds which token

                                a a a a a a a a b b b b b b b b
ContextParallelHelper           0 1 2 3 3 2 1 0 0 1 2 3 3 2 1 0    rows instead of segments
RingAttnContextParallelHelper   0 1 2 3 3 2 1 0 0 1 2 3 3 2 1 0    every segment in 2 * CP chunks
  --cp-comm-type striped        0 1 2 3 0 1 2 3 0 1 2 3 0 1 2 3    the pack, whatever its segments
UlyssesContextParallelHelper    0 0 0 0 1 1 1 1 2 2 2 2 3 3 3 3    the pack; in attention every
                                                                   rank has all tokens of 1/4 of
                                                                   the heads
MagiAttnContextParallelHelper   1 3 3 1 1 3 3 1 0 2 2 0 0 2 2 0    chunks of the pack by their
                                                                   work, heaviest first
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.packed.arguments.exchange import select_for
from megatron.packed.attention.plans import effective_chunk_size
from megatron.packed.context_parallel.helper_base import (
    ContextParallelHelperBase,
    HelperSettings,
)
from megatron.packed.data.bshd import BshdArrays, BshdBatch
from megatron.packed.packing.batch import PackedBatch
from megatron.packed.packing.partition import Partition, make_partition
from megatron.packed.packing.plan import PackPlan
from megatron.packed.packing.records import SegmentRecords

if TYPE_CHECKING:
    from megatron.packed.arguments import Config


class ContextParallelHelper(ContextParallelHelperBase):
    """Rows (BSHD): every rank holds the same share of every row.

    A row, or each piece of it that attends among itself, is a segment of the plan; the shares are
    those of megatron-core, chunk r and chunk 2 * CP - 1 - r of every row.
    """

    name = "ContextParallelHelper"

    def partition(self, rows: int, seq_length: int) -> Partition | None:
        """Who holds which token of `rows` rows laid end to end; None with one rank.

        Args:
            rows: B.
            seq_length: S.

        Raises:
            ValueError: for rows that can't be cut exactly.
        """
        if self.cp_size == 1:
            return None
        edges = np.arange(rows + 1, dtype=np.int32) * np.int32(seq_length)
        return make_partition(self.settings.selection.partition or "zigzag", edges, self.cp_size)

    def slice(self, tensors: Any, partition: Partition | None) -> Any:
        """This rank's share of `[B, S, ...]`, or of each tensor of a mapping."""
        return self._slice_each(tensors, lambda x: self.slice_bshd(x, partition))

    def pack(self, batch: BshdBatch) -> BshdBatch:
        """Cut a batch of rows to this rank's share, and plan its attention.

        Args:
            batch: whole rows, on the host.

        Returns:
            `[B, S / CP]` tensors; boundaries and counts stay those of the whole rows.
        """
        partition = self.partition(*batch.tokens.shape)
        if partition is None:
            return batch
        boundaries = batch.cu_seqlens.numpy()
        names = ("tokens", "labels", "loss_mask", "position_ids", "valid_mask")
        share = self.slice({name: getattr(batch, name) for name in names}, partition)
        for name in ("mtp_labels", "mtp_loss_masks"):
            by_token = getattr(batch, name).movedim(0, -1)
            share[name] = self.slice(by_token, partition).movedim(-1, 0)
        arrays = BshdArrays(
            **{name: x.numpy() for name, x in share.items()},
            cu_seqlens=boundaries,
            max_seqlen=batch.max_seqlen,
        )
        cut = BshdBatch.from_arrays(
            arrays,
            batch.real_tokens,
            batch.sample_indices,
            supervised_tokens=batch.supervised_tokens,
            mtp_targets=batch.mtp_targets,
            attention=self.plans(boundaries, boundaries, partition),
        )
        return self._cut(cut)


class _PackHelper(ContextParallelHelperBase):
    """Packs (THD): one sequence of segments, cut over the ranks."""

    def partition(self, cu_seqlens_padded: Any, cu_seqlens: Any = None) -> Partition | None:
        """Who holds which token of a pack; None with one rank.

        Args:
            cu_seqlens_padded: integers `[n + 1]`, aligned boundaries.
            cu_seqlens: integers `[n + 1]`, real ones; the aligned ones by default.

        Raises:
            ValueError: for a pack that can't be cut exactly.
        """
        if self.cp_size == 1:
            return None
        kind = self.settings.selection.partition or "contiguous"
        return make_partition(
            kind,
            cu_seqlens_padded,
            self.cp_size,
            cu_seqlens=cu_seqlens,
            chunk_size=self._chunk_size(cu_seqlens_padded if cu_seqlens is None else cu_seqlens),
            # A chunk size asks for MagiAttention's own layout; without one less may travel.
            affinity=kind == "dispatch" and self.settings.chunk_size is None,
        )

    def _chunk_size(self, cu_seqlens: Any) -> int | None:
        del cu_seqlens  # only dispatched chunks have a size
        return None

    def slice(self, tensors: Any, partition: Partition | None) -> Any:
        """This rank's share of `[1, T, ...]`, or of each tensor of a mapping."""
        return self._slice_each(tensors, lambda x: self.slice_thd(x, partition))

    def pack(
        self,
        plan: PackPlan,
        rows: Any,
        *,
        mtp_depths: int = 0,
        segments: SegmentRecords | None = None,
        supervised: Any = None,
    ) -> PackedBatch:
        """Gather this rank's share of a pack from its raw rows, and plan its attention.

        Args:
            plan: the pack, aligned to `alignment`.
            rows: the raw rows it was made from.
            mtp_depths: multi-token-prediction depths beyond the main loss.
            segments: where each of the plan's segments comes from, if known.
            supervised: which tokens of the rows are targets; see `PackedBatch.from_plan`.

        Returns:
            `[1, T / CP]` tensors; boundaries and counts are the whole pack's.
        """
        partition = self.partition(plan.cu_seqlens_padded, plan.cu_seqlens)
        batch = PackedBatch.from_plan(
            plan,
            rows,
            mtp_depths=mtp_depths,
            partition=partition,
            rank=self.cp_rank,
            attention=self.plans(plan.cu_seqlens, plan.cu_seqlens_padded, partition),
            segments=segments,
            supervised=supervised,
        )
        return self._cut(batch)


class RingAttnContextParallelHelper(_PackHelper):
    """Packs whose keys go from rank to rank: zigzag per segment, or striped."""

    name = "RingAttnContextParallelHelper"


class UlyssesContextParallelHelper(_PackHelper):
    """Packs cut in equal blocks, with heads swapped for tokens around the attention."""

    name = "UlyssesContextParallelHelper"


class MagiAttnContextParallelHelper(_PackHelper):
    """Packs cut in chunks that are handed out by attention work, on this project's own engine."""

    name = "MagiAttnContextParallelHelper"

    def _chunk_size(self, cu_seqlens: Any) -> int | None:
        asked = self.settings.chunk_size
        if asked is None:
            return None
        return effective_chunk_size(asked, int(cu_seqlens[-1]), self.cp_size)


_HELPERS = {
    each.name: each
    for each in (
        ContextParallelHelper,
        RingAttnContextParallelHelper,
        UlyssesContextParallelHelper,
        MagiAttnContextParallelHelper,
    )
}

AnyHelper = (
    ContextParallelHelper
    | RingAttnContextParallelHelper
    | UlyssesContextParallelHelper
    | MagiAttnContextParallelHelper
)


def build_context_parallel_helper(config: Config, cp_rank: int | None = None) -> AnyHelper:
    """The helper that a run's flags choose.

    Rows go to `ContextParallelHelper`; packs to the helper of `--attention-backend`, or of
    `--cp-comm-type` where that is given.

    Args:
        config: a validated configuration.
        cp_rank: context-parallel rank; by default this process's.

    Raises:
        ConfigurationError: for an exchange that the helper lacks.
    """
    settings = helper_settings(config, cp_rank)
    return _HELPERS[settings.selection.capability.helper](settings)


def helper_settings(config: Config, cp_rank: int | None = None) -> HelperSettings:
    """What a run's helper needs to know; arguments as `build_context_parallel_helper`."""
    parallel = config.parallel
    return HelperSettings(
        selection=select_for(config),
        cp_size=parallel.context_parallel_size,
        cp_rank=parallel.context_parallel_rank if cp_rank is None else cp_rank,
        tp_size=parallel.tensor_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        hierarchical_sizes=parallel.hierarchical_context_parallel_sizes,
        chunk_size=parallel.magi_attn_chunk_size,
        alignment_mode=config.packing.packing_alignment,
        layer_windows=config.attention.layer_windows(config.model.num_layers),
        quantisation=_quantisation(config),
    )


def _quantisation(config: Config) -> str | None:
    """What `--fp8-format` and `--fp8-recipe` ask of the number of tokens."""
    if config.get("fp8") is None:
        return None
    return "mxfp8" if config.get("fp8_recipe") == "mxfp8" else "fp8"
