"""One loss scale for a chain of optimizers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer.grad_scaler import DynamicGradScaler

from megatron.packed.training.loss_scale import JointScaler, share_loss_scale


def scaler() -> DynamicGradScaler:
    made = object.__new__(DynamicGradScaler)  # its constructor allocates on CUDA
    made._scale, made.min_scale = torch.tensor([64.0]), torch.tensor([1.0])
    made.growth_factor, made.backoff_factor = torch.tensor([2.0]), torch.tensor([0.5])
    made.growth_interval, made.hysteresis = 2, 1
    made._growth_tracker, made._hysteresis_tracker = 0, 1
    return made


def chain(*scalers: Any) -> Any:
    members = [SimpleNamespace(grad_scaler=each) for each in scalers]
    return SimpleNamespace(chained_optimizers=members)


def test_an_overflow_in_one_member_counts_for_all_and_after_all_have_looked() -> None:
    optimizer = chain(scaler(), None, scaler())
    share_loss_scale(optimizer)
    first, none, last = (member.grad_scaler for member in optimizer.chained_optimizers)
    assert none is None and first is last and isinstance(first, JointScaler)
    first.update(False)
    assert last.scale == 64.0 and last.inv_scale == 1 / 64
    last.update(True)
    assert first.scale == 32.0
    for _ in range(2):  # twice without overflow in any member: grows
        first.update(False)
        last.update(False)
    assert first.scale == 64.0
    state = first.state_dict()
    other = JointScaler(scaler(), 2)
    other.update(True)
    other.update(False)
    assert other.scale == 32.0
    state = {name: value for name, value in state.items()}
    assert state["scale"] == 64.0 and state["growth_tracker"] == 0


@pytest.mark.parametrize("scalers", [(), (None,), ("one",), ("one", None)])
def test_a_single_scaler_stays(scalers: tuple[Any, ...]) -> None:
    optimizer = chain(*scalers)
    share_loss_scale(optimizer)
    assert [member.grad_scaler for member in optimizer.chained_optimizers] == list(scalers)
    share_loss_scale(SimpleNamespace(grad_scaler="alone"))  # type: ignore[arg-type]
