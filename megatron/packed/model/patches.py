"""Functions of megatron-core that are replaced at run time, each with its reason.

megatron-core is used unmodified from PyPI; where a function is not reachable by subclassing, one
entry here replaces it. `install` fails loudly when a name is gone, so that a new version of
megatron-core can't silently bring the old behaviour back.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

from megatron.packed.accelerator.compat import compiles_recomputation
from megatron.packed.model.activations import bias_swiglu_impl
from megatron.packed.model.recomputation import (
    PlainCheckpointWithoutOutput,
    checkpoint,
    recomputed_storage,
)
from megatron.packed.model.rotary import apply_rotary_pos_emb
from megatron.packed.model.uneven import gather_along_first_dim, reduce_scatter_along_first_dim


@dataclass(frozen=True)
class Patch:
    """One replaced name.

    Attributes:
        module: Module of megatron-core whose name is bound anew.
        name: The function's or constant's name there.
        replacement: What takes its place; calls it doesn't mean go to the original.
        reason: Why subclassing does not do.
        versions: Versions of megatron-core in which this was checked.
    """

    module: str
    name: str
    replacement: Any
    reason: str
    versions: str


PATCHES = (
    Patch(
        module="megatron.core.tensor_parallel",
        name="checkpoint",
        replacement=checkpoint,
        reason=(
            "TransformerLayer recomputes its MLP by this name. Upstream's makes the bias that the "
            "MLP returns part of its own history, and the backward pass never ends."
        ),
        versions="0.16.1, 0.19.2",
    ),
    Patch(
        module="megatron.core.tensor_parallel",
        name="CheckpointWithoutOutput",
        replacement=PlainCheckpointWithoutOutput,
        reason=(
            "TransformerLayer and the experts make one by its name there, without fp8, and it then "
            "asks TransformerEngine whether fp8 is on: a NameError without that package."
        ),
        versions="0.16.1, 0.19.2",
    ),
    Patch(
        module="megatron.core.transformer.attention",
        name="apply_rotary_pos_emb",
        replacement=apply_rotary_pos_emb,
        reason=(
            "Attention.forward calls it by its module-level name. Upstream's derives positions "
            "from boundaries and row order; ours takes those of the batch, and passes upstream's "
            "own frequency layout on to upstream's function."
        ),
        versions="0.16.1, 0.19.2",
    ),
    Patch(
        module="megatron.core.transformer.multi_latent_attention",
        name="apply_rotary_pos_emb",
        replacement=apply_rotary_pos_emb,
        reason=(
            "MLASelfAttention calls it by its module-level name, with positions derived from "
            "boundaries as in Attention."
        ),
        versions="0.16.1, 0.19.2",
    ),
    Patch(
        module="megatron.core.transformer.multi_latent_attention",
        name="HAVE_TE",
        replacement=importlib.util.find_spec("transformer_engine") is not None,
        reason=(
            "The module takes TransformerEngine for installed whenever megatron-core's adapter can "
            "be imported, which it can without; then it asks whether a layer is an instance of "
            "None. 0.19 asks for the package, to the same effect."
        ),
        versions="0.16.1, 0.19.2",
    ),
    Patch(
        module="megatron.core.transformer.mlp",
        name="bias_swiglu_impl",
        replacement=bias_swiglu_impl,
        reason=(
            "MLP.forward calls it by its module-level name, where bias_activation_fusion is set. "
            "On a CPU upstream's needs a compiler at run time, or takes ten passes over memory; "
            "other devices and dtypes, and FP8 storage, go on to upstream's function."
        ),
        versions="0.16.1, 0.19.2",
    ),
    *(
        Patch(
            module="megatron.core.tensor_parallel.mappings",
            name=name,
            replacement=replacement,
            reason=(
                "The exchange of tokens among ranks that share an expert's weights calls it inside "
                "an autograd function. gloo gathers equal parts only; CUDA tensors and equal parts "
                "go on to upstream's function."
            ),
            versions="0.16.1, 0.19.2",
        )
        for name, replacement in (
            ("_gather_along_first_dim", gather_along_first_dim),
            ("_reduce_scatter_along_first_dim", reduce_scatter_along_first_dim),
        )
    ),
    *(
        Patch(
            module="megatron.core.tensor_parallel.random",
            name=name,
            replacement=recomputed_storage,
            reason=(
                "CheckpointWithoutOutput calls it by its name there, and it compiles an extension "
                "in the middle of training, which needs ninja. CUDA tensors go on to it."
            ),
            versions="0.19.2",
        )
        for name in ("_get_share_storage",)
        if compiles_recomputation()
    ),
)


def install() -> None:
    """Apply every patch; a second call changes nothing.

    Raises:
        ImportError: If a patched name does not exist in the installed megatron-core.
    """
    for patch in PATCHES:
        module = importlib.import_module(patch.module)
        if not hasattr(module, patch.name):
            raise ImportError(
                f"{patch.module} has no {patch.name}: this megatron-core is newer than the "
                f"versions checked ({patch.versions}); install one of those"
            )
        setattr(module, patch.name, patch.replacement)
