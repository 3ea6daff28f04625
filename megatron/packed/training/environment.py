"""Start and stop one process of a run: process groups, seeds, threads, one quiet log."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import random
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import numpy as np
import torch

from megatron.packed.accelerator import Accelerator, select_accelerator
from megatron.packed.arguments import Config
from megatron.packed.arguments.stages import stages_of, virtual_size
from megatron.packed.errors import ConfigurationError


@dataclass(frozen=True)
class Environment:
    """What one process of a run stands on.

    Attributes:
        accelerator: device and backend.
        rank: global rank.
        world_size: processes in the run.
        host_tp_group: group of the tensor-parallel ranks that carries host tensors (gloo), so
            that sharing a batch never waits for the device.
        host_model_group: host group of all ranks of this model replica, which must read the same
            batches; None unless they are to be compared (`--check-packing-metadata`).
    """

    accelerator: Accelerator
    rank: int
    world_size: int
    host_tp_group: torch.distributed.ProcessGroup
    host_model_group: torch.distributed.ProcessGroup | None = None

    @property
    def is_first_rank(self) -> bool:
        """Whether this process writes the log."""
        return self.rank == 0


# megatron-core 0.19 imports the last, which tells of a CUDA toolkit on a machine without a GPU.
QUIET_LIBRARIES = ("megatron.core", "torch.distributed", "torch.utils.cpp_extension")


def quiet_libraries(rank: int) -> None:
    """Keep import-time warnings of libraries out of the log; rank 0 keeps real warnings."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING, force=True)
    for name in QUIET_LIBRARIES:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"megatron\.core.*")
    warnings.filterwarnings("ignore", module=r"torch.*")
    warnings.filterwarnings("ignore", message=".*Apex is not installed.*")
    warnings.filterwarnings("ignore", message=".*TransformerEngine.*")
    if rank != 0:
        warnings.simplefilter("ignore")


def seed_everything(config: Config, accelerator: Accelerator) -> None:
    """Seed the generators that dropout and data order draw from, as upstream does.

    Pipeline stages and context-parallel ranks, which hold other tokens, differ so that their
    dropout does; data-parallel replicas share a seed.
    """
    from megatron.core import parallel_state, tensor_parallel

    stages = parallel_state.get_pipeline_model_parallel_world_size()
    place = parallel_state.get_pipeline_model_parallel_rank()
    place += stages * parallel_state.get_context_parallel_rank()
    seed = config.training.seed + 100 * place
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _enable_determinism(accelerator: Accelerator) -> None:
    torch.use_deterministic_algorithms(True, warn_only=accelerator.name == "cuda")
    if accelerator.name == "cuda":
        torch.backends.cudnn.benchmark = False


def _store(config: Config, timeout: timedelta) -> torch.distributed.Store | None:
    """Where ranks meet; None for what the launcher's variables say.

    torchrun keeps its store when it starts ranks again, and newer torch looks for the addresses of
    its peers where those of the start before still are. So each start has names of its own.
    """
    parallel = config.parallel
    if parallel.world_size == 1:
        return torch.distributed.HashStore()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    meeting = torch.distributed.rendezvous(
        "env://", parallel.rank, parallel.world_size, timeout=timeout
    )
    store = next(iter(meeting))[0]
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return torch.distributed.PrefixStore(f"start_{start}", store)


def _initialize_process_groups(config: Config, accelerator: Accelerator) -> None:
    from megatron.core import parallel_state

    parallel = config.parallel
    instances = parallel.num_distributed_optimizer_instances
    if instances > 1 and importlib.util.find_spec("einops") is None:
        raise ConfigurationError(
            f"--num-distributed-optimizer-instances {instances}: megatron-core needs the package "
            "einops for it; install einops, or megatron-packed[instances]"
        )
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            backend=accelerator.backend,
            world_size=parallel.world_size,
            rank=parallel.rank,
            timeout=timeout,
            store=_store(config, timeout),
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual_size(config),
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=config.moe.expert_model_parallel_size,
        expert_tensor_parallel_size=_expert_tensor_parallel_size(config),
        num_distributed_optimizer_instances=parallel.num_distributed_optimizer_instances,
        order=parallel.rank_order,
        distributed_timeout_minutes=parallel.distributed_timeout_minutes,
        create_gloo_process_groups=(
            accelerator.name == "cuda" and config.acceleration.use_gloo_process_groups
        ),
        get_embedding_ranks=partial(_holders_of_word_embeddings, config),
    )


