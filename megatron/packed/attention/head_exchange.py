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

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron.packed.attention.communicator import Communicator, Form, Label, Pending, Task
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
    shapes = [(s[0].stop - s[0].start, x.shape[2]) for x, s in zip(tensors, slices, strict=True)]
    rows = exchange.member_rows

    def write(message: Tensor, place: int) -> None:
        for part, x, s in zip(split_columns(message, shapes), tensors, slices, strict=True):
            part.copy_(x[:, s[place]])

    form = _form_of(tensors[0], shapes)
    pending = _post(exchange, communicator, write, form, label)
    whole = form.empty(exchange.size * rows)
    places = [whole[place * rows :][:rows] for place in range(exchange.size)]
    write(places[exchange.place], exchange.place)
    yield pending
    for place, part in zip(_others(exchange), pending.parts(), strict=True):
        places[place].copy_(part)
    pending.release()
    if exchange.order is not None:
        whole = whole.index_select(0, torch.from_numpy(exchange.order).to(whole.device))
    return split_columns(whole, shapes)


def heads_to_tokens(
    exchange: HeadExchange,
    communicator: Communicator,
    tensors: Sequence[Tensor],
    joins: Sequence[Callable[[Sequence[Tensor]], Tensor]],
    label: Label,
) -> Task[list[Tensor]]:
    """The way back.

    Args:
        exchange: members and order.
        communicator: this rank's.
        tensors: `[size * member_rows, heads, d]` each, of one dtype, in order of position.
        joins: for each tensor, what makes one new tensor of what each member has of this rank's
            tokens, `[member_rows, heads, d]`.
        label: names the messages.

    Returns:
        What the joins give.
    """
    shapes = [(x.shape[1], x.shape[2]) for x in tensors]

    def rows_of(x: Tensor, place: int) -> Tensor:
        index = exchange.rows_of_member(place)
        if isinstance(index, slice):
            return x[index]
        return x.index_select(0, torch.from_numpy(index).to(x.device))

    def write(message: Tensor, place: int) -> None:
        for part, x in zip(split_columns(message, shapes), tensors, strict=True):
            part.copy_(rows_of(x, place))

    pending = _post(exchange, communicator, write, _form_of(tensors[0], shapes), label)
    by_member = [[rows_of(x, exchange.place) for x in tensors]] * exchange.size
    yield pending
    for place, part in zip(_others(exchange), pending.parts(), strict=True):
        by_member[place] = split_columns(part, shapes)
    joined = [join([parts[i] for parts in by_member]) for i, join in enumerate(joins)]
    pending.release()
    return joined


def join_heads(parts: Sequence[Tensor]) -> Tensor:
    """All heads, from the members that hold some of them each: `[rows, heads, d]`."""
    return torch.cat(list(parts), dim=1)


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


def _form_of(like: Tensor, shapes: Sequence[tuple[int, int]]) -> Form:
    return Form(sum(heads * width for heads, width in shapes), like.dtype, like.device)


def _others(exchange: HeadExchange) -> list[int]:
    """Places of the members that this rank exchanges messages with."""
    if not exchange.member_rows:
        return []
    return [place for place in range(exchange.size) if place != exchange.place]


def _post(
    exchange: HeadExchange,
    communicator: Communicator,
    write: Callable[[Tensor, int], None],
    form: Form,
    label: Label,
) -> Pending:
    """Send every other member what `write` puts into its message, and expect as much from it."""
    others, rows = _others(exchange), exchange.member_rows
    memory = communicator.outgoing(len(others) * rows, form, label)
    sends = []
    for number, place in enumerate(others):
        message = memory[number * rows :][:rows]
        write(message, place)
        sends.append((exchange.members[place], message))
    receives = [(exchange.members[place], rows) for place in others]
    return communicator.exchange(sends, receives, form, label)
