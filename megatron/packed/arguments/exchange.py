"""What a run's flags choose of the table of context-parallel helpers."""

from __future__ import annotations

from megatron.packed.arguments.config import Config
from megatron.packed.context_parallel.capabilities import Selection, select


def select_for(config: Config) -> Selection:
    """Helper, exchanges and partition by a run's configuration."""
    return select(
        config.packing.use_packed_sequence,
        config.model.attention_backend,
        config.parallel.cp_comm_type,
    )
