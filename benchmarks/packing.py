"""Planner and packers side by side: C++, numpy, a Python loop, Hugging Face, memcpy.

    python benchmarks/packing.py            about two minutes; all contenders in one run
    python benchmarks/packing.py --quick    fewer repetitions

One thread. `ours` is what a data-loader worker does for a micro-batch: find the boundaries, lay
the pack out, and write tokens, labels, loss mask, position ids, document ids and valid mask of
this rank's share. `memcpy` copies as many bytes as that reads and writes, half each. Times are
the best of several repetitions, contenders taking turns.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from megatron.packed.context_parallel import make_partition
from megatron.packed.packing import (
    Alignment,
    PackedBatch,
    boundaries,
    build_document_packer,
    build_pack_plan,
    native,
    packer_base,
    packer_workload,
    packers,
    partition,
    plan,
    reference,
    rows,
    views,
)
from megatron.packed.packing.buffer import BufferLayout

EOD, PAD = 1, 0
TOKENS_PER_BYTE = 0.3  # of source text, under the demo's byte-pair tokenizer of 8K entries


def corpus_lengths() -> np.ndarray:
    """Tokens of each file of the standard library, in a fixed random order."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    sizes = [
        path.stat().st_size
        for path in sorted(folder.rglob("*.py"))
        if "site-packages" not in path.parts
    ]
    lengths = np.array([int(size * TOKENS_PER_BYTE) + 1 for size in sizes])
    return np.random.default_rng(0).permutation(lengths)


