"""Heads for tokens: the a2a of Ulysses, and of the inner half of a2a+p2p.

```
4 query heads, 2 key-value heads, 4 ranks          rank 0   rank 1   rank 2   rank 3
query head after the exchange                      0        1        2        3
key-value head after the exchange                  0        0        1        1     replicated
gradient of key-value head 0                       rank 0's and rank 1's, summed
```

Every message holds one member's tokens and another's heads. It goes through the executor's own
communicator, so a subgroup needs no process group of its own.

Source: DeepSpeed-Ulysses (Jacobs et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.packed.attention.communicator import Communicator, Label, Task
from megatron.packed.attention.plans.plan import HeadExchange
from megatron.packed.errors import ConfigurationError


def check_heads(heads: int, kv_heads: int, size: int) -> None:
    """Refuse head counts that can't be shared out.

    Args:
        heads: query heads of one tensor-parallel rank.
        kv_heads: key-value heads of one tensor-parallel rank.
        size: ranks of the exchange.

    Raises:
        ConfigurationError: where some rank would hold more heads than another, or query heads
            without their key-value head.
    """
    if heads % size:
        raise ConfigurationError(
            f"--cp-comm-type a2a shares {heads} query heads out over {size} ranks: use a number "
            "of heads per tensor-parallel rank that they divide, or --cp-comm-type p2p"
        )
    if kv_heads % size and size % kv_heads:
        raise ConfigurationError(
            f"--cp-comm-type a2a can neither share {kv_heads} key-value heads out over {size} "
            f"ranks nor give each to as many: use a --num-query-groups per tensor-parallel rank "
            "that is a multiple or a divisor of them, or --cp-comm-type p2p"
        )


def head_slices(heads: int, size: int) -> list[slice]:
    """Heads of each member; with fewer heads than members, neighbours hold the same one."""
    share = max(heads // size, 1)
    return [slice(m * heads // size, m * heads // size + share) for m in range(size)]


def tokens_to_heads(
    exchange: HeadExchange, communicator: Communicator, tensors: Sequence[Tensor], label: Label
) -> Task[list[Tensor]]:
    """Give away the other members' heads and get this member's for all tokens.

    Args:
        exchange: members and order.
        communicator: this rank's.
        tensors: `[member_rows, heads, d]` each, of one dtype.
        label: names the messages.

    Returns:
        `[size * member_rows, member's heads, d]` each, in order of position.
    """
    slices = [head_slices(x.shape[1], exchange.size) for x in tensors]
    rows = exchange.member_rows

    def message(place: int) -> Tensor:
        parts = [x[:, s[place]].flatten(1) for x, s in zip(tensors, slices, strict=True)]
        return torch.cat(parts, dim=1)

    own = message(exchange.place)
    buffer = own.new_empty(exchange.size * rows, own.shape[1])
    buffer[exchange.place * rows :][:rows] = own
    yield _post(exchange, communicator, message, buffer.split(rows) if rows else (), label)
    if exchange.order is not None:
        buffer = buffer.index_select(0, torch.from_numpy(exchange.order).to(buffer.device))
    return split_columns(
        buffer, [(s[0].stop - s[0].start, x.shape[2]) for x, s in zip(tensors, slices, strict=True)]
    )


def heads_to_tokens(
    exchange: HeadExchange, communicator: Communicator, tensors: Sequence[Tensor], label: Label
) -> Task[list[list[Tensor]]]:
    """The way back.

    Args:
        exchange: members and order.
        communicator: this rank's.
        tensors: `[size * member_rows, heads, d]` each, of one dtype, in order of position.
        label: names the messages.

    Returns:
        For each tensor, what each member has of this rank's tokens: `[member_rows, heads, d]`.
    """
    rows = exchange.member_rows
    wide = torch.cat([x.flatten(1) for x in tensors], dim=1)
    if exchange.order is not None:
        order = torch.from_numpy(exchange.order).to(wide.device)
        wide = torch.empty_like(wide).index_copy_(0, order, wide)
    parts = wide.split(rows) if rows else ()
    buffer = torch.empty_like(wide)
    buffers = list(buffer.split(rows)) if rows else []
    yield _post(exchange, communicator, lambda place: parts[place], buffers, label)
    buffer[exchange.place * rows :][:rows] = wide[exchange.place * rows :][:rows]
    shapes = [tuple(x.shape[1:]) for x in tensors]
    by_member = [split_columns(part, shapes) for part in buffers]
    return [[part[i] for part in by_member] for i in range(len(tensors))]


def sum_replicas(parts: Sequence[Tensor], heads: int) -> Tensor:
    """Gradient of key-value heads from the members that hold them: `[rows, heads, d]`."""
    copies = max(len(parts) // heads, 1)
    summed = []
    for start in range(0, len(parts), copies):
        total = parts[start]
        for part in parts[start + 1 : start + copies]:  # in order: the same bits every time
            total = total + part
        summed.append(total)
    return torch.cat(summed, dim=1)


def split_columns(buffer: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Views `[rows, heads, d]` of columns that lie side by side in `[rows, ...]`."""
    widths = [heads * width for heads, width in shapes]
    return [
        part.unflatten(1, shape)
        for part, shape in zip(buffer.split(widths, dim=1), shapes, strict=True)
    ]


def _post(exchange, communicator, message, buffers, label):
    """Send `message(place)` to every other member and fill the buffers from them."""
    others = [place for place in range(exchange.size) if place != exchange.place]
    if not exchange.member_rows:
        others = []
    sends = [(exchange.members[place], message(place).contiguous()) for place in others]
    receives = [(exchange.members[place], buffers[place]) for place in others]
    return communicator.exchange(sends, receives, label)
