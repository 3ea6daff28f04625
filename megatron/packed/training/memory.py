"""Memory of this process, under upstream's TensorBoard names."""

from __future__ import annotations

import resource

import psutil
import torch


def memory_counters(device: torch.device) -> dict[str, float]:
    """Bytes in use.

    Args:
        device: CUDA counts device memory, a CPU the resident set of the process.

    Returns:
        Values by TensorBoard name.
    """
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        return {
            "mem-reserved-bytes": stats["reserved_bytes.all.current"],
            "mem-allocated-bytes": stats["allocated_bytes.all.current"],
            "mem-max-allocated-bytes": stats["allocated_bytes.all.peak"],
            "mem-allocated-count": stats["allocation.all.current"],
        }
    peak_kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "mem-allocated-bytes": psutil.Process().memory_info().rss,
        "mem-max-allocated-bytes": peak_kibibytes * 1024,
    }
