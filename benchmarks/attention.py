"""Packed attention and context parallelism side by side, in one run.

    python benchmarks/attention.py            a few minutes on two cores
    python benchmarks/attention.py --quick    fewer sizes and turns
    python benchmarks/attention.py --tables 3

fp32, 8 heads of 64, causal, forward and backward. Documents are the files of the Python standard
library cut to packs, or as many log-normal ones as fill a pack. Contenders of a table take turns,
in the same process where they can; the best time of each counts, in table 3 the median. The tables:

1. one process against what one would write without it: one `scaled_dot_product_attention` with a
   dense document mask, a batch padded to the longest document, a loop over documents;
2. the executor against the kernel calls it makes;
3. two context-parallel ranks with one thread each against one process with two threads;
4. what every plan costs by the numbers: balance, keys that travel, planning time.

`overlap` is the share of the exchange time (measured without any tile to compute) that a rank did
not wait for. Ranks of one machine share its memory bandwidth, and gloo copies with the processor.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor

from megatron.packed.accelerator.cpu import keep_freed_memory
from megatron.packed.attention import (
    AttentionPlan,
    build_attention_plan,
    packed_attention,
)
from megatron.packed.attention.communicator import (
    Communicator,
    Expected,
    Form,
    Label,
    Message,
    Pending,
)
from megatron.packed.attention.host import communicator_of
from megatron.packed.attention.kernels import tiles_cpu
from megatron.packed.attention.plans import default_partition, report
from megatron.packed.attention.task_graph import Tiles
from megatron.packed.context_parallel import make_partition
from megatron.packed.packing import Alignment, PackPlan

HEADS, WIDTH = 8, 64
THREADS = 2
KINDS = ("p2p", "striped", "all_gather", "dispatch", "a2a")


def corpus_documents(tokens: int) -> list[int]:
    """Lengths of files of the standard library, 0.3 tokens a byte, cut to fill one pack."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    sizes = [
        int(path.stat().st_size * 0.3) + 1
        for path in sorted(folder.rglob("*.py"))
        if "site-packages" not in path.parts
    ]
    return _fill(np.random.default_rng(0).permutation(sizes), tokens)


def log_normal_documents(count: int, tokens: int) -> list[int]:
    """`count` long-tailed lengths that add up to `tokens`."""
    raw = np.exp(np.random.default_rng(0).normal(0, 1.26, count))
    edges = np.round(np.cumsum(raw) / raw.sum() * (tokens - count)).astype(int)
    return (np.diff(edges, prepend=0) + 1).tolist()


def _fill(lengths: np.ndarray, tokens: int) -> list[int]:
    ends = np.cumsum(lengths)
    return np.diff([0, *ends[ends < tokens], tokens]).tolist()


def best_of(
    contenders: dict[str, Callable[[], object]],
    turns: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Best time of each in seconds; they take turns."""
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(turns):
        for name, function in contenders.items():
            start = clock()
            function()
            best[name] = min(best[name], clock() - start)
    return best


def inputs(rows: int) -> tuple[list[Tensor], Tensor]:
    """Query, key and value leaves, and an upstream gradient: `[rows, heads, width]`."""
    leaves = [torch.randn(rows, HEADS, WIDTH).requires_grad_() for _ in range(3)]
    return leaves, torch.randn(rows, HEADS, WIDTH)


def attend(plan: AttentionPlan, leaves: list[Tensor], grad: Tensor, group=None) -> None:
    out = packed_attention(*leaves, plan, group)
    torch.autograd.grad(out, leaves, grad)


# ---- 1. one process -----------------------------------------------------------------------------


def dense_mask(lengths: list[int], leaves: list[Tensor], grad: Tensor) -> Callable[[], None]:
    """One call on the whole pack with a document mask, made outside of the time."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    visible = (document[:, None] == document).tril_()
    bias = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)

    def run() -> None:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in leaves)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        torch.autograd.grad(out, leaves, grad.transpose(0, 1).unsqueeze(0))

    return run


def padded_batch(lengths: list[int]) -> Callable[[], None]:
    """A batch padded to the longest document."""
    shape = (len(lengths), HEADS, max(lengths), WIDTH)
    leaves = [torch.randn(shape).requires_grad_() for _ in range(3)]
    grad = torch.randn(shape)

    def run() -> None:
        out = F.scaled_dot_product_attention(*leaves, is_causal=True)
        torch.autograd.grad(out, leaves, grad)

    return run


def document_loop(lengths: list[int], leaves: list[Tensor], grad: Tensor) -> Callable[[], None]:
    """One call a document."""

    def run() -> None:
        parts = zip(*(x.split(lengths) for x in leaves), strict=True)
        outs = [
            F.scaled_dot_product_attention(
                *(x.transpose(0, 1).unsqueeze(0) for x in part), is_causal=True
            )
            for part in parts
        ]
        out = torch.cat([x.squeeze(0).transpose(0, 1) for x in outs])
        torch.autograd.grad(out, leaves, grad)

    return run


