"""Parameter groups that differ in learning rate or epsilon alone, told apart in checkpoints."""

from __future__ import annotations

from megatron.core.optimizer import MegatronOptimizer

# By which megatron-core finds a group of a checkpoint again.
_IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")


def tell_groups_apart(optimizer: MegatronOptimizer) -> None:
    """Give groups that megatron-core would take for each other different names.

    It knows a group in a checkpoint by four of its settings. Groups that differ in others, in a
    learning rate of their own or in an epsilon, would be loaded into each other, or not at all.
    `lr_mult`, one of the four, has no other meaning: groups of one identity are numbered by it,
    in the order that they have on every rank.

    Args:
        optimizer: megatron-core's, a chain or a single one.
    """
    for member in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(member, "optimizer", None)
        seen: dict[tuple[object, ...], int] = {}
        for group in inner.param_groups if inner is not None else ():
            identity = tuple(group[key] for key in _IDENTITY)
            seen[identity] = seen.get(identity, 0) + 1
            if seen[identity] > 1:
                group["lr_mult"] = float(seen[identity])
