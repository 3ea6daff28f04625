"""Micro-batches through the pipeline: one call for training and evaluation alike.

Every stage reads the micro-batches themselves, so it knows the length of what its neighbours
will send. megatron-core, whose stages don't, lets them exchange shapes before every tensor: a
message and a wait for the device each time, which interleaved stages that receive ahead of time
can turn into a circle of waits. Here nothing is asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config

from megatron.packed.arguments.stages import Stages
from megatron.packed.training.batches import MicroBatchIterator


@dataclass(frozen=True)
class StepShape:
    """What the pipeline schedule must know about a micro-batch.

    Attributes:
        sequence_length: tokens along the first dimension of the hidden states, before
            sequence parallelism divides them.
        batch_size: size of their second dimension (1 for a pack).
        stages: how the layers are laid over the pipeline.
    """

    sequence_length: int
    batch_size: int
    stages: Stages


@dataclass(frozen=True)
class Arrival:
    """One tensor that a stage receives: whose it is, and how many hidden states a token has.

    Attributes:
        micro_batch: number of the micro-batch in the step.
        depths: hidden states of a token; more than one after multi-token prediction.
    """

    micro_batch: int
    depths: int


def arrivals(
    stages: Stages, process: int, num_microbatches: int, group_size: int, *, backward: bool
) -> list[Arrival]:
    """What a process receives in one step from one side, in order.

    Chunks take micro-batches in the order of megatron-core's schedule table, forward and, with
    the chunks counted from the end, backward. Whatever they send arrives in that order.

    Args:
        stages: the layout.
        process: pipeline rank.
        num_microbatches: micro-batches of the step.
        group_size: micro-batches that a chunk takes in a row.
        backward: gradients from the next stage instead of hidden states from the previous one.
    """
    table = get_schedule_table(num_microbatches, stages.virtual, group_size)
    expected = []
    for micro_batch, number in table:
        chunk = stages.virtual - 1 - number if backward else number
        # A stage's gradient has the shape of what it sent, the output of the stage itself.
        source = stages.stage(process, chunk) - (not backward)
        if source < 0 or source == len(stages.layers) - 1:
            continue  # the embedding has no input, the loss no gradient from others
        first = stages.first_prediction
        depths = 1 if first is None or source < first else 1 + sum(stages.predictions)
        expected.append(Arrival(micro_batch, depths))
    return expected


class StageExchange(P2PCommunicator):
    """megatron-core's exchange between stages, with two things changed.

    It knows the shape of what comes instead of asking. And it holds on to what is under way:
    megatron-core drops the last send of an evaluation with overlap in warm-up unfinished, and
    gloo takes a dropped send back.

    Args:
        config: the model's configuration.
        batches: this rank's micro-batches.
        shape: the layout.
        num_microbatches: micro-batches of the step.
    """

    def __init__(
        self,
        config: TransformerConfig,
        batches: MicroBatchIterator,
        shape: StepShape,
        num_microbatches: int,
    ) -> None:
        group = parallel_state.get_pipeline_model_parallel_group()
        super().__init__(pp_group=group, config=config)
        self._batches = batches
        self._rows = shape.batch_size
        interleaved = shape.stages.virtual > 1
        size = config.microbatch_group_size_per_vp_stage if interleaved else num_microbatches
        self._previous, self._next = (
            iter(arrivals(shape.stages, group.rank(), num_microbatches, size, backward=backward))
            for backward in (False, True)
        )

        self._under_way: list[torch.distributed.Work] = []

    def _communicate(self, **exchange: Any) -> tuple[Any, Any, Any]:
        previous, following, requests = super()._communicate(**exchange)
        if requests:
            self._under_way = [each for each in self._under_way if not each.is_completed()]
            # A copy: the schedule takes those that it waits for out of its own.
            each = requests.values() if isinstance(requests, dict) else requests
            self._under_way += list(each)
        return previous, following, requests

    def finish(self) -> None:
        """Wait for what the schedule left under way."""
        for request in self._under_way:
            if not request.is_completed():
                request.wait()

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        previous = self._shape(next(self._previous)) if recv_prev else [0, 0, 0]
        following = self._shape(next(self._next)) if recv_next else [0, 0, 0]
        return previous, following

    def _shape(self, arrival: Arrival) -> list[int]:
        length = self._batches.length_of(arrival.micro_batch)
        if self.config.sequence_parallel:
            length //= self.config.tensor_model_parallel_size
        return [length * arrival.depths, self._rows, self.config.hidden_size]


def _process_groups() -> ProcessGroupCollection:
    """The groups that megatron-core's schedules look up where they aren't given them."""
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.dp_cp = parallel_state.get_data_parallel_group(
        with_context_parallel=True, partial_data_parallel=False
    )
    # From 0.19 on, finalize_model_grads takes the group of experts' biases from here, too.
    groups.tp_dp_cp = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    groups.dp = parallel_state.get_data_parallel_group(
        with_context_parallel=False, partial_data_parallel=False
    )
    return groups


def forward_backward(
    forward_step: Callable[..., Any],
    model: list[DistributedDataParallel],
    batches: MicroBatchIterator,
    shape: StepShape,
    num_microbatches: int,
    *,
    forward_only: bool,
) -> list[dict[str, torch.Tensor]]:
    """Run one global batch forward, and backward unless told not to.

    Args:
        forward_step: as megatron-core's schedules take it.
        model: chunks of this rank.
        batches: micro-batches of this rank; every chunk passes over the same ones.
        shape: shape of a micro-batch.
        num_microbatches: how many of them make up the global batch.
        forward_only: no backward pass.

    Returns:
        What the loss function reported for each micro-batch; empty except on the last stage.
    """
    batches.begin_step()
    iterators: Iterator[Any] | list[Iterator[Any]] = batches
    if len(model) > 1:
        # Chunks lag behind each other by a few micro-batches, which is what a tee keeps.
        iterators = list(itertools.tee(batches, len(model)))
    pipeline: dict[str, Any] = {}
    exchange = None
    if shape.stages.processes > 1:
        exchange = StageExchange(get_model_config(model[0]), batches, shape, num_microbatches)
        pipeline = {"p2p_communicator": exchange, "pg_collection": _process_groups()}
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators,
        model=model,
        num_microbatches=num_microbatches,
        seq_length=shape.sequence_length,
        micro_batch_size=shape.batch_size,
        forward_only=forward_only,
        **pipeline,
    )
    if exchange is not None:
        exchange.finish()
    return reports