def one_process(quick: bool) -> None:
    print(f"\n1. One process, {THREADS} threads: times the packed attention is faster")
    print(f"{'pack':34}{'packed ms':>10}{'dense mask':>12}{'padded':>9}{'loop':>7}")
    packs = {
        "4K, corpus": corpus_documents(4096),
        "4K, 64 log-normal segments": log_normal_documents(64, 4096),
        "8K, corpus": corpus_documents(8192),
        "8K, 64 log-normal segments": log_normal_documents(64, 8192),
        "16K, corpus": corpus_documents(16384),
        "32K, corpus": corpus_documents(32768),
    }
    for name, lengths in list(packs.items())[: 3 if quick else None]:
        tokens = sum(lengths)
        leaves, grad = inputs(tokens)
        plan = build_attention_plan("local", np.cumsum([0, *lengths]))
        contenders: dict[str, Callable[[], object]] = {
            "packed": lambda p=plan, x=leaves, g=grad: attend(p, x, g),
            "loop": document_loop(lengths, leaves, grad),
        }
        if len(lengths) * max(lengths) <= 6 * tokens:
            contenders["padded"] = padded_batch(lengths)
        if tokens <= 8192:
            contenders["dense"] = dense_mask(lengths, leaves, grad)
        best = best_of(contenders, 3 if quick or tokens > 8192 else 6)

        def ratio(other: str, best: dict[str, float] = best) -> str:
            return f"{best[other] / best['packed']:.2f}" if other in best else "-"

        title = f"{name} ({len(lengths)}, max {max(lengths)})"
        print(
            f"{title:34}{best['packed'] * 1e3:10.0f}{ratio('dense'):>12}{ratio('padded'):>9}"
            f"{ratio('loop'):>7}"
        )


# ---- 2. the executor against its kernels --------------------------------------------------------


def executor_overhead(quick: bool) -> None:
    print("\n2. Executor over its kernel calls, one thread")
    torch.set_num_threads(1)
    for tokens in (4096, 16384):
        lengths = corpus_documents(tokens)
        plan = build_attention_plan("local", np.cumsum([0, *lengths]))
        leaves, grad = inputs(tokens)
        q, k, v = (x.detach() for x in leaves)
        out, lse = torch.empty_like(q), torch.empty(tokens, HEADS)
        grads = [torch.empty_like(x) for x in (lse, q, k, v)]

        def kernels(step=plan.steps[0], q=q, k=k, v=v, out=out, lse=lse, g=grad, d=grads) -> None:
            tiles_cpu.forward(q, k, v, step, WIDTH**-0.5, out, lse)
            tiles_cpu.backward(g, q, k, v, out, lse, step, WIDTH**-0.5, *d)

        best = best_of(
            {
                "kernels": kernels,
                "executor": lambda p=plan, x=leaves, g=grad: attend(p, x, g),
            },
            4 if quick else 10,
            time.process_time,  # of one thread: what others do on the machine does not count
        )
        over = best["executor"] / best["kernels"] - 1
        print(f"{tokens:6} tokens: kernels {best['kernels'] * 1e3:.0f} ms, executor {over:+.1%}")
    torch.set_num_threads(THREADS)


# ---- 3. two ranks against two threads -----------------------------------------------------------


