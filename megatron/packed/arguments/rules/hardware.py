"""Rules that depend on the accelerator."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.packed.arguments.config import Config


def attention_dropout_on_cpu(config: Config) -> Iterator[str]:
    rate = config.model.attention_dropout
    if config.device_type == "cpu" and rate:
        yield (
            f"--attention-dropout {rate:g}: must be 0 on a CPU, whose exact attention has no "
            "dropout; add --attention-dropout 0.0 (--hidden-dropout works)"
        )


RULES = (attention_dropout_on_cpu,)
