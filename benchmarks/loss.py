"""What losses of documents cost on top of the plain token mean, and beside a one-hot reduction.

    make bench-loss

Forward and backward from logits: the vocabulary cross-entropy with the token mean, the same with
each reduction of ours over documents, and with a `[tokens, documents]` one-hot matrix. Contenders
take turns; the reduction's own time is measured apart too, since it drowns in the noise of the
cross-entropy. Memory is what the reduction alone allocates at its peak, forward and backward.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.packed.loss.calculation import LossCalculationHelper
from megatron.packed.loss.cross_entropy import vocab_parallel_cross_entropy
from megatron.packed.loss.document import update_packed_doc_level_params
from megatron.packed.packing import PackedBatch, PackPlan

Reduce = Callable[[torch.Tensor], torch.Tensor]


class PeakMemory(TorchDispatchMode):
    """Bytes of tensors that operations create and that are alive at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        import weakref

        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage.data_ptr() in self._seen or storage.nbytes() == 0:
                continue
            self._seen.add(storage.data_ptr())
            self.alive += storage.nbytes()
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._free, storage.data_ptr(), storage.nbytes())
        return result

    def _free(self, pointer: int, size: int) -> None:
        self._seen.discard(pointer)
        self.alive -= size


def make_batch(tokens: int, documents: int, seed: int = 0) -> PackedBatch:
    """A pack of long-tailed documents, `documents` of them in `tokens` tokens."""
    draw = np.random.default_rng(seed)
    shares = draw.lognormal(0.0, 1.2, documents)
    cuts = np.floor(np.cumsum(shares) / shares.sum() * (tokens - documents)).astype(int)
    lengths = np.diff(np.append(0, cuts)) + 1
    lengths[-1] += tokens - lengths.sum()
    plan = PackPlan.from_documents(lengths, 0)
    return PackedBatch.from_plan(plan, draw.integers(0, 100, tokens))


def reductions(batch: PackedBatch) -> dict[str, Reduce]:
    """Per-token losses to a scalar, by contender."""
    params, mask = batch.packed_seq_params, batch.loss_mask
    scale = torch.tensor(1.5, dtype=torch.float64)
    plain, ours = LossCalculationHelper(), LossCalculationHelper(weighted=True)
    update_packed_doc_level_params(batch, reduction="document")

    def one_hot(losses: torch.Tensor) -> torch.Tensor:
        count = len(params.token_weights)
        ids = batch.document_ids[0].long().clamp(min=0)
        members = torch.nn.functional.one_hot(ids, count).to(losses.dtype)
        supervised = torch.where(mask != 0, losses, 0.0)
        sums = (supervised.reshape(-1, 1) * members).sum(dim=0)
        return (sums * params.token_weights).sum() * scale

    return {
        "token mean": lambda losses: plain.compute_loss(losses, params, mask).total,
        "documents": lambda losses: ours.compute_loss(losses, params, mask, scale).total,
        "one-hot": one_hot,
    }


def seconds_of(work: Callable[[], None]) -> float:
    """Processor time of one call on one thread."""
    start = time.process_time()
    work()
    return time.process_time() - start


def backward(reduce: Reduce, losses: torch.Tensor) -> None:
    """One forward and backward pass of a reduction."""
    losses.grad = None
    reduce(losses).backward()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--documents", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    batch = make_batch(options.tokens, options.documents)
    contenders = reductions(batch)
    logits = torch.randn(options.tokens, 1, options.vocab)
    labels = batch.labels.transpose(0, 1)

    def whole(reduce: Reduce) -> None:
        leaf = logits.detach().requires_grad_()
        losses = vocab_parallel_cross_entropy(leaf * 1.0, labels)
        reduce(losses.transpose(0, 1)).backward()

    losses = torch.rand(1, options.tokens, requires_grad=True)
    timed: dict[str, list[float]] = {name: [] for name in contenders}
    alone: dict[str, list[float]] = {name: [] for name in contenders}
    memory = {}
    for name, reduce in contenders.items():
        with PeakMemory() as used:
            backward(reduce, losses)
        memory[name] = used.peak
    for _ in range(options.turns):
        for name, reduce in contenders.items():
            few = 1 if name == "one-hot" else 5
            alone[name].append(
                seconds_of(lambda: [backward(reduce, losses) for _ in range(few)]) / few  # noqa: B023
            )
            if name == "token mean":
                timed[name].append(seconds_of(lambda: whole(reduce)))  # noqa: B023
    baseline = statistics.median(timed["token mean"])
    print(
        f"{options.tokens} tokens, {options.documents} documents, vocabulary {options.vocab}, "
        f"{options.turns} turns, one thread\n"
        f"cross-entropy and token mean, forward and backward: {1e3 * baseline:.1f} ms\n"
    )
    print(f"{'reduction':12} {'ms alone':>9} {'added %':>8} {'peak KiB':>10}")
    token = statistics.median(alone["token mean"])
    for name in contenders:
        mine = statistics.median(alone[name])
        added = 100 * (mine - token) / baseline
        print(f"{name:12} {1e3 * mine:9.2f} {added:8.2f} {memory[name] / 1024:10.0f}")
    print(f"\none-hot needs {memory['one-hot'] / memory['documents']:.0f} times the memory")


if __name__ == "__main__":
    main()