class TimedCommunicator:
    """Adds up the seconds that exchanges are waited for.

    Args:
        communicator: what exchanges.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.rank = communicator.rank
        self.size = communicator.size
        self.in_order = communicator.in_order
        self.outgoing = communicator.outgoing
        self.waited = 0.0

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Expected], form: Form, label: Label
    ) -> Pending:
        pending = self._communicator.exchange(sends, receives, form, label)
        wait = pending.wait

        def timed() -> None:
            start = time.perf_counter()
            wait()
            self.waited += time.perf_counter() - start

        pending.wait = timed  # type: ignore[method-assign]
        return pending


@dataclass(frozen=True)
class RankJob:
    """What a rank times.

    Attributes:
        plans: plans of all ranks, by kind.
        turns: repetitions; the first does not count.
        store: file that ranks meet at.
    """

    plans: dict[str, list[AttentionPlan]]
    turns: int
    store: str


@dataclass
class RankTimes:
    """Seconds of one plan on one rank, turn by turn.

    Attributes:
        start, end: of forward and backward, by the clock that all processes share.
        waited: those between them that were waited for messages.
        alone: the same wait where there is nothing to compute.
    """

    start: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)


def _rank(rank: int, job: RankJob, turn: Barrier, queue: mp.SimpleQueue) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo", init_method=f"file://{job.store}", rank=rank, world_size=2)
    first = Label("keys", 1, "forward")
    communicator = TimedCommunicator(communicator_of(dist.group.WORLD, torch.device("cpu"), first))
    times = {kind: RankTimes() for kind in job.plans}
    data = {kind: inputs(plans[rank].local_tokens) for kind, plans in job.plans.items()}
    for number in range(job.turns):
        turn.wait()  # while the process of two threads has its turn
        for kind, plans in job.plans.items():
            plan, (leaves, grad) = plans[rank], data[kind]
            silent = replace(
                plan, steps=tuple(replace(s, tiles=Tiles(s.tiles.bands[:0])) for s in plan.steps)
            )
            attend(plan, leaves, grad, communicator)  # wakes the rank up, as the one process is
            dist.barrier()
            communicator.waited, start = 0.0, time.perf_counter()
            attend(plan, leaves, grad, communicator)
            end, waited = time.perf_counter(), communicator.waited
            dist.barrier()
            communicator.waited = 0.0
            attend(silent, leaves, grad, communicator)
            if number:
                times[kind].start.append(start)
                times[kind].end.append(end)
                times[kind].waited.append(waited)
                times[kind].alone.append(communicator.waited)
        turn.wait()
    queue.put((rank, times))
    dist.destroy_process_group()


def two_ranks(quick: bool) -> None:
    print("\n3. Two ranks of one thread against one process of two threads (1.00: equally fast)")
    print("   medians over turns of the process, then the ranks; in brackets smallest and largest")
    for tokens in (4096, 8192) if quick else (4096, 8192, 16384, 32768):
        lengths = corpus_documents(tokens)
        plans = {kind: plan_all(kind, lengths, 2)[0] for kind in KINDS}
        turns = 4 if quick else min(24, 200_000 // tokens)
        leaves, grad = inputs(tokens)
        single = build_attention_plan("local", np.cumsum([0, *lengths]))
        one: list[float] = []
        with tempfile.TemporaryDirectory() as folder:
            context = mp.get_context("spawn")
            queue, turn = context.SimpleQueue(), context.Barrier(3)
            job = RankJob(plans, turns, f"{folder}/store")
            ranks = mp.start_processes(
                _rank, args=(job, turn, queue), nprocs=2, start_method="spawn", join=False
            )
            for number in range(turns):
                attend(single, leaves, grad)  # wakes its threads up
                start = time.perf_counter()
                attend(single, leaves, grad)
                if number:
                    one.append(time.perf_counter() - start)
                turn.wait()
                turn.wait()
            results = dict(queue.get() for _ in range(2))
            while not ranks.join():
                pass
        print(f"{tokens} tokens, {len(lengths)} documents: one process {median(one) * 1e3:.0f} ms")
        print(f"  {'plan':12}{'ratio':>19}{'areas':>24}{'bytes sent':>22}{'overlap':>9}")
        for kind in KINDS:
            both = [results[rank][kind] for rank in range(2)]
            # A step ends when its slowest rank does.
            end = map(max, *(times.end for times in both))
            start = map(min, *(times.start for times in both))
            total = [b - a for a, b in zip(start, end, strict=True)]
            ratios = [a / b for a, b in zip(one, total, strict=True)]
            ratio = f"{median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f})"
            waited = sum(min(times.waited) for times in both)
            exchange = sum(min(times.alone) for times in both)
            areas = " ".join(f"{plan.area:,}" for plan in plans[kind])
            sent = " ".join(f"{p.bytes_sent(HEADS, HEADS, WIDTH, WIDTH, 4):,}" for p in plans[kind])
            overlap = max(1 - waited / exchange, 0.0) if exchange else 0.0
            print(f"  {kind:12}{ratio:>19}{areas:>24}{sent:>22}{overlap:9.0%}")


# ---- 4. plans by the numbers --------------------------------------------------------------------


def plan_all(kind: str, lengths: list[int], cp: int) -> tuple[list[AttentionPlan], float]:
    """Plans of all ranks, and the seconds that one took."""
    layout = default_partition(kind)
    alignment = Alignment.for_layout(partition=layout, cp_size=cp)
    pack = PackPlan.from_documents(lengths, 0, alignment=alignment)
    partition = make_partition(
        layout,
        pack.cu_seqlens_padded,
        cp,
        cu_seqlens=pack.cu_seqlens,
        affinity=layout == "dispatch",
    )
    start = time.perf_counter()
    plans = [
        build_attention_plan(
            kind,
            pack.cu_seqlens,
            pack.cu_seqlens_padded,
            cp_size=cp,
            cp_rank=rank,
            partition=partition,
        )
        for rank in range(cp)
    ]
    return plans, (time.perf_counter() - start) / cp


def plans_by_numbers(quick: bool) -> None:
    print("\n4. Plans: largest over mean area, keys that travel (share of a full ring), planning")
    for tokens in (131072,) if quick else (131072, 1048576):
        lengths = corpus_documents(tokens)
        for cp in (2, 8, 64):
            cells = []
            for kind in KINDS[:-1]:
                plans, seconds = plan_all(kind, lengths, cp)
                cost = report(plans)
                cells.append(
                    f"{kind} {cost.balance:.3f} {cost.kv_share:4.0%} {seconds * 1e3:5.1f} ms"
                )
            print(f"  {sum(lengths):8} tokens, CP {cp:2}:  " + "   ".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer sizes and turns")
    parser.add_argument("--tables", type=int, nargs="+", default=[1, 2, 3, 4], metavar="N")
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.manual_seed(0)
    keep_freed_memory()  # as training does
    torch.set_num_threads(THREADS)
    tables = {1: one_process, 2: executor_overhead, 3: two_ranks, 4: plans_by_numbers}
    for number in arguments.tables:
        tables[number](arguments.quick)


if __name__ == "__main__":
    main()
