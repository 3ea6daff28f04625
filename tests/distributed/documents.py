"""Documents run one at a time: what packs and rows are compared with.

A `Piece` says by hand what the model reads and what it shall predict, so that no code under test
decides where a document ends.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.distributed.harness import Weights

NO_TARGET = -100


@dataclass(frozen=True)
class Piece:
    """A piece of one document.

    Attributes:
        inputs: ids that the model reads.
        targets: id to predict at each input, NO_TARGET where there is none.
    """

    inputs: tuple[int, ...]
    targets: tuple[int, ...]


def piece(*ids: int, then: int | None = None) -> Piece:
    """Ids of one document in a row; `then` is the row's extra token where it continues them."""
    return Piece(tuple(ids), (*ids[1:], NO_TARGET if then is None else then))


@dataclass(frozen=True)
class DocumentResult:
    """Losses of documents, one by one.

    Attributes:
        losses: summed loss of each document.
        count: targets of all documents.
        gradient: of the sum of all losses, divided by `count`.
    """

    losses: list[float]
    count: int
    gradient: Weights

    @property
    def loss(self) -> float:
        """Mean loss per target."""
        return sum(self.losses) / self.count


def run_documents(flags: str, pieces: Sequence[Piece], double: bool = False) -> DocumentResult:
    """Run documents through the initial model of a run, each alone, in one process.

    Positions start at 0, attention is causal over the whole input, the loss is PyTorch's.

    Args:
        flags: the command line of the run.
        pieces: documents.
        double: compute in fp64.
    """
    model, vocab_size = build_model(flags, double)
    losses, count = [], 0
    for each in pieces:
        logits = model(torch.tensor([each.inputs]), torch.arange(len(each.inputs))[None], None)
        targets = torch.tensor(each.targets)
        loss = torch.nn.functional.cross_entropy(
            logits[0, :, :vocab_size], targets, ignore_index=NO_TARGET, reduction="sum"
        )
        loss.backward()
        losses.append(loss.item())
        count += int((targets != NO_TARGET).sum())
    gradient = {name: gradient_of(parameter) / count for name, parameter in named(model)}
    return DocumentResult(losses, count, gradient)


def run_pack(
    flags: str, samples: Sequence[dict[str, Any]], segment_alignment: int
) -> DocumentResult:
    """Run one pack of samples through the same model in fp64, with a given segment alignment."""
    from megatron.packed.packing import Alignment
    from megatron.packed.training.collation import PackingCollator

    model, _ = build_model(flags, double=True)
    alignment = Alignment(segment=segment_alignment)
    batch = PackingCollator(eod_id=256, alignment=alignment, capacity=None)(list(samples))
    losses = model(
        batch.tokens,
        batch.position_ids,
        None,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        packed_seq_params=batch.packed_seq_params,
    )
    supervised = batch.loss_mask != 0
    torch.where(supervised, losses, 0.0).sum().backward()
    ids, count = batch.document_ids[0].long(), int(supervised.sum())
    segments = int(ids.max()) + 1
    sums = torch.zeros(segments, dtype=losses.dtype)
    sums.index_add_(0, ids[supervised[0]], losses[supervised].detach())
    gradient = {name: gradient_of(parameter) / count for name, parameter in named(model)}
    return DocumentResult(sums.tolist(), count, gradient)


def build_model(flags: str, double: bool) -> tuple[torch.nn.Module, int]:
    """The unwrapped initial model of a run in this process, and its real vocabulary size."""
    from megatron.packed.arguments import config_from_flags
    from megatron.packed.data.tokenizers import build_tokenizer, padded_vocab_size
    from megatron.packed.model.builder import build_gpt_model
    from megatron.packed.model.transformer_config import build_transformer_config
    from megatron.packed.training import environment

    config = config_from_flags(flags, os.environ)
    this_process = environment.start(config)
    vocab_size = build_tokenizer(config.data).vocab_size
    divisor = config.model.make_vocab_size_divisible_by
    transformer_config = build_transformer_config(config)
    model = build_gpt_model(
        config,
        replace(transformer_config, params_dtype=torch.float64) if double else transformer_config,
        this_process.accelerator,
        vocab_size=vocab_size,
        padded_vocab_size=padded_vocab_size(vocab_size, divisor, 1),
    )
    return (model.double() if double else model), vocab_size


def named(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Parameters by name."""
    return list(model.named_parameters())


def gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The gradient; zeros for a parameter that was not used."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
