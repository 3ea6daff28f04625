"""The parity matrix: two tiny models, one order of data, and every way to lay them out."""

from __future__ import annotations

import inspect
import pprint
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from tests.distributed.documents import Piece, piece
from tests.distributed.harness import sample

STEPS, BATCH, SEQ, EOD = 20, 4, 64, 256

COMMON = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 "
    f"--seq-length {SEQ} --mock-data --tokenizer-type ByteTokenizer --num-workers 0 --threads 1 "
    "--make-vocab-size-divisible-by 4 --attention-dropout 0 --hidden-dropout 0 "
    f"--global-batch-size {BATCH} --train-iters {STEPS} --lr 1e-3 --lr-decay-style constant "
    "--eval-iters 0 --log-interval 20 --position-embedding-type rope --normalization RMSNorm "
    "--swiglu --group-query-attention --num-query-groups 2 --disable-bias-linear "
    "--untie-embeddings-and-output-weights "
)
# The balancing loss looks at each document by itself, so that it is one objective on all layouts.
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type seq_aux_loss "
    "--moe-aux-loss-coeff 0.02 --moe-z-loss-coeff 0.01 "
)
MODELS = {"dense": COMMON, "experts": COMMON + EXPERTS}

PACKED = "--use-packed-sequence "
# Rows with the mask of their documents; the loss is counted over the global batch, as in packs.
ROWS = "--reset-position-ids --reset-attention-mask --eod-mask-loss --calculate-per-token-loss "
TP2 = "--tensor-model-parallel-size 2 "
SP = TP2 + "--sequence-parallel "
PP2, PP4 = "--pipeline-model-parallel-size 2 ", "--pipeline-model-parallel-size 4 "
VPP2 = PP2 + "--num-virtual-stages-per-pipeline-rank 2 "
SHARDED = "--use-distributed-optimizer "
CP2, CP4 = "--context-parallel-size 2 ", "--context-parallel-size 4 "
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
HIERARCHY = "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2 "
EP2, EP4 = "--expert-model-parallel-size 2 ", "--expert-model-parallel-size 4 "


@dataclass(frozen=True)
class Layout:
    """One way to train.

    Attributes:
        name: as the matrix shows it.
        group: what it is about.
        processes: how many.
        flags: besides the model's.
        model: of `MODELS`.
        often: part of the default test suite.
    """

    name: str
    group: str
    processes: int
    flags: str
    model: str = "dense"
    often: bool = False


