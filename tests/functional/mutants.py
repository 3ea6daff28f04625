"""Faults put into the product on purpose, in the processes of a test's pool alone.

`run_mutated` patches the product for one call and takes the patch back. What each mutant breaks is
real: every one has been a fault of some training program.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from unittest import mock

Patch = Callable[[contextlib.ExitStack], None]


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        name: for the command line.
        fault: in words.
        apply: puts the patch on a stack.
    """

    name: str
    fault: str
    apply: Patch


MUTANTS: dict[str, Mutant] = {}


def mutant(name: str, fault: str) -> Callable[[Patch], Patch]:
    """Register a patch."""

    def register(apply: Patch) -> Patch:
        MUTANTS[name] = Mutant(name, fault, apply)
        return apply

    return register


def run_mutated(
    name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a function in a rank whose product has the fault."""
    with contextlib.ExitStack() as stack:
        MUTANTS[name].apply(stack)
        return function(*args, **kwargs)


@dataclass(frozen=True)
class MutatedPools:
    """Stands in for `WorkerPools`: whatever runs there runs with the fault.

    Attributes:
        pools: the real ones.
        name: of the mutant.
    """

    pools: Any
    name: str

    def __call__(self, world_size: int) -> _MutatedPool:
        return _MutatedPool(self.pools(world_size), self.name)


@dataclass(frozen=True)
class _MutatedPool:
    pool: Any
    name: str

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        limit = {"timeout": kwargs.pop("timeout")} if "timeout" in kwargs else {}
        return self.pool.run(run_mutated, self.name, function, args, kwargs, **limit)


def _wrap(
    stack: contextlib.ExitStack, owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]
) -> None:
    """Put what `make` makes of a function in its place."""
    stack.enter_context(mock.patch.object(owner, name, make(getattr(owner, name))))


# ---- targets -------------------------------------------------------------------------------------


def _change_batches(stack: contextlib.ExitStack, change: Callable[[Any], None]) -> None:
    from megatron.packed.packing.batch import PackedBatch

    def make(original: Any) -> Any:
        def from_plan(*args: Any, **kwargs: Any) -> Any:
            batch = original(*args, **kwargs)
            change(batch)
            return batch

        return from_plan

    _wrap(stack, PackedBatch, "from_plan", make)


def _segments(batch: Any) -> Sequence[tuple[int, int]]:
    """First slot and end of each segment of a whole pack."""
    params = batch.packed_seq_params
    lengths = [b - a for a, b in pairwise(params.cu_seqlens_host.tolist())]
    starts = params.cu_seqlens_padded_host.tolist()
    return [(start, start + n) for start, n in zip(starts, lengths, strict=False)]


@mutant("next-document", "the last token of a document predicts the next document's first")
def _next_document(stack: contextlib.ExitStack) -> None:
    def change(batch: Any) -> None:
        for _, end in _segments(batch)[:-1]:
            batch.labels[0, end - 1] = batch.tokens[0, end]
            batch.loss_mask[0, end - 1] = 1

    _change_batches(stack, change)


@mutant("label-at-the-end", "the label before a document's end is off by one")
def _label_at_the_end(stack: contextlib.ExitStack) -> None:
    def change(batch: Any) -> None:
        for begin, end in _segments(batch):
            if end - begin > 2:
                batch.labels[0, end - 2] = batch.tokens[0, end - 2]

    _change_batches(stack, change)


@mutant("mtp-leak", "multi-token prediction sees one token past a document's end")
def _mtp_leak(stack: contextlib.ExitStack) -> None:
    def change(batch: Any) -> None:
        for begin, end in _segments(batch)[:-1]:
            if end - begin > 1 and len(batch.mtp_labels):
                batch.mtp_labels[0, 0, end - 2] = batch.tokens[0, end]
                batch.mtp_loss_masks[0, 0, end - 2] = 1

    _change_batches(stack, change)


# ---- positions and attention ---------------------------------------------------------------------


def _change_packs(stack: contextlib.ExitStack, change: Callable[[Any], Any]) -> None:
    from megatron.packed.training import batches

    _wrap(stack, batches, "_from_pack", lambda original: lambda batch: change(original(batch)))


def _counted(batch: Any) -> Any:
    import torch

    return replace(batch, position_ids=torch.arange(batch.tokens.shape[1])[None])


# Rotary positions that go on from document to document are no fault: attention inside a document
# depends on differences alone. Learned positions show it.
@mutant("positions-go-on", "positions don't restart at documents")
def _positions_go_on(stack: contextlib.ExitStack) -> None:
    _change_packs(stack, _counted)


@mutant("local-positions", "rotary positions count a context-parallel rank's own slots")
def _local_positions(stack: contextlib.ExitStack) -> None:
    _change_packs(stack, _counted)


Spans = list[list[int]]


def _change_layouts(
    stack: contextlib.ExitStack, change: Callable[[Spans, list[int], list[int]], None]
) -> None:
    """Change the [first slot, length] of segments, given real and padded boundaries."""
    from megatron.packed.attention import core_attention
    from megatron.packed.attention.segments import build_segment_layout

    def layout_of_pack(params: Any, total_tokens: int) -> Any:
        real, padded = params.cu_seqlens_host.tolist(), params.cu_seqlens_padded_host.tolist()
        spans = [[at, b - a] for at, (a, b) in zip(padded, pairwise(real), strict=False)]
        change(spans, real, padded)
        starts, lengths = zip(*spans, strict=True)
        return build_segment_layout(starts, lengths, rows=1, row_length=total_tokens)

    stack.enter_context(mock.patch.object(core_attention, "layout_of_pack", layout_of_pack))


@mutant("boundary-off-by-one", "the first boundary between documents is one token late")
def _boundary_off_by_one(stack: contextlib.ExitStack) -> None:
    def change(spans: Spans, real: list[int], padded: list[int]) -> None:
        for one, other in pairwise(spans):
            if one[0] + one[1] == other[0] and other[1] > 1:
                one[1] += 1
                other[0], other[1] = other[0] + 1, other[1] - 1
                return

    _change_layouts(stack, change)


@mutant("padding-attended", "a document attends to the padding slot before it")
def _padding_attended(stack: contextlib.ExitStack) -> None:
    def change(spans: Spans, real: list[int], padded: list[int]) -> None:
        for one, other in pairwise(spans):
            if one[0] + one[1] < other[0] and other[1]:
                other[0], other[1] = other[0] - 1, other[1] + 1

    _change_layouts(stack, change)


@mutant("real-for-padded", "real boundaries are used where padded ones are needed")
def _real_for_padded(stack: contextlib.ExitStack) -> None:
    def change(spans: Spans, real: list[int], padded: list[int]) -> None:
        for span, start in zip(spans, real, strict=False):
            span[0] = start

    _change_layouts(stack, change)


@mutant("rows-unmasked", "rows attend across their documents")
def _rows_unmasked(stack: contextlib.ExitStack) -> None:
    from megatron.packed.training import batches

    def make(original: Any) -> Any:
        return lambda *args: replace(original(*args), attention_mask=None)

    _wrap(stack, batches, "_from_rows", make)


@mutant("window-off-by-one", "a sliding window is one token too wide")
def _window_off_by_one(stack: contextlib.ExitStack) -> None:
    from megatron.packed.attention import core_attention

    def make(original: Any) -> Any:
        def layer_window(*args: Any) -> int | None:
            window = original(*args)
            return None if window is None else window + 1

        return layer_window

    _wrap(stack, core_attention, "layer_window", make)


# ---- losses --------------------------------------------------------------------------------------


@mutant("nan-times-zero", "losses are multiplied by the loss mask, also where they are NaN")
def _nan_times_zero(stack: contextlib.ExitStack) -> None:
    import torch

    from megatron.packed.loss import calculation
    from megatron.packed.loss.token import TokenLoss

    def token_loss(losses: Any, loss_mask: Any) -> TokenLoss:
        count = (loss_mask != 0).sum().to(torch.int32)
        return TokenLoss((losses.float() * loss_mask).sum(), count)

    stack.enter_context(mock.patch.object(calculation, "token_loss", token_loss))


@mutant("mean-of-means", "every micro-batch is divided by its own count")
def _mean_of_means(stack: contextlib.ExitStack) -> None:
    from megatron.packed.training.step import ForwardStep

    def make(original: Any) -> Any:
        def _loss_function(*args: Any) -> Any:
            total, count, reports = original(*args)
            return total / count.clamp(min=1), count.clamp(max=1), reports

        return _loss_function

    _wrap(stack, ForwardStep, "_loss_function", make)


@mutant("local-denominator", "gradients are divided by a context-parallel rank's own count")
def _local_denominator(stack: contextlib.ExitStack) -> None:
    from megatron.packed.training import step

    def make(original: Any) -> Any:
        def finalize_model_grads(model: Any, num_tokens: Any, **kwargs: Any) -> None:
            local = num_tokens.clone()
            original(model, num_tokens, **kwargs)
            for chunk in model:
                chunk.scale_gradients(num_tokens / (2 * local.clamp(min=1)))

        return finalize_model_grads

    _wrap(stack, step, "finalize_model_grads", make)


@mutant("local-report", "the logged loss isn't summed over context-parallel ranks")
def _local_report(stack: contextlib.ExitStack) -> None:
    import torch

    from megatron.packed.training import step

    def reduce_reports(reports: Any, names: Any, device: Any) -> Any:
        rows = [[report[name].double() for name in names] for report in reports]
        return torch.stack([torch.stack(row) for row in rows]).sum(dim=0)

    stack.enter_context(mock.patch.object(step, "reduce_reports", reduce_reports))


@mutant("weights-per-rank", "documents are weighed against those of a replica alone")
def _weights_per_rank(stack: contextlib.ExitStack) -> None:
    from megatron.packed.training import batches

    def make(original: Any) -> Any:
        alone = mock.Mock()
        alone.size.return_value = 1
        return lambda held, device, group: original(held, device, alone)

    _wrap(stack, batches, "global_scales", make)


@mutant("aux-loss-scale", "a balancing loss weighs less, the more ranks share a micro-batch")
def _aux_loss_scale(stack: contextlib.ExitStack) -> None:
    from megatron.packed.model.router import PackedRouter

    def make(original: Any) -> Any:
        def _attach(
            self: Any, carrier: Any, share: Any, coefficient: float, name: str, replicas: int = 1
        ) -> Any:
            coefficient /= self.tp_cp_group.size()
            return original(self, carrier, share, coefficient, name, replicas)

        return _attach

    _wrap(stack, PackedRouter, "_attach", make)


@mutant("padding-routed", "padding is sent to experts and counted by their router")
def _padding_routed(stack: contextlib.ExitStack) -> None:
    from megatron.packed.training.batches import MicroBatch

    _wrap(
        stack, MicroBatch, "token_slots", lambda original: lambda self: original(self).clamp(min=0)
    )


# ---- what ranks exchange -------------------------------------------------------------------------


@mutant("dkv-lost", "gradients of keys that were lent are dropped in one step of the ring")
def _dkv_lost(stack: contextlib.ExitStack) -> None:
    from megatron.packed.attention.row_exchange import RowExchanges

    calls = []

    def make(original: Any) -> Any:
        def take_back(self: Any, *args: Any) -> None:
            calls.append(None)
            if len(calls) > 1:
                original(self, *args)
            else:
                args[-1].release()

        return take_back

    _wrap(stack, RowExchanges, "take_back", make)


@mutant("replicas-of-keys", "gradients of key heads that two ranks hold aren't added up")
def _replicas_of_keys(stack: contextlib.ExitStack) -> None:
    from megatron.packed.attention import head_exchange

    _wrap(stack, head_exchange, "add_rows", lambda original: head_exchange.copy_rows)


@mutant("gradients-not-reduced", "gradients aren't added up over context-parallel ranks")
def _gradients_not_reduced(stack: contextlib.ExitStack) -> None:
    from megatron.core.distributed import DistributedDataParallel

    nothing = mock.patch.object(DistributedDataParallel, "finish_grad_sync", lambda *a, **k: None)
    stack.enter_context(nothing)


@mutant("norms-not-reduced", "gradients of norms aren't added up with sequence parallelism")
def _norms_not_reduced(stack: contextlib.ExitStack) -> None:
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    name = "_allreduce_non_tensor_model_parallel_grads"
    stack.enter_context(mock.patch.object(module, name, lambda *a, **k: None))


@mutant("chunk-lost", "dispatch gives a rank one chunk twice, and another to nobody")
def _chunk_lost(stack: contextlib.ExitStack) -> None:
    from megatron.packed.context_parallel import context_parallel_helper

    def make(original: Any) -> Any:
        def make_partition(*args: Any, **kwargs: Any) -> Any:
            partition = original(*args, **kwargs)
            runs = partition.runs

            def lossy(rank: int) -> Any:
                starts, counts, step = runs(rank)
                same = [n for n in range(1, len(counts)) if counts[n] == counts[0]]
                if rank == 1 and same:
                    starts = starts.copy()
                    starts[same[-1]] = starts[0]
                return starts, counts, step

            object.__setattr__(partition, "runs", lossy)
            return partition

        return make_partition

    _wrap(stack, context_parallel_helper, "make_partition", make)


# ---- starts and data -----------------------------------------------------------------------------


@mutant("init-by-layout", "initial weights depend on the pipeline stage that holds them")
def _init_by_layout(stack: contextlib.ExitStack) -> None:
    from megatron.core import parallel_state

    from megatron.packed.model import initialization

    def make(original: Any) -> Any:
        return lambda seed, name: original(
            seed + 100 * parallel_state.get_pipeline_model_parallel_rank(), name
        )

    _wrap(stack, initialization, "stream_key", make)


def _change_sampler(stack: contextlib.ExitStack, change: Callable[[dict[str, Any]], None]) -> None:
    from megatron.packed.data.samplers import MicroBatchSampler

    def make(original: Any) -> Any:
        def __init__(self: Any, order: Any, **kwargs: Any) -> None:
            change(kwargs)
            original(self, order, **kwargs)

        return __init__

    _wrap(stack, MicroBatchSampler, "__init__", make)


@mutant("sample-repeated", "a run that goes on trains on its last sample again")
def _sample_repeated(stack: contextlib.ExitStack) -> None:
    def change(settings: dict[str, Any]) -> None:
        settings["consumed_samples"] = max(0, settings["consumed_samples"] - 1)

    _change_sampler(stack, change)


@mutant("replicas-read-the-same", "all data-parallel ranks read the first one's samples")
def _replicas_read_the_same(stack: contextlib.ExitStack) -> None:
    _change_sampler(stack, lambda settings: settings.update(data_parallel_rank=0))