def rows_of(lengths: np.ndarray, num_rows: int, width: int) -> np.ndarray:
    """Raw rows `[B, S + 1]` cut from an endless stream of documents, as a GPT dataset does."""
    size = num_rows * (width + 1)
    repeats = -(-size // int(lengths.sum()))
    ends = np.cumsum(np.tile(lengths, repeats)) - 1
    stream = np.random.default_rng(1).integers(5, 50000, size)
    stream[ends[ends < size]] = EOD
    return stream.reshape(num_rows, width + 1)


@dataclass
class Case:
    """One batch of rows, and the documents in it for contenders that start from those."""

    name: str
    rows: np.ndarray

    def segments(self) -> list[np.ndarray]:
        found = build_pack_plan(self.rows[:, :-1], EOD, PAD)
        return [
            self.rows[row, a : a + n]
            for row, a, n in zip(found.rows, found.offsets, found.lengths, strict=True)
        ]


def cases() -> list[Case]:
    real = corpus_lengths()
    tiny = np.random.default_rng(2).integers(1, 20, 200_000)
    short = np.random.default_rng(3).integers(1, 131, 200_000)
    return [
        Case("8K tokens, real lengths", rows_of(real, 1, 8192)),
        Case("64K tokens, real lengths", rows_of(real, 8, 8192)),
        Case("64K tokens, 1,000 segments", rows_of(short, 8, 8192)),
        Case("1M tokens, real lengths", rows_of(real, 128, 8192)),
        Case("1M tokens, 100K tiny segments", rows_of(tiny, 16, 65536)),
    ]


def best_of(functions: dict[str, Callable[[], Any]], repeats: dict[str, int]) -> dict[str, float]:
    """Best time of each contender in seconds; they take turns."""
    best = dict.fromkeys(functions, float("inf"))
    for turn in range(max(repeats.values())):
        for name, function in functions.items():
            if turn < repeats[name]:
                start = time.perf_counter()
                function()
                best[name] = min(best[name], time.perf_counter() - start)
    return best


@contextmanager
def numpy_core():
    """Run the same code on the numpy reference."""
    modules = (boundaries, packer_base, packer_workload, packers, partition, plan, rows, views)
    try:
        for module in modules:
            module.core = reference
        yield
    finally:
        for module in modules:
            module.core = native.core


class Ours:
    """Plan and write one rank's share into a buffer that is used again."""

    def __init__(self, rows: np.ndarray, kind: str = "contiguous", cp: int = 1) -> None:
        self.rows, self.kind, self.cp = rows, kind, cp
        self.alignment = Alignment.for_layout(partition=kind, cp_size=cp)
        self.buffer = np.empty(0, dtype=np.uint8)

    def __call__(self) -> BufferLayout:
        rows = self.rows
        made = build_pack_plan(
            rows[:, :-1], EOD, PAD, extra_token=rows[:, -1], alignment=self.alignment
        )
        view = made.full
        if self.cp > 1:
            part = make_partition(self.kind, made.cu_seqlens_padded, self.cp)
            view = made.local(part, 0)
        layout = BufferLayout(view.num_tokens, 1, made.num_segments, len(rows))
        if len(self.buffer) < layout.num_bytes:
            self.buffer = np.empty(layout.num_bytes, dtype=np.uint8)
        view.write(rows, layout, self.buffer)
        return layout


def to_tensors(rows: np.ndarray) -> PackedBatch:
    """What the training loop's collator returns."""
    made = build_pack_plan(rows[:, :-1], EOD, PAD, extra_token=rows[:, -1])
    return PackedBatch.from_plan(made, rows)


def python_loop(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """The straightforward way: find the EODs of each row, then handle segment after segment."""
    tokens, labels, masks, positions, documents, lengths = [], [], [], [], [], []
    for row in rows:
        width = len(row) - 1
        ends = (row[:-1] == EOD).nonzero().flatten().tolist()
        if not ends or ends[-1] != width - 1:
            ends.append(width - 1)
        start = 0
        for end in ends:
            segment = row[start : end + 1]
            target = row[start + 1 : end + 2].clone()
            mask = torch.ones(len(segment))
            if segment[-1] == EOD:
                target[-1] = 0
                mask[-1] = 0
            tokens.append(segment)
            labels.append(target)
            masks.append(mask)
            positions.append(torch.arange(len(segment)))
            documents.append(torch.full((len(segment),), len(lengths), dtype=torch.int32))
            lengths.append(len(segment))
            start = end + 1
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return {
        "tokens": torch.cat(tokens),
        "labels": torch.cat(labels),
        "loss_mask": torch.cat(masks),
        "position_ids": torch.cat(positions),
        "document_ids": torch.cat(documents),
        "cu_seqlens": cu_seqlens,
    }


def hugging_face(case: Case) -> Callable[[], Any] | None:
    try:
        from transformers import DataCollatorWithFlattening
    except ImportError:
        return None
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    features = [{"input_ids": segment.tolist()} for segment in case.segments()]
    return lambda: collate(features)


def planner_table(quick: bool) -> None:
    print("## Planner: one micro-batch, one thread\n")
    print(
        "| batch | segments | ours, ms | M tokens/s | x memcpy | CP=4 zigzag share, ms | as torch "
        "batch, ms | numpy / ours | Python loop / ours | Hugging Face / torch batch |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for case in cases():
        ours = Ours(case.rows)
        layout = ours()
        moved = (case.rows.nbytes + layout.num_bytes) // 2
        source, target = np.ones(moved, np.uint8), np.zeros(moved, np.uint8)
        as_tensor = torch.from_numpy(case.rows)
        contenders: dict[str, Callable[[], Any]] = {
            "ours": ours,
            "share": Ours(case.rows, "zigzag", 4),
            "memcpy": lambda target=target, source=source: np.copyto(target, source),
            "torch": lambda rows=case.rows: to_tensors(rows),
            "loop": lambda rows=as_tensor: python_loop(rows),
        }
        flatten = hugging_face(case)
        if flatten is not None:
            contenders["hf"] = flatten
        big = layout.num_tokens > 500_000
        few = 3 if quick or big else 10
        many = (20 if quick else 100) if not big else 20
        repeats = dict.fromkeys(contenders, many) | {"loop": few, "hf": few}
        best = best_of(contenders, repeats)
        with numpy_core():
            best |= best_of({"numpy": Ours(case.rows)}, {"numpy": few})
        tokens = case.rows[:, :-1].size
        hf = f"{best['hf'] / best['torch']:.0f}" if "hf" in best else "not installed"
        print(
            f"| {case.name} | {layout.num_segments:,} | {best['ours'] * 1e3:.3f} "
            f"| {tokens / best['ours'] / 1e6:.0f} | {best['ours'] / best['memcpy']:.1f} "
            f"| {best['share'] * 1e3:.3f} | {best['torch'] * 1e3:.3f} "
            f"| {best['numpy'] / best['ours']:.0f} | {best['loop'] / best['ours']:.0f} | {hf} |"
        )
    print()


def linearity(quick: bool) -> None:
    """Fit time = c * (tokens + segments) ^ e over batches of 64K to 4M tokens.

    For every size the same 4M tokens are planned, in more or fewer batches with buffers of their
    own: memory traffic is the same, so the fit tells of the algorithm and not of cache sizes.
    """
    rows = rows_of(corpus_lengths(), 512, 8192)
    sizes, times = [], []
    for num_rows in (8, 16, 32, 64, 128, 256, 512):
        batches = [Ours(rows[at : at + num_rows]) for at in range(0, len(rows), num_rows)]
        layouts = [batch() for batch in batches]
        best = best_of(
            {"all": lambda batches=batches: [batch() for batch in batches]},
            {"all": 5 if quick else 15},
        )
        tokens = sum(layout.num_tokens + layout.num_segments for layout in layouts)
        sizes.append(tokens / len(batches))
        times.append(best["all"] / len(batches))
    exponent = np.polyfit(np.log(sizes), np.log(times), 1)[0]
    rates = ", ".join(f"{size / t / 1e6:.0f}" for size, t in zip(sizes, times, strict=True))
    print(
        f"cost ~ (tokens + segments)^{exponent:.3f}, batches of 64K to 4M tokens; "
        f"M tokens/s by size: {rates}\n"
    )


def packer_tables() -> None:
    real = corpus_lengths()
    lognormal = np.random.default_rng(4).lognormal(5.95, 1.26, 1_000_000).astype(np.int64)
    lognormal = np.maximum(lognormal, 1)
    corpora = {"log-normal, 1M documents": lognormal, "standard library": real}
    print("## Document packers\n")
    print(
        "| corpus | capacity | BFD, M documents/s | with packs handed out | BFD bins / lower bound "
        "| windowed 4,096 fill | next-fit fill |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, lengths in corpora.items():
        for capacity in (8192, 32768, 131072):
            costs = build_document_packer("next_fit", lengths, capacity).stream.take(len(lengths))
            costs = np.ascontiguousarray(costs[:, 2])
            kernel = best_of(
                {"bfd": lambda c=costs, n=capacity: native.core.best_fit_decreasing(c, n)},
                {"bfd": 3},
            )["bfd"]
            packer = build_document_packer("best_fit_decreasing", lengths, capacity)
            start = time.perf_counter()
            bins = len(packer.epoch_packs())
            whole = time.perf_counter() - start
            bound = -(-int(lengths.sum()) // capacity)
            fills = []
            for strategy in ("windowed_best_fit", "next_fit"):
                packs = build_document_packer(strategy, lengths, capacity).epoch_packs()
                # The last pack of an epoch holds whatever is left; it says nothing of a packer.
                full = sum(int(pack.lengths.sum()) for pack in packs)
                last = min(int(pack.lengths.sum()) for pack in packs)
                fills.append((full - last) / (max(len(packs) - 1, 1) * capacity))
            print(
                f"| {name} | {capacity:,} | {len(costs) / kernel / 1e6:.1f} "
                f"| {len(lengths) / whole / 1e6:.2f} | {bins} / {bound} = {bins / bound:.5f} "
                f"| {100 * fills[0]:.2f} % | {100 * fills[1]:.2f} % |"
            )
    print()


def workload_table() -> None:
    print("## Workload balance: max / mean of d²/B + d over 8 micro-batches, B = 8,192\n")
    print("| capacity | greedy_workload | next_fit | best_fit_decreasing | greedy fill |")
    print("|---|---|---|---|---|")
    lengths = np.random.default_rng(5).lognormal(7.2, 1.5, 60_000).astype(np.int64) + 1
    for capacity in (32768, 131072):
        row = []
        for strategy in ("greedy_workload", "next_fit", "best_fit_decreasing"):
            packer = build_document_packer(strategy, lengths, capacity)
            balance = []
            for _ in range(40 if capacity < 100_000 else 12):
                packs = [packer.next_pack().lengths for _ in range(8)]
                work = [int((n * n // 8192 + n).sum()) for n in packs]
                balance.append(max(work) / (sum(work) / len(work)))
            row.append(f"{np.mean(balance):.3f}")
            if strategy == "greedy_workload":
                fill = packer.counters.fill
        print(f"| {capacity:,} | {' | '.join(row)} | {100 * fill:.1f} % |")
    print()


class Batches(torch.utils.data.Dataset):
    """Micro-batches made in a data-loader worker from rows that are at hand."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> PackedBatch:
        del index
        return to_tensors(self.rows)


def loader_table() -> None:
    """What a step sees of all this: the wait in `next()` while steps of some length run."""
    print("## Data time visible to the step, one worker\n")
    print("| pack | step, ms | wait in next(), ms | share |")
    print("|---|---|---|---|")
    for tokens, step in ((4096, 0.1), (65536, 0.1), (1 << 20, 0.5)):
        rows = rows_of(corpus_lengths(), max(tokens // 8192, 1), min(tokens, 8192))
        loader = torch.utils.data.DataLoader(
            Batches(rows), batch_size=None, num_workers=1, prefetch_factor=2
        )
        batches = iter(loader)
        waits = []
        for _ in range(12):
            start = time.perf_counter()
            next(batches)
            waits.append(time.perf_counter() - start)
            time.sleep(step)
        wait = float(np.median(waits[2:]))
        print(
            f"| {tokens:,} tokens | {step * 1e3:.0f} | {wait * 1e3:.2f} "
            f"| {100 * wait / (wait + step):.2f} % |"
        )
        del batches, loader
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    options = parser.parse_args()
    torch.set_num_threads(1)
    core = "C++" if native.is_native else "numpy (the extension is missing)"
    print(f"core: {core}; numpy {np.__version__}, torch {torch.__version__}\n")
    planner_table(options.quick)
    linearity(options.quick)
    packer_tables()
    workload_table()
    loader_table()


if __name__ == "__main__":
    main()
