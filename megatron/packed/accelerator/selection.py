"""Choose the accelerator of this process and make megatron-core fit it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.packed.accelerator import cpu
from megatron.packed.errors import ConfigurationError


@dataclass(frozen=True)
class Accelerator:
    """The device one process trains on.

    Attributes:
        name: `cuda` or `cpu`.
        device: the torch device of this process.
        backend: the torch.distributed backend of its process groups.
    """

    name: str
    device: torch.device
    backend: str

    def synchronize(self) -> None:
        """Wait until queued device work is done (nothing to wait for on a CPU)."""
        if self.name == "cuda":
            torch.cuda.synchronize()

    @property
    def description(self) -> str:
        """One line for the start-up log."""
        if self.name == "cuda":
            return f"{torch.cuda.get_device_name(self.device)}, {self.backend}"
        return f"CPU, {torch.get_num_threads()} thread(s) per process, {self.backend}"


def select_accelerator(requested: str, local_rank: int = 0, backend: str = "nccl") -> Accelerator:
    """Pick the accelerator and prepare this process for it.

    Must run before the first megatron-core module is imported: on a CPU it installs the
    substitutions of `accelerator.cpu`.

    Args:
        requested: the value of `--accelerator`: `auto`, `cuda` or `cpu`.
        local_rank: rank of this process on its node; selects the CUDA device.
        backend: the value of `--distributed-backend`; a CPU always takes gloo.

    Returns:
        The accelerator of this process.

    Raises:
        ConfigurationError: CUDA was asked for and isn't there, or the node has fewer devices
            than processes.
    """
    match requested:
        case "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        case "cuda" | "cpu":
            name = requested
        case _:
            raise ConfigurationError(f"--accelerator {requested}: must be one of auto, cuda, cpu")
    if name == "cpu":
        cpu.install()
        return Accelerator("cpu", torch.device("cpu"), "gloo")
    if not torch.cuda.is_available():
        raise ConfigurationError(
            "--accelerator cuda: this PyTorch sees no CUDA device; use --accelerator cpu, or "
            "install a CUDA build of torch and check nvidia-smi"
        )
    if local_rank >= torch.cuda.device_count():
        raise ConfigurationError(
            f"--nproc-per-node: local rank {local_rank} has no device, this node has "
            f"{torch.cuda.device_count()}; start at most one process per device"
        )
    torch.cuda.set_device(local_rank)
    return Accelerator("cuda", torch.device("cuda", local_rank), backend)
