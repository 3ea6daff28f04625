"""One rank of a worker pool: the process that runs what `pool.py` sends it.

Importing this module imports torch and megatron-core. The pool's fork server does that once per
test session, and every rank of every pool is a fork of it: a rank starts in milliseconds and
shares those pages of memory.
"""

from __future__ import annotations

import copy
import faulthandler
import gc
import importlib
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection as mp_connection
from multiprocessing import parent_process
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest  # noqa: F401  (test modules import it: pay for it once, in the fork server)
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets import gpt_dataset  # noqa: F401  (loaded ahead, as pytest is)
from megatron.core.models.gpt import GPTModel  # noqa: F401  (loaded ahead, as pytest is)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from tests.distributed.pool import FIXED_ENVIRONMENT, Failure, Reply, Request

SEED = 1234

# Modules of megatron-core that keep state in module globals, and classes that keep it in class
# attributes. `reset_state` puts back what they held right after import.
_STATEFUL_MODULES = (
    "megatron.core.parallel_state",
    "megatron.core.num_microbatches_calculator",
    "megatron.core.rerun_state_machine",
    "megatron.core.tensor_parallel.random",
    "megatron.core.transformer.moe.moe_utils",
)
_STATEFUL_CLASSES = (
    ("megatron.core.transformer.multi_token_prediction", "MTPLossLoggingHelper", "tracker"),
    (
        "megatron.core.transformer.multi_token_prediction",
        "MTPLossAutoScaler",
        "main_loss_backward_scale",
    ),
    ("megatron.core.transformer.moe.moe_utils", "MoEAuxLossAutoScaler", "main_loss_backward_scale"),
)


def _module_state(module: ModuleType) -> dict[str, Any]:
    """Private globals in capitals that hold plain values or containers, copied."""
    plain = (type(None), bool, int, float, list, dict)
    return {
        name: copy.copy(value)
        for name, value in vars(module).items()
        if name.startswith("_") and name.isupper() and isinstance(value, plain)
    }


def _holders() -> list[tuple[Any, dict[str, Any]]]:
    """Every stateful module and class that this version of megatron-core has, with its state."""
    holders: list[tuple[Any, dict[str, Any]]] = []
    for name in _STATEFUL_MODULES:
        module = importlib.import_module(name)
        holders.append((module, _module_state(module)))
    for name, class_name, attribute in _STATEFUL_CLASSES:
        owner = getattr(importlib.import_module(name), class_name, None)
        if owner is not None and hasattr(owner, attribute):
            holders.append((owner, {attribute: copy.copy(getattr(owner, attribute))}))
    return holders


_PRISTINE = _holders()
_START_DIRECTORY = os.getcwd()
# A process without process groups has a handful.
_IDLE_THREADS = 16


def _free_distributed_optimizers() -> None:
    """Break the cycles that the garbage collector can't see, and so free their process groups.

    Shards of fp32 parameters are views with a history, whose nodes hold hooks, which hold the
    model. Each group that stays has three threads, one of which wakes up a hundred times a second.
    """
    for each in gc.get_objects():
        if isinstance(each, DistributedOptimizer):
            if "optimizer" in vars(each):  # else cleared before, and held by something else as well
                vars(each.optimizer).clear()
            vars(each).clear()
    gc.collect()


def reset_state() -> None:
    """Bring the process back to what it was before any test ran in it.

    Destroys every process group, restores megatron-core's globals (model-parallel groups,
    microbatch calculator, RNG tracker, rerun state machine, MoE and MTP trackers), torch's
    global modes, the working directory and warning filters, and seeds all generators alike.
    """
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    # destroy_model_parallel() forgets some of its own globals, hence the snapshot.
    for holder, state in _PRISTINE:
        for name, value in state.items():
            setattr(holder, name, copy.copy(value))
    gc.collect()  # groups and models in reference cycles keep sockets and memory
    if len(os.listdir("/proc/self/task")) > _IDLE_THREADS:
        _free_distributed_optimizers()

    os.chdir(_START_DIRECTORY)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)

    warnings.resetwarnings()
    warnings.simplefilter("ignore")


def _set_up(request: Request, rank: int, world_size: int) -> None:
    """Reset the process, take over the parent's environment and join a new process group."""
    reset_state()
    os.environ.clear()
    os.environ.update(
        request.environ,
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        **FIXED_ENVIRONMENT,
    )
    sys.path.extend(entry for entry in request.sys_path if entry not in sys.path)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(request.store, world_size),
        rank=rank,
        world_size=world_size,
        # The caller's clock decides: it names every rank and where it hangs.
        timeout=timedelta(seconds=request.timeout + 60),
    )


def _describe(error: BaseException) -> Failure:
    when = time.monotonic()
    try:
        pickled = pickle.dumps(error)
        # Exceptions with constructor arguments of their own often pickle but don't unpickle.
        pickle.loads(pickled)
    except Exception:
        pickled = None
    return Failure(
        summary="".join(traceback.format_exception_only(error)).strip(),
        traceback="".join(traceback.format_exception(error)).rstrip(),
        when=when,
        exception=pickled,
    )


def _call(payload: bytes) -> bytes:
    function: Callable[..., Any]
    function, args, kwargs = pickle.loads(payload)
    name = getattr(function, "__qualname__", function)
    result = function(*args, **kwargs)
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise TypeError(
            f"{name} returned a {type(result).__name__} that cannot be sent back "
            f"to the test ({error}); return numbers, arrays or tensors instead"
        ) from error


def _answer(request: Request, rank: int, world_size: int) -> Reply:
    try:
        _set_up(request, rank, world_size)
        return Reply(result=_call(request.payload))
    except BaseException as error:  # SystemExit and pytest.skip() are answers too
        return Reply(failure=_describe(error))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _die_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    mp_connection.wait([parent.sentinel])
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main(connection: mp_connection.Connection, rank: int, world_size: int, stack_path: str) -> None:
    """Serve requests until the pool closes the connection.

    Args:
        connection: where requests come from and replies go to.
        rank: this process's rank.
        world_size: number of ranks.
        stack_path: file that receives this process's Python stack on SIGUSR1.
    """
    # A session of its own: Ctrl-C reaches pytest alone, and the pool can end a rank together
    # with whatever it started (data-loader workers, managers).
    os.setsid()
    gc.freeze()  # what the fork server imported is never garbage: collections stay quick
    threading.Thread(target=_die_with_parent, name="die-with-parent", daemon=True).start()
    with Path(stack_path).open("w") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=False)
        connection.send("ready")
        while True:
            try:
                request = connection.recv()
            except EOFError:
                break
            connection.send(_answer(request, rank, world_size))
    # Not sys.exit(): other threads (gloo, a leaked loader) must not delay the end of the session.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
