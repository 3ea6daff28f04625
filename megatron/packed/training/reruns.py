"""Steps run again to tell a fault of the hardware from a property of the data.

megatron-core's RerunStateMachine decides; this module gives it what it needs to know: which
results are suspicious, how to come back to the beginning of a step, and what of it belongs in a
checkpoint.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import rerun_state_machine as core
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.rerun_state_machine import (
    EXIT_CODE_RESUME_TO_DISAMBIGUATE,
    RerunDataIterator,
    RerunDiagnostic,
    RerunErrorInjector,
    RerunMode,
    RerunState,
    RerunStateMachine,
)

from megatron.packed.arguments import Config
from megatron.packed.errors import TrainingError
from megatron.packed.training.batches import MicroBatchIterator
from megatron.packed.training.environment import print_rank_0

_MODES = {
    "disabled": RerunMode.DISABLED,
    "validate_results": RerunMode.VALIDATE_RESULTS,
    "report_stats": RerunMode.REPORT_DETERMINISM_STATS,
}
_LARGE_FACTOR = 10.0  # upstream's, of losses and of gradients alike


class StepRejected(TrainingError):
    """A step whose results can't be trusted; nothing of it was kept.

    Attributes:
        save: the run's state before the step belongs in a checkpoint.
        exit_code: of the program; 16 asks for a restart elsewhere, 17 is a verdict.
    """

    def __init__(self, message: str, *, save: bool, exit_code: int) -> None:
        super().__init__(message)
        self.save = save
        self.exit_code = exit_code


class _Machine(RerunStateMachine):
    """megatron-core's machine; statistics of reruns go to the log of the run.

    0.16 reads a file name and line of their caller that it doesn't keep.
    """

    def _maybe_report_stats(self) -> None:
        if self.current_iteration % self.REPORTING_INTERVAL_ITERATIONS:
            return
        everyone: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, dict(self.stats))
        for caller in sorted({caller for stats in everyone for caller in stats}):
            merged = core.QuickStats()
            merged.combine([stats[caller] for stats in everyone if caller in stats])
            print_rank_0(f"   rerun | {caller.message}: {merged.print_stats()} |")


class _Replay(RerunDataIterator):
    """Micro-batches as the machine rewinds them; marks are set by whoever begins a step."""

    def __init__(self, batches: MicroBatchIterator) -> None:
        super().__init__(batches)

    def advance(self) -> None:
        """The mark of this step is there already."""

    def rewind(self) -> None:
        """Hand out the micro-batches of this step again."""
        self.iterable.rewind()  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """Empty: a checkpoint holds the position before the step."""
        return {}

    def load_state_dict(self, state_dict: Any) -> None:
        """The position is in the checkpoint."""


@dataclass
class Reruns:
    """Watches results of steps, and runs a step again that looks wrong.

    Attributes:
        machine: megatron-core's.
        model: wrapped chunks of this rank; buffers that forward passes change are put back.
        check_spiky_loss: look for losses far above those before.
        check_large_grads: look for gradients far above those before.
    """

    machine: RerunStateMachine
    model: list[DistributedDataParallel]
    check_spiky_loss: bool
    check_large_grads: bool

    @classmethod
    def of(cls, config: Config, model: list[DistributedDataParallel]) -> Reruns | None:
        """What the flags ask for; None where they ask for nothing."""
        flags = config.faults
        wanted = flags.check_for_spiky_loss or flags.check_for_large_grads
        if flags.rerun_mode == "disabled" and not wanted:
            return None
        # Its warnings are findings about this run.
        logging.getLogger(core.__name__).setLevel(logging.WARNING)
        machine = _Machine(
            state_save_func=partial(_state_of_step, model),
            state_restore_func=partial(_restore_step, model),
            mode=_MODES[flags.rerun_mode],
            error_injector=RerunErrorInjector(
                error_injection_rate=flags.error_injection_rate,
                error_injection_type=RerunDiagnostic(flags.error_injection_type),
            ),
            result_rejected_tracker_filename=flags.result_rejected_tracker_filename,
        )
        core._set_rerun_state_machine(machine)
        return cls(machine, model, flags.check_for_spiky_loss, flags.check_for_large_grads)

    @property
    def enabled(self) -> bool:
        """Whether steps are run again."""
        return bool(self.machine.mode is not RerunMode.DISABLED)

    def attempts(self, batches: MicroBatchIterator) -> Iterator[None]:
        """One turn for each run of the step; collective calls.

        Args:
            batches: marked where the step begins.

        Raises:
            StepRejected: on every rank, when the results can't be kept.
        """
        replay = _Replay(batches)
        while self.machine.should_run_forward_backward(replay):
            yield
        save, leave, code = self.machine.should_checkpoint_and_exit()
        if leave:
            # A transient fault: megatron-core 0.19 would have the run go back to the last regular
            # checkpoint, but nothing of this step was kept.
            save = save or self.machine.state is RerunState.RERUNNING_IN_PLACE
            raise StepRejected(_verdict(code, batches.iteration), save=save, exit_code=code)

    def check_loss(self, total: torch.Tensor, count: torch.Tensor) -> None:
        """Look at the loss of a micro-batch: float scalars, sum and supervised tokens."""
        mean = (total.detach() / count.clamp(min=1)).float()
        if self.enabled:
            self._validate(mean, _not_finite, "NaN or Inf in a loss", fatal=True)
        if self.check_spiky_loss:
            self._validate(mean, self._is_large("loss"), "spiky loss", fatal=False)

    def check_gradients(self, norm: torch.Tensor) -> None:
        """Look at the norm of this rank's gradients before they are reduced: float scalar."""
        if self.enabled:
            self._validate(norm, _not_finite, "NaN or Inf in local gradients", fatal=True)
        if self.check_large_grads:
            self._validate(norm, self._is_large("grads"), "large local gradients", fatal=False)

    def _is_large(self, context: str) -> partial[bool]:
        return partial(self.machine.is_unexpectedly_large, threshold=_LARGE_FACTOR, context=context)

    def _validate(self, result: torch.Tensor, rejects: Any, message: str, fatal: bool) -> None:
        self.machine.validate_result(
            result=result,
            rejection_func=rejects,
            message=message,
            comparison_func=_difference,
            tolerance=0.0,
            fatal=fatal,
        )

    # --- in checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's state as plain values."""
        machine, injector = self.machine, self.machine.error_injector
        undecided = machine.state in (
            RerunState.WILL_RERUN_FROM_CHECKPOINT,
            RerunState.RERUNNING_AGAIN_FROM_CHECKPOINT,
        )
        call, injected = machine.failed_validation_call, injector.injected_error_type
        device = machine.suspicious_device
        return {
            "undecided": undecided,
            "iteration": machine.current_iteration,
            "requested": machine.rerun_requested,
            "failed_call": None if call is None else [call.caller.message, call.sequence],
            "initial_result": machine.initial_result if undecided else None,
            "node": machine.suspicious_node,
            "device": device if device is None else str(device),
            "injected": None if injected is None else injected.value,
            "large_value_counts": dict(machine.large_value_counts),
            "max_values": dict(machine.max_values),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from this rank's saved state."""
        machine = self.machine
        machine.large_value_counts = dict(state["large_value_counts"])
        machine.max_values = dict(state["max_values"])
        machine.current_iteration = state["iteration"]
        if not self.enabled or not state["undecided"]:
            return
        machine.state = RerunState.WILL_RERUN_FROM_CHECKPOINT
        machine.current_iteration = state["iteration"]
        machine.rerun_requested = state["requested"]
        machine.checkpoint_requested = machine.restart_again_requested = False
        machine.continue_requested = False
        machine.first_iteration_complete = True
        machine.suspicious_node = state["node"]
        machine.suspicious_device = _same_device(state["device"])
        machine.initial_result = state["initial_result"]
        if state["failed_call"] is not None:
            message, sequence = state["failed_call"]
            caller = core.Caller(message=message, rank=torch.distributed.get_rank())
            machine.failed_validation_call = core.Call(caller=caller, sequence=sequence)
        if state["injected"] is not None:
            machine.error_injector.injected_error_type = RerunDiagnostic(state["injected"])


def _same_device(name: str | None) -> Any:
    """The current device itself where it is the one of that name, so that it compares equal."""
    current = torch.cuda.current_device()
    return current if str(current) == name else name


def _not_finite(result: torch.Tensor) -> bool:
    return not math.isfinite(result.item())


def _difference(initial: torch.Tensor, result: torch.Tensor) -> float:
    """0 where both are the same to the bit, NaN included; else their relative difference."""
    one, other = float(initial), float(result)
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other))


