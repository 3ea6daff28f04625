"""Maximal update parameterisation: what is tuned on a narrow model holds for a wide one.

With m the hidden size over that of the base model, hidden weights start with 1/sqrt(m) of their
standard deviation (`initialization.py`), learn with 1/m of the rate and of Adam's epsilon, logits
are multiplied by 1/m, and scores of attention by 1/d in place of 1/sqrt(d).

Source: Tensor Programs V (https://arxiv.org/abs/2203.03466); `use_mup` of megatron-core (0.19),
whose rules these are; 0.16 has none.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from torch import Tensor

from megatron.packed.arguments import Config


def attention_scale(config: Config) -> float | None:
    """Factor of plain heads' scores; None for 1/sqrt(d).

    Args:
        config: the run's configuration.
    """
    model = config.model
    if not model.use_mup:
        return None
    base = 1.0 if model.mup_base_head_dim is None else model.mup_base_head_dim**0.5
    return float(base / model.kv_channels**model.mup_attn_scale_power)


def multiply_ends(config: Config, model: torch.nn.Module) -> None:
    """Multiply the embeddings and logits of a stage, where its parameterisation asks for it.

    Args:
        config: the run's configuration.
        model: a GPTModel, one pipeline stage.
    """
    embedding, output = config.model.mup_embedding_mult, config.model.logit_multiplier
    if not config.model.use_mup:
        return
    if embedding != 1.0 and hasattr(model, "embedding"):
        model.embedding.register_forward_hook(lambda module, args, out: out * embedding)
    if output != 1.0 and hasattr(model, "output_layer"):

        def scale(module: torch.nn.Module, args: Any, out: tuple[Tensor, Any]) -> Any:
            return out[0] * output, out[1]

        model.output_layer.register_forward_hook(scale)


def optimizer_overrides(config: Config, core: OptimizerConfig) -> dict[ParamKey, Any] | None:
    """Rates and epsilons by parameter, for `get_megatron_optimizer`; None for its own default.

    Args:
        config: the run's configuration.
        core: megatron-core's form of its optimizer.
    """
    width = config.model.width_mult
    if width == 1.0:
        return None
    overrides = dict(get_standard_config_overrides(core))

    def own_rate(parameter: torch.nn.Parameter) -> bool:
        """Whether --decoupled-lr sets the rate already."""
        apart = getattr(parameter, "is_embedding_or_output_parameter", False)
        return core.decoupled_lr is not None and apart

    def add(name: str, matches: Any, **values: Any) -> None:
        predicate = ParamWithNamePredicate(name=name, fn=matches)
        overrides[ParamKey(with_name_predicate=predicate)] = values

    if core.optimizer == "sgd":
        add(
            "mup_vectors",
            lambda p, name: not _is_matrix(p, name) and not own_rate(p),
            max_lr=core.lr * width,
            min_lr=core.min_lr * width,
        )
        return overrides
    add(
        "mup_matrices",
        lambda p, name: _is_matrix(p, name) and not own_rate(p),
        max_lr=core.lr / width,
        min_lr=core.min_lr / width,
    )
    if core.optimizer == "adam":
        add("mup_epsilon", _is_matrix, eps=core.adam_eps / width)
    return overrides


def _is_matrix(parameter: torch.nn.Parameter, name: str) -> bool:
    """Whether both dimensions of a weight grow with the width: embeddings, biases, gains don't."""
    embedding = "embedding" in name or getattr(parameter, "shared_embedding", False)
    return parameter.dim() > 1 and not embedding