def _expert_tensor_parallel_size(config: Config) -> int:
    """As many processes as a model without experts needs for any order of ranks.

    megatron-core makes groups for experts all the same, and where replicas aren't numbered before
    stages it wants as many of the experts as of everything else.
    """
    parallel = config.parallel
    if config.moe.num_experts is None and parallel.use_tp_pp_dp_mapping:
        return parallel.tensor_model_parallel_size * parallel.context_parallel_size
    return config.moe.expert_tensor_parallel_size


def _holders_of_word_embeddings(config: Config, pipeline: list[int]) -> list[int]:
    """The ranks of a pipeline that hold a copy of the word embeddings, and add its gradients up.

    Args:
        config: a validated configuration.
        pipeline: its ranks in the order of their stages.
    """
    stages = stages_of(config)
    holders = {pipeline[0]}
    if not config.model.untie_embeddings_and_output_weights:
        holders.add(pipeline[-1])
    if config.loss.mtp_depths:
        predicting = stages.first_prediction
        last = len(stages.layers) - 1
        stage = last if predicting is None else predicting
        holders.add(pipeline[stage % stages.processes])
    return [rank for rank in pipeline if rank in holders]


def _host_tp_group(accelerator: Accelerator) -> torch.distributed.ProcessGroup:
    """The gloo group over this process's tensor-parallel ranks."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    if accelerator.backend == "gloo":
        return group
    return _new_host_group(torch.distributed.get_process_group_ranks(group)[0])


def _host_model_group() -> torch.distributed.ProcessGroup:
    """A gloo group over the ranks that work on the same micro-batches: all but data parallelism."""
    from megatron.core import parallel_state

    return _new_host_group(parallel_state.get_data_parallel_rank())


def _new_host_group(color: int) -> torch.distributed.ProcessGroup:
    """A gloo group of the ranks that give the same color; a collective call of all ranks."""
    colors: list[int] = [0] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(colors, color)
    created = {
        each: torch.distributed.new_group(
            [rank for rank, value in enumerate(colors) if value == each], backend="gloo"
        )
        for each in sorted(set(colors))
    }
    return created[color]


def start(config: Config) -> Environment:
    """Bring up this process: accelerator, threads, process groups, seeds.

    Args:
        config: a validated configuration.

    Returns:
        The environment that the rest of the program receives.

    Raises:
        ConfigurationError: the process group can't be formed.
    """
    parallel = config.parallel
    quiet_libraries(parallel.rank)
    if config.logging.logging_level is not None:
        for name in (None, *QUIET_LIBRARIES):
            logging.getLogger(name).setLevel(config.logging.logging_level)
    accelerator = select_accelerator(
        config.runtime.accelerator, parallel.local_rank, parallel.distributed_backend
    )
    if accelerator.name == "cpu" and config.runtime.threads:
        torch.set_num_threads(config.runtime.threads)
    if config.training.deterministic_mode:
        _enable_determinism(accelerator)
    try:
        _initialize_process_groups(config, accelerator)
    except ConfigurationError:
        raise
    except (ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f"torch.distributed: {error}; start the program with torchrun, which sets RANK, "
            "WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        ) from error
    seed_everything(config, accelerator)
    return Environment(
        accelerator=accelerator,
        rank=parallel.rank,
        world_size=parallel.world_size,
        host_tp_group=_host_tp_group(accelerator),
        host_model_group=_host_model_group() if config.packing.check_packing_metadata else None,
    )


def stop() -> None:
    """Leave the process groups, so that no peer waits for this process."""
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator

    destroy_num_microbatches_calculator()
    parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def running(config: Config) -> Iterator[Environment]:
    """Hold the environment of a run; process groups are torn down on a regular end."""
    environment = start(config)
    yield environment
    stop()


def print_rank_0(message: str) -> None:
    """Print one line of the log, once."""
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(message, flush=True)


def print_error(message: str) -> None:
    """Print an error of this process to standard error."""
    print(message, file=sys.stderr, flush=True)
