"""What of megatron-core's multi-token prediction is replaced, and from which source it was read.

The replacements are overridden methods in `mtp` and `gpt`. What they stand in for may change
under them without a name going away, so that `install` of `patches` would not notice: here is the
source that was read, as a checksum, and a test compares it with the installed one.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_MTP = "megatron.core.transformer.multi_token_prediction"
_GPT = "megatron.core.models.gpt.gpt_model"


@dataclass(frozen=True)
class Override:
    """A function of megatron-core that a subclass here replaces or relies on.

    Attributes:
        module: module of megatron-core.
        name: qualified name in it.
        reason: what is wrong with it for this project, or what is relied on.
        sources: checksum of its source by version of megatron-core, of those that were read.
    """

    module: str
    name: str
    reason: str
    sources: Mapping[str, str]

    def checksum(self) -> str:
        """Of the installed source, comments and layout included."""
        found: Any = importlib.import_module(self.module)
        for part in self.name.split("."):
            found = getattr(found, part)
        return hashlib.sha256(inspect.getsource(found).encode()).hexdigest()[:16]


OVERRIDES = (
    Override(
        module=_MTP,
        name="MultiTokenPredictionLayer._get_embeddings",
        reason=(
            "Rolls inputs and positions: with packs by a loop over documents that knows real "
            "boundaries only, with two messages a document under context parallelism. "
            "PackedMTPLayer takes the inputs that the batch brings."
        ),
        sources={"0.16.1": "cba92f93210d0a4e", "0.19.2": "0de994b5131c0a3d"},
    ),
    Override(
        module=_MTP,
        name="MultiTokenPredictionLayer._checkpointed_forward",
        reason=(
            "Hands everything to save_for_backward, which raises for packs, and leaves layers out "
            "with --recompute-method block. PackedMTPLayer saves tensors and captures the rest."
        ),
        sources={"0.16.1": "cb0c6d18d8984e52", "0.19.2": "feba180ff1a9d4c4"},
    ),
    Override(
        module=_GPT,
        name="GPTModel._postprocess",
        reason=(
            "Rolls labels and masks, multiplies by masks and divides by a rank's own count, which "
            "may be zero. PackedGPTModel sums and scales to the count of the global batch."
        ),
        sources={"0.16.1": "a5f7de0bfb1cad97", "0.19.2": "41700c5f809c197c"},
    ),
    Override(
        module=_MTP,
        name="MultiTokenPredictionLayer.forward",
        reason="Calls the two methods above with these names and hands ids on as they come back.",
        sources={"0.16.1": "539d95bc4ac2ee13", "0.19.2": "09140b455726abb5"},
    ),
    Override(
        module=_MTP,
        name="MultiTokenPredictionBlock.forward",
        reason="Hands ids from layer to layer, and lays hidden states of all depths end to end.",
        sources={"0.16.1": "a2d246ef82a4db34", "0.19.2": "8f66c7e0bd6bd7c2"},
    ),
    Override(
        module=_MTP,
        name="MTPLossAutoScaler",
        reason="Adds the gradient of a loss, times the schedule's scale of the main one.",
        sources={"0.16.1": "dcb0abf089224ff3", "0.19.2": "dcb0abf089224ff3"},
    ),
)
