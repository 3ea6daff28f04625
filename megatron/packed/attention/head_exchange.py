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

from torch import Tensor

from megatron.packed.attention.communicator import Communicator, Form, Label, Pending, Task
from megatron.packed.attention.plans.plan import HeadExchange
from megatron.packed.attention.row_copies import add_rows, copy_rows, laid_out_parts
from megatron.packed.attention.row_runs import RowRuns
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
    same = RowRuns.all(rows)

    def write(message: Tensor, place: int) -> None:
        for part, x, s in zip(laid_out_parts(message, shapes), tensors, slices, strict=True):
            copy_rows(part, x[:, s[place]], same)

    form = _form_of(tensors[0], shapes)
    pending = _post(exchange, communicator, write, form, label)
    wholes = laid_out_parts(form.empty(exchange.size * rows), shapes)
    for whole, x, s in zip(wholes, tensors, slices, strict=True):
        copy_rows(whole, x[:, s[exchange.place]], exchange.runs[exchange.place].inverse)
    yield pending
    for place, message in zip(_others(exchange), pending.parts(), strict=True):
        for whole, part in zip(wholes, laid_out_parts(message, shapes), strict=True):
            copy_rows(whole, part, exchange.runs[place].inverse)
    pending.release()
    return wholes


def heads_to_tokens(
    exchange: HeadExchange,
    communicator: Communicator,
    tensors: Sequence[Tensor],
    heads: Sequence[int],
    label: Label,
) -> Task[list[Tensor]]:
    """The way back. What several members hold of one head is summed up.

    Args:
        exchange: members and order.
        communicator: this rank's.
        tensors: `[size * member_rows, member's heads, d]` each, of one dtype, in order of position.
        heads: of each, on all members together.
        label: names the messages.

    Returns:
        `[member_rows, heads, d]` each.
    """
    shapes = [(x.shape[1], x.shape[2]) for x in tensors]

    def write(message: Tensor, place: int) -> None:
        for part, x in zip(laid_out_parts(message, shapes), tensors, strict=True):
            copy_rows(part, x, exchange.runs[place])

    pending = _post(exchange, communicator, write, _form_of(tensors[0], shapes), label)
    rows = exchange.member_rows
    joined = [x.new_empty(rows, n, x.shape[2]) for x, n in zip(tensors, heads, strict=True)]
    same = RowRuns.all(rows)

    def put(place: int, parts: Sequence[Tensor], runs: RowRuns) -> None:
        for to, part in zip(joined, parts, strict=True):
            slices = head_slices(to.shape[1], exchange.size)
            # In order of members, so that sums have the same bits every time.
            first = place == 0 or slices[place] != slices[place - 1]
            (copy_rows if first else add_rows)(to[:, slices[place]], part, runs)

    yield pending
    arrived = dict(zip(_others(exchange), pending.parts(), strict=True))
    for place in range(exchange.size):
        if place in arrived:
            put(place, laid_out_parts(arrived[place], shapes), same)
        else:
            put(place, tensors, exchange.runs[place])
    pending.release()
    return joined


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