def _verdict(code: int, iteration: int) -> str:
    where = f"iteration {iteration}: unexpected result, see the errors above it in the log"
    if code == EXIT_CODE_RESUME_TO_DISAMBIGUATE:
        return (
            f"{where}; the same result came again in this place (exit code {code}): restart from "
            "the checkpoint on another node to see whether it is the hardware, or with "
            "--rerun-mode disabled --skip-bad-batches 1 if it is the data"
        )
    return (
        f"{where}; it could not be reproduced, or another node gave the verdict (exit code "
        f"{code}): the step was not kept; restart without the node that is named, with "
        "--rerun-mode disabled where another node gave the verdict"
    )


# --- what a forward pass changes besides gradients ------------------------------------------------


def _trackers() -> dict[str, Any]:
    """Dictionaries in which megatron-core adds up losses of routers and prediction depths."""
    from megatron.core.transformer import multi_token_prediction
    from megatron.core.transformer.moe import moe_utils

    found: dict[str, Any] = {}
    helper = getattr(multi_token_prediction, "MTPLossLoggingHelper", None)
    if helper is not None:
        found["mtp"] = helper.tracker
    getter = getattr(moe_utils, "get_moe_layer_wise_logging_tracker", None)
    if getter is not None:
        found["moe"] = getter()
    return found


def _state_of_step(model: list[DistributedDataParallel]) -> dict[str, Any]:
    return {
        "buffers": [[buffer.detach().clone() for buffer in _buffers(chunk)] for chunk in model],
        "trackers": copy.deepcopy(_trackers()),
        "generators": dict(tensor_parallel.get_cuda_rng_tracker().get_states()),
    }


def _restore_step(model: list[DistributedDataParallel], state: dict[str, Any]) -> None:
    with torch.no_grad():
        for chunk, saved in zip(model, state["buffers"], strict=True):
            for buffer, value in zip(_buffers(chunk), saved, strict=True):
                buffer.copy_(value)
    for name, tracker in _trackers().items():
        tracker.clear()
        tracker.update(copy.deepcopy(state["trackers"].get(name, {})))
    tensor_parallel.get_cuda_rng_tracker().set_states(state["generators"])


def _buffers(chunk: DistributedDataParallel) -> list[torch.Tensor]:
    return [buffer for _, buffer in chunk.module.named_buffers()]
