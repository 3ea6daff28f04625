"""The one door from per-token losses to what a step differentiates, counts and reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.packed.loss.document import PackedDocLevelParams, document_sums
from megatron.packed.loss.token import token_loss
from megatron.packed.packing.batch import PackedSeqParamsWithValidTokens

LM_LOSS = "lm loss"
OBJECTIVE = "objective"


@dataclass(frozen=True)
class LossResult:
    """The loss of one micro-batch on this rank.

    Attributes:
        total: scalar to differentiate; divided by the supervised tokens of the global batch, which
            megatron-core does, its gradient is the objective's.
        count: int32 scalar, supervised tokens.
        reports: `[2]` tensors (sum, count) by name, to be added over micro-batches and ranks.
        document_sums: float64 `[n]` without gradient, this rank's loss of each document; None
            unless asked for.
    """

    total: Tensor
    count: Tensor
    reports: dict[str, Tensor] = field(default_factory=dict)
    document_sums: Tensor | None = None


@dataclass(frozen=True)
class LossCalculationHelper:
    """How a run turns per-token losses into its objective.

    Attributes:
        weighted: the objective is another one than the mean over tokens.
        datasets: names of the blended datasets whose losses are reported.
        keep_document_sums: return the loss of each document.
        mtp_depths: predictions beyond the next token, whose losses are reported.
    """

    weighted: bool = False
    datasets: tuple[str, ...] = ()
    keep_document_sums: bool = False
    mtp_depths: int = 0

    @property
    def report_names(self) -> tuple[str, ...]:
        """Names of the reports, in the order that ranks add them up in."""
        named = tuple(dataset_report(name) for name in self.datasets)
        deeper = tuple(map(mtp_report, range(1, self.mtp_depths + 1)))
        return (LM_LOSS, *deeper, *((OBJECTIVE,) if self.weighted else ()), *named)

    def compute_loss(
        self,
        losses: Tensor,
        packed_seq_params: Any,
        loss_mask: Tensor,
        scale: Tensor | None = None,
        mtp_reports: Sequence[Tensor] = (),
    ) -> LossResult:
        """Sum and count the losses of a micro-batch.

        Args:
            losses: float32 or float64 `[B, S]`, per token; a pack's are `[1, T_local]`.
            packed_seq_params: of the pack; whatever else for rows.
            loss_mask: float32 `[B, S]`, nonzero where supervised.
            scale: float64 scalar, supervised tokens of the global batch over their weights; None
                where no gradient is taken.
            mtp_reports: `[2]` tensors (sum, count) of the deeper predictions; their gradient flows
                beside this one.
        """
        tokens = token_loss(losses, loss_mask)
        reports = {LM_LOSS: tokens.report}
        for depth, report in enumerate(mtp_reports, start=1):
            reports[mtp_report(depth)] = report
        if not (self.weighted or self.datasets or self.keep_document_sums):
            return LossResult(tokens.total, tokens.count, reports)
        assert isinstance(packed_seq_params, PackedSeqParamsWithValidTokens)
        params = PackedDocLevelParams.of(packed_seq_params)
        sums = document_sums(losses, loss_mask, params)
        total = tokens.total
        if self.weighted:
            objective = torch.dot(sums, params.weights)
            reports[OBJECTIVE] = self._once(objective.detach(), params, packed_seq_params.cp_rank)
            total = objective if scale is None else objective * scale
        if self.datasets:
            reports |= self._by_dataset(sums.detach(), packed_seq_params)
        return LossResult(
            total=total.to(tokens.total.dtype),
            count=tokens.count,
            reports=reports,
            document_sums=sums.detach() if self.keep_document_sums else None,
        )

    @staticmethod
    def _once(total: Tensor, params: PackedDocLevelParams, cp_rank: int) -> Tensor:
        """Every rank's sum, and the weight of all of them from one."""
        weight = params.total_weight if cp_rank == 0 else 0.0
        return torch.stack((total, torch.full_like(total, weight)))

    def _by_dataset(
        self, sums: Tensor, packed_seq_params: PackedSeqParamsWithValidTokens
    ) -> dict[str, Tensor]:
        # Segments of unknown origin go to a slot of their own.
        number = len(self.datasets)
        place = packed_seq_params.segments.datasets
        place = np.where((place < 0) | (place >= number), number, place)
        counts = np.bincount(
            place, packed_seq_params.segment_targets[0] * (packed_seq_params.cp_rank == 0), number
        )
        slots = torch.from_numpy(place).to(sums.device, non_blocking=True)
        totals = sums.new_zeros(number + 1).index_add(0, slots, sums)
        held = torch.from_numpy(counts[:number]).to(sums, non_blocking=True)
        both = torch.stack((totals[:number], held), dim=1)
        names = map(dataset_report, self.datasets)
        return dict(zip(names, both.unbind(), strict=True))


def mtp_report(depth: int) -> str:
    """What the loss of a deeper prediction is called, as upstream calls it."""
    return f"mtp_{depth} loss"


def dataset_report(name: str) -> str:
    """What the loss of a dataset is called in reports and logs."""
    return f"{LM_LOSS} {name}"
