"""Micro-batches cut by every helper: what the conformance suite runs over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from megatron.packed.arguments import Config, config_from_flags
from megatron.packed.attention.plans import LayerPlans
from megatron.packed.context_parallel import ContextParallelHelper, build_context_parallel_helper
from megatron.packed.context_parallel.context_parallel_helper import AnyHelper
from megatron.packed.data.bshd import BshdBatch, BshdCollator
from megatron.packed.packing import PackedBatch, PackPlan

EOD = 99
MINIMAL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 2 "
    "--train-iters 1 --lr 1e-3 --seq-length 48 --tokenizer-type NullTokenizer "
    "--vocab-size 100 --mock-data --attention-dropout 0.0 "
)
PACKED = "--use-packed-sequence "
CHUNKS = PACKED + "--attention-backend magi --magi-attn-chunk-size 4 "
GROUPS = "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2 "

# A new helper, or a new exchange of an old one, is tested by adding one line: flags and CP sizes.
HELPERS: dict[str, tuple[str, tuple[int, ...]]] = {
    "rows": ("", (1, 2, 3, 4)),
    "rows-documents": ("--reset-attention-mask --reset-position-ids ", (1, 2, 4)),
    "rows-striped": ("--cp-comm-type striped ", (1, 2, 3)),
    "rows-a2a": ("--cp-comm-type a2a ", (1, 2, 4)),
    "rows-a2a+p2p": (GROUPS, (4,)),
    "ring": (PACKED, (1, 2, 3, 4)),
    "ring-tp2": (PACKED + "--tensor-model-parallel-size 2 --sequence-parallel ", (2, 3)),
    "ring-fork-alignment": (PACKED + "--packing-alignment segment ", (2, 3)),
    "all_gather": (PACKED + "--cp-comm-type all_gather ", (1, 2, 3)),
    "striped": (PACKED + "--cp-comm-type striped ", (1, 2, 3)),
    "ulysses": (PACKED + "--attention-backend flex ", (1, 2, 4)),
    "a2a+p2p": (PACKED + GROUPS, (4,)),
    "magi": (PACKED + "--attention-backend magi ", (1, 2, 3, 4)),
    "magi-chunks": (CHUNKS, (1, 2, 3)),
    "one-a-layer": (PACKED + "--cp-comm-type p2p a2a ", (1, 2, 4)),
}
CASES = [(name, size) for name, (_, sizes) in HELPERS.items() for size in sizes]


def config_of(flags: str, cp_size: int, rank: int = 0) -> Config:
    """A validated configuration of `cp_size` context-parallel ranks and nothing beside."""
    tensor = 2 if "--tensor-model-parallel-size 2" in flags else 1
    environ = {"WORLD_SIZE": str(cp_size * tensor), "RANK": str(rank)}
    return config_from_flags(f"{MINIMAL} {flags} --context-parallel-size {cp_size}", environ)


@dataclass(frozen=True)
class Cut:
    """A micro-batch, whole and in shares.

    Attributes:
        helpers: of every rank.
        whole: tensors of the whole micro-batch by name, `[B, S]` or `[1, T]`.
        shares: what every rank's helper packed.
        partition: of the micro-batch; None with one rank.
        segments: first slot in the flattened micro-batch, and length, of what attends to itself.
    """

    helpers: list[AnyHelper]
    whole: dict[str, Tensor]
    shares: list[Any]
    partition: Any
    segments: list[tuple[int, int]]

    @cached_property
    def local(self) -> list[dict[str, Tensor]]:
        """Tensors of every rank by name, as the model gets them."""
        return [tensors_of(share) for share in self.shares]

    @property
    def plans(self) -> list[LayerPlans | None]:
        """Every rank's plans."""
        return [
            share.packed_seq_params.attention if isinstance(share, PackedBatch) else share.attention
            for share in self.shares
        ]


def tensors_of(batch: Any) -> dict[str, Tensor]:
    """Everything of a batch that has a value a token."""
    names = ["tokens", "labels", "loss_mask", "position_ids"]
    if isinstance(batch, BshdBatch):
        return {name: getattr(batch, name) for name in names}
    tensors = {name: getattr(batch, name) for name in (*names, "valid_mask", "document_ids")}
    for depth, (labels, mask) in enumerate(
        zip(batch.mtp_labels, batch.mtp_loss_masks, strict=True), start=1
    ):
        tensors |= {f"mtp_{depth}_labels": labels, f"mtp_{depth}_loss_mask": mask}
    return tensors


def cut(name: str, cp_size: int, lengths: Sequence[int], *, mtp_depths: int = 0) -> Cut:
    """Cut documents of these lengths by a helper of `HELPERS`, on every rank.

    Args:
        name: key of `HELPERS`.
        cp_size: context-parallel ranks.
        lengths: of segments; for rows, of documents laid out end to end in two rows.
        mtp_depths: for packs.
    """
    flags = HELPERS[name][0]
    configs = [config_of(flags, cp_size)] * cp_size
    helpers = [build_context_parallel_helper(c, cp_rank=rank) for rank, c in enumerate(configs)]
    if isinstance(helpers[0], ContextParallelHelper):
        return _cut_rows(helpers, configs[0], lengths)
    plan = PackPlan.from_documents(lengths, 0, alignment=helpers[0].alignment)
    tokens = np.arange(1, 1 + sum(lengths))
    whole = PackedBatch.from_plan(plan, tokens, mtp_depths=mtp_depths)
    starts = plan.cu_seqlens_padded[:-1].tolist()
    return Cut(
        helpers=helpers,
        whole=tensors_of(whole),
        shares=[helper.pack(plan, tokens, mtp_depths=mtp_depths) for helper in helpers],
        partition=helpers[0].partition(plan.cu_seqlens_padded, plan.cu_seqlens),
        segments=list(zip(starts, plan.lengths.tolist(), strict=True)),
    )


def _cut_rows(helpers: list[Any], config: Config, lengths: Sequence[int]) -> Cut:
    seq_length = config.data.seq_length
    ids = [1 + i % 98 for i in range(2 * (seq_length + 1))]
    for end in np.cumsum(lengths).tolist():
        ids[(end - 1) % len(ids)] = EOD
    collator = BshdCollator(
        EOD,
        reset_position_ids=config.data.reset_position_ids,
        reset_attention_mask=config.data.reset_attention_mask,
    )
    rows = np.array(ids, dtype=np.int64).reshape(2, -1)
    whole = collator([{"text": row, "length": seq_length + 1} for row in rows])
    edges = whole.cu_seqlens.tolist()
    return Cut(
        helpers=helpers,
        whole=tensors_of(whole),
        shares=[helper.pack(whole) for helper in helpers],
        partition=helpers[0].partition(2, seq_length),
        segments=[(a, b - a) for a, b in zip(edges, edges[1:], strict=False)],
    )
