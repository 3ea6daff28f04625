"""Supervised fine-tuning on conversations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.packed.arguments.declare import flag

PROMPT_FORMATS = (
    "nemotron-h-aligned",
    "nemotron-nano-v2",
    "identity",
    "chatml",
    "chat-template",
)


@dataclass(frozen=True, kw_only=True)
class FineTuningConfig:
    """Supervised fine-tuning on conversations."""

    SECTION: ClassVar[str] = "fine-tuning"

    sft: bool = flag(
        "Train on the assistants' turns of conversations: JSON lines files, given where corpora "
        "are. With --use-packed-sequence they are packed whole, without it each has a row.",
        default=False,
    )
    sft_tokenizer_prompt_format: str = flag(
        "How conversations are written; chat-template is the tokenizer's own.",
        default="nemotron-h-aligned",
        choices=PROMPT_FORMATS,
    )
    sft_mock_dataset_config_json: str | None = flag(
        "Lengths of generated conversations.",
        refused="conversations aren't generated; give JSON lines files as --data-path",
    )
