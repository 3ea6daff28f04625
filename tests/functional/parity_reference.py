"""Training without the product's batches, losses, schedules or optimizer: one document at a time.

The model is the one that the product builds; what it reads and predicts, the sums, the clipping
and Adam are written out here.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.distributed.harness import Weights
from tests.functional.parity_layouts import BATCH, STEPS, pieces_of, row_ids

LEARNING_RATE, WEIGHT_DECAY, LARGEST_NORM = 1e-3, 0.01, 1.0


@dataclass(frozen=True)
class Reference:
    """A run of documents.

    Attributes:
        losses: mean loss of each step.
        counts: targets of each step.
        gradient: of the first step.
        weights: at the end.
    """

    losses: list[float]
    counts: list[int]
    gradient: Weights
    weights: Weights


def train_documents(flags: str, steps: int = STEPS) -> Reference:
    """Train in this process; a function of a pool's single rank.

    Args:
        flags: a model's, with any layout of one process.
        steps: updates.
    """
    import torch

    from tests.distributed.documents import NO_TARGET, build_model, gradient_of, named

    model, vocab_size = build_model(flags, double=False)
    parameters = named(model)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for _, p in parameters if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for _, p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=LEARNING_RATE,
    )
    losses, counts, first_gradient = [], [], {}
    rows = row_ids()
    for step in range(steps):
        total, count = 0.0, 0
        optimizer.zero_grad()
        batch = [each for ids in rows[step * BATCH : (step + 1) * BATCH] for each in pieces_of(ids)]
        for each in batch:
            logits = model(torch.tensor([each.inputs]), torch.arange(len(each.inputs))[None], None)
            targets = torch.tensor(each.targets)
            loss = torch.nn.functional.cross_entropy(
                logits[0, :, :vocab_size], targets, ignore_index=NO_TARGET, reduction="sum"
            )
            loss.backward()
            total += loss.item()
            count += int((targets != NO_TARGET).sum())
        gradient = {name: gradient_of(parameter) / count for name, parameter in parameters}
        if not first_gradient:
            first_gradient = {name: values.clone() for name, values in gradient.items()}
        norm = float(sum(values.double().square().sum() for values in gradient.values())) ** 0.5
        for name, parameter in parameters:
            parameter.grad = gradient[name] * min(1.0, LARGEST_NORM / (norm + 1e-6))
        optimizer.step()
        losses.append(total / count)
        counts.append(count)
    weights = {name: parameter.detach().clone() for name, parameter in parameters}
    return Reference(losses, counts, first_gradient, weights)