def _layouts() -> Iterator[Layout]:
    one, two = "--micro-batch-size 1 ", "--micro-batch-size 2 "
    four = "--micro-batch-size 4 "
    packs, rows = PACKED + two, ROWS + two

    for name, flags, often in (
        ("one pack of 4 rows", PACKED + four, True),
        ("2 packs of 2 rows", packs, False),
        ("4 packs of a row", PACKED + one, True),
        ("BSHD, 4 rows", ROWS + four, True),
        ("BSHD, row by row", ROWS + one, False),
        ("every segment aligned", packs + "--packing-alignment segment", False),
        ("the pack aligned", packs + "--packing-alignment pack", False),
        ("capacity of 192", packs + "--packed-sequence-capacity 192", False),
        ("recompute", packs + RECOMPUTE, False),
        ("selective recompute", packs + "--recompute-granularity selective", False),
        ("recompute, BSHD", rows + RECOMPUTE, False),
    ):
        yield Layout(name, "one process", 1, flags, often=often)

    for name, processes, flags, often in (
        ("TP2", 2, packs + TP2, False),
        ("TP2 SP", 2, packs + SP, False),
        ("TP2 SP, every segment aligned", 2, packs + SP + "--packing-alignment segment", False),
        ("TP2 SP, BSHD", 2, rows + SP, True),
        ("TP2 SP, recompute", 2, packs + SP + RECOMPUTE, False),
        ("TP4 SP", 4, packs + SP.replace("size 2", "size 4"), False),
        ("DP2", 2, packs, False),
        ("DP2, BSHD", 2, rows, False),
        ("DP2, sharded optimizer", 2, packs + SHARDED, True),
        ("DP4, sharded optimizer", 4, PACKED + one + SHARDED, False),
        ("PP2", 2, packs + PP2, False),
        ("PP2, BSHD", 2, rows + PP2, True),
        ("PP2 VPP2", 2, packs + VPP2, True),
        ("PP2 VPP2, capacity of 192", 2, packs + VPP2 + "--packed-sequence-capacity 192", False),
        ("PP4", 4, PACKED + one + PP4, False),
        ("TP2 SP PP2 VPP2", 4, packs + SP + VPP2, True),
        ("TP2 SP DP2, sharded optimizer", 4, packs + SP + SHARDED, False),
        ("PP2 DP2, sharded optimizer", 4, PACKED + one + PP2 + SHARDED, False),
    ):
        yield Layout(name, "tensor, data, pipeline", processes, flags, often=often)

    exchanges = {
        "ring": "--cp-comm-type p2p ",
        "striped": "--cp-comm-type striped ",
        "all-gather": "--cp-comm-type all_gather ",
        "a2a": "--cp-comm-type a2a ",
        "dispatch": "--cp-comm-type dispatch --magi-attn-chunk-size 8 ",
    }
    for size, cp in ((2, CP2), (4, CP4)):
        for name, flags in exchanges.items():
            often = size == 2 and name != "striped"
            yield Layout(f"CP{size} {name}", "context", size, packs + cp + flags, often=often)
    for name, processes, flags in (
        ("CP2 ring, BSHD", 2, rows + CP2),
        ("CP2 a2a, BSHD", 2, rows + CP2 + exchanges["a2a"]),
        ("CP4 striped, BSHD", 4, rows + CP4 + exchanges["striped"]),
        ("CP4 ring, BSHD", 4, rows + CP4),
        ("CP2 ring, every segment aligned", 2, packs + CP2 + "--packing-alignment segment"),
        ("CP2 ring and a2a by layer", 2, packs + CP2 + "--cp-comm-type p2p a2a p2p a2a"),
        ("CP2 ring, recompute", 2, packs + CP2 + RECOMPUTE),
        ("CP2 dispatch, one pack of 4 rows", 2, PACKED + four + CP2 + exchanges["dispatch"]),
        ("CP2 ring TP2 SP", 4, packs + CP2 + SP),
        ("CP2 a2a TP2", 4, packs + CP2 + TP2 + exchanges["a2a"]),
        ("CP2 dispatch PP2", 4, packs + CP2 + PP2 + exchanges["dispatch"]),
        ("CP2 ring PP2 VPP2", 4, packs + CP2 + VPP2),
        ("CP2 ring DP2, sharded optimizer", 4, packs + CP2 + SHARDED),
        ("CP2 all-gather DP2", 4, packs + CP2 + exchanges["all-gather"]),
    ):
        yield Layout(name, "context", processes, flags)
    yield Layout("CP4 a2a+p2p", "context", 4, packs + CP4 + HIERARCHY, often=True)

    for name, processes, flags, often in (
        ("experts, 2 packs", 1, packs, True),
        ("experts, one pack", 1, PACKED + four, False),
        ("experts, recompute", 1, packs + RECOMPUTE, False),
        ("EP2", 2, packs + EP2, True),
        ("EP2, sharded optimizer", 2, packs + EP2 + SHARDED, True),
        ("EP2, all-gather", 2, packs + EP2 + "--moe-token-dispatcher-type allgather", False),
        ("EP4", 4, PACKED + one + EP4, False),
        ("experts, DP2", 2, packs, False),
        ("experts, TP2 SP", 2, packs + SP, False),
        ("experts, CP2 ring", 2, packs + CP2, False),
        ("EP2 CP2 ring", 2, packs + EP2 + CP2, True),
        ("EP2 TP2 SP", 4, packs + EP2 + SP, False),
        ("EP2 CP2 dispatch DP2", 4, packs + EP2 + CP2 + exchanges["dispatch"], False),
        ("EP2 PP2 VPP2", 4, PACKED + one + EP2 + VPP2, False),
    ):
        yield Layout(name, "experts", processes, flags, "experts", often)


LAYOUTS = tuple(_layouts())


# ---- data ----------------------------------------------------------------------------------------


def _documents() -> Iterator[list[int]]:
    """Lines and paragraphs of real source text, one after the other, for ever."""
    text = inspect.getsource(textwrap) + inspect.getsource(pprint)
    for epoch in count():
        for number, part in enumerate(text.split("\n\n" if epoch % 2 else "\n")):
            if part.strip() and (epoch % 2 or number % 3):
                yield [*part.encode(), EOD]
            elif not number % 9:
                yield [EOD]  # a document of nothing but its end


def row_ids(rows: int = STEPS * BATCH) -> list[list[int]]:
    """Real ids of each row, at most S + 1: most full, some with a tail of padding."""
    stream = (each for document in _documents() for each in document)
    result, first = [], next(stream)
    for number in range(rows):
        ids = [first, *(next(stream) for _ in range(SEQ))]
        first = ids[-1]
        result.append(ids[:37] if number % 7 == 3 else ids)
    return result


def samples() -> list[dict[str, Any]]:
    """The rows as the program reads them; padding holds an id that is in use elsewhere."""
    rows = [sample(ids, SEQ) for ids in row_ids()]
    for row in rows:
        row["text"] = np.where(row["text"] < 0, ord("e"), row["text"])
    return rows


def pieces_of(ids: list[int]) -> list[Piece]:
    """Documents of a row and what each position shall predict, found apart from the product."""
    inputs, pieces, begin = ids[:SEQ], [], 0
    for end in [n + 1 for n, each in enumerate(inputs) if each == EOD] + [len(inputs)]:
        if begin < end:
            goes_on = end == SEQ < len(ids) and inputs[-1] != EOD
            pieces.append(piece(*inputs[begin:end], then=ids[SEQ] if goes_on else None))
        begin = end
    return pieces
