"""The one room that lets unmodified megatron-core run on a CPU.

megatron-core asks `torch.cuda` for the current device, streams, events and random states, and
allocates with `device="cuda"`. On a machine without CUDA every one of these requests has a plain
meaning: the device is the CPU, work is already finished when a call returns, and the random state
is the CPU generator's. `install()` gives `torch` those meanings, once per process, before
megatron-core is imported. Nothing here touches numerics.

Each substitution says who needs it:

===============================  ==================================================================
substitution                     needed by
===============================  ==================================================================
current_device -> cpu            tensor_parallel.layers, p2p_communication, timers, rotary embedding
synchronize, empty_cache: no-op  timers, p2p_communication, optimizer offload
streams and events: no-op        distributed_data_parallel, param_and_grad_buffer
nvtx ranges: no-op               utils.nvtx_range_push (CPU builds of torch raise)
random states -> CPU generator   tensor_parallel.random (RNG tracker), activation recomputation
Tensor.cuda() -> identity        tied embeddings, grad scaler, data broadcast
factories: device="cuda" -> cpu  schedules (token count), optimizers (overflow flag), clip_grads
Tensor.type() names              float16 optimizers and clip_grads compare with 'torch.cuda.*'
torch.compile -> eager           megatron.core.jit: compiling fusions costs minutes on a laptop
===============================  ==================================================================
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

_CPU = torch.device("cpu")
_MARKER = "_megatron_packed_cpu_facade"

# torch functions that take `device=` and are called with a CUDA device by megatron-core.
_FACTORIES = (
    "arange",
    "empty",
    "empty_like",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "randint",
    "randn",
    "randperm",
    "tensor",
    "zeros",
    "zeros_like",
)


class _Stream:
    """A stream on which everything has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = _CPU

    def wait_stream(self, stream: Any) -> None:
        """Other streams have nothing pending."""

    def wait_event(self, event: Any) -> None:
        """Events are complete when they are recorded."""

    def record_event(self, event: Any = None) -> Any:
        """Return an event that is already complete."""
        return event if event is not None else _Event()

    def synchronize(self) -> None:
        """Nothing is pending."""

    def query(self) -> bool:
        """Always finished."""
        return True


class _Event:
    """An event that is complete as soon as it is recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Recording completes it."""

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Always complete."""
        return True


@contextlib.contextmanager
def _stream_context(stream: Any = None) -> Iterator[None]:
    yield


def _no_op() -> Callable[..., None]:
    """A new function that does nothing: torch's tracer keeps tables of functions by identity."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    return nothing


def _is_cuda(device: Any) -> bool:
    if device is None or isinstance(device, int):
        return False
    return (device if isinstance(device, str) else device.type).startswith("cuda")


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a torch factory so that a CUDA `device=` means the CPU."""

    @functools.wraps(factory)
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return wrapper


def _eager(model: Any = None, **kwargs: Any) -> Any:
    """Stand in for torch.compile, as a call and as a decorator with arguments."""
    return model if model is not None else (lambda function: function)


def _install_device() -> None:
    cuda = torch.cuda
    cuda.current_device = lambda: _CPU  # type: ignore[assignment,return-value]
    cuda.set_device = _no_op()
    cuda.synchronize = _no_op()
    cuda.empty_cache = _no_op()
    cuda.Stream = _Stream  # type: ignore[misc,assignment]
    cuda.Event = _Event  # type: ignore[misc,assignment]
    cuda.stream = _stream_context  # type: ignore[assignment]
    cuda.current_stream = lambda device=None: _Stream()  # type: ignore[assignment,return-value]
    cuda.default_stream = lambda device=None: _Stream()  # type: ignore[assignment,return-value]
    cuda.nvtx.range_push = _no_op()
    cuda.nvtx.range_pop = _no_op()


def _install_random_states() -> None:
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda device=None: torch.random.get_rng_state()
        module.set_rng_state = lambda state, device=None: torch.random.set_rng_state(state)
        module.manual_seed = lambda seed: torch.default_generator.manual_seed(seed) and None


def _install_tensors() -> None:
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self

    native_to = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and (isinstance(args[0], (str, torch.device))):
            if _is_cuda(args[0]):
                args = (_CPU, *args[1:])
        elif _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return native_to(self, *args, **kwargs)

    native_type = torch.Tensor.type

    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return native_type(self, *args, **kwargs)
        return native_type(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.cuda = cuda  # type: ignore[method-assign]
    torch.Tensor.to = to  # type: ignore[method-assign]
    torch.Tensor.type = tensor_type  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda self, *a, **k: self  # type: ignore[method-assign]


def _install_core_random() -> None:
    """Point the RNG tracker's own state accessors at the CPU generator.

    They are module functions of megatron.core.tensor_parallel.random that reach past
    `torch.cuda` into per-device generators. That module also keeps the CPU state beside the CUDA
    state, restores both, and warns when the CPU state moves inside a CUDA context. Here the two
    are one generator, handled as the CUDA one; so the module sees a CPU state that never moves.
    """
    from megatron.core.tensor_parallel import random

    def get_state(
        device: Any = "cuda", clone: bool = False, graph_safe: bool = False
    ) -> torch.Tensor:
        return torch.random.get_rng_state()

    def set_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.random.set_rng_state(new_state)

    random._get_cuda_rng_state = get_state
    random._set_cuda_rng_state = set_state

    class _Torch:
        """`torch` as that module sees it: the separate CPU state is a constant."""

        _constant = torch.zeros(1, dtype=torch.uint8)

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def get_rng_state(self) -> torch.Tensor:
            return self._constant

        def set_rng_state(self, state: torch.Tensor) -> None:
            """The one generator is restored as the CUDA state."""

    random.torch = _Torch()  # type: ignore[assignment]


def keep_freed_memory() -> None:
    """Let glibc keep large freed blocks instead of returning them to the system.

    By default every tensor over 32 MiB is mapped anew and its pages are zeroed again, once a
    layer and step: a 64 MiB addition takes three times as long. Elsewhere than on glibc nothing
    is changed.
    """
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)


def install() -> None:
    """Give `torch.cuda` its CPU meaning in this process; calling it again does nothing.

    Call it before megatron-core is imported: functions that its modules have wrapped in
    torch.compile by then would still be compiled.
    """
    if getattr(torch, _MARKER, False):
        return
    setattr(torch, _MARKER, True)
    keep_freed_memory()
    torch.compile = _eager  # type: ignore[assignment]
    _install_device()
    _install_random_states()
    _install_tensors()
    _install_core_random()
