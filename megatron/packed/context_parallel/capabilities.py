"""Which helper and which exchange a run's flags choose, and what each can do: one table.

The rules on the command line, the helpers and `docs/context_parallel.md` all read it. It imports
nothing of this package, so that the command line, below everything, can have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Communication:
    """One value of `--cp-comm-type`.

    Attributes:
        name: the value.
        partition: how tokens are spread over ranks.
        any_partition: it runs just as well on the partition of another exchange.
        shares_heads: ranks swap tokens for heads, so that head counts matter.
        takes_sizes: it needs `--hierarchical-context-parallel-sizes`.
        takes_chunks: it honours `--magi-attn-chunk-size`.
        travels: what is sent, for the table.
        transformer_engine: TransformerEngine's own attention runs it, too: "yes", "windows" where
            sliding windows included, or "no".
        magi: the package magi_attention runs it, too.
    """

    name: str
    partition: str
    travels: str
    any_partition: bool = False
    shares_heads: bool = False
    takes_sizes: bool = False
    takes_chunks: bool = False
    transformer_engine: str = "no"
    magi: bool = False

    @property
    def pads_segments(self) -> bool:
        """Whether every segment is padded to a multiple, not the pack alone."""
        return self.partition == "zigzag"


COMMUNICATIONS = {
    each.name: each
    for each in (
        Communication(
            "p2p", "zigzag", "needed keys, one exchange a peer", transformer_engine="yes"
        ),
        Communication(
            "all_gather", "zigzag", "needed keys, one exchange", transformer_engine="windows"
        ),
        Communication("striped", "striped", "needed keys, one exchange a peer"),
        Communication(
            "a2a",
            "contiguous",
            "heads",
            any_partition=True,
            shares_heads=True,
            transformer_engine="windows",
        ),
        Communication(
            "a2a+p2p",
            "zigzag",
            "heads in groups, needed keys between them",
            shares_heads=True,
            takes_sizes=True,
        ),
        Communication(
            "dispatch",
            "dispatch",
            "needed keys, one exchange a peer",
            takes_chunks=True,
            magi=True,
        ),
    )
}


@dataclass(frozen=True)
class Capability:
    """What one helper supports.

    Attributes:
        helper: class name.
        packed: it serves packs (THD); else rows (BSHD).
        backends: values of `--attention-backend` that choose it; empty for any.
        communications: exchanges it runs, its default first.
        mtp: it cuts the labels of multi-token-prediction depths.
    """

    helper: str
    packed: bool
    backends: tuple[str, ...]
    communications: tuple[str, ...]
    mtp: bool

    def partition(self, communications: tuple[str, ...]) -> str | None:
        """Token partition that all of some exchanges run on; None where they don't agree."""
        kinds = [COMMUNICATIONS[name] for name in communications]
        wanted = {each.partition for each in kinds if not each.any_partition}
        if not wanted:
            # Rows keep the layout of the other exchanges: contiguous shares of a batch would hand
            # out whole rows.
            return kinds[0].partition if self.packed else "zigzag"
        return wanted.pop() if len(wanted) == 1 else None


CAPABILITIES = (
    Capability(
        helper="ContextParallelHelper",
        packed=False,
        backends=(),
        communications=("p2p", "all_gather", "striped", "a2a", "a2a+p2p"),
        mtp=True,
    ),
    Capability(
        helper="RingAttnContextParallelHelper",
        packed=True,
        backends=("flash", "flash2", "fused", "unfused", "local", "auto"),
        communications=("p2p", "all_gather", "striped", "a2a+p2p", "a2a"),
        mtp=True,
    ),
    Capability(
        helper="UlyssesContextParallelHelper",
        packed=True,
        backends=("flex",),
        communications=("a2a",),
        mtp=True,
    ),
    Capability(
        helper="MagiAttnContextParallelHelper",
        packed=True,
        backends=("magi",),
        communications=("dispatch", "a2a"),
        mtp=True,
    ),
)


@dataclass(frozen=True)
class Selection:
    """What a run's flags choose.

    Attributes:
        capability: the helper.
        communications: its exchange, or one a layer.
        partition: token partition of all layers; None where they don't agree.
    """

    capability: Capability
    communications: tuple[str, ...]
    partition: str | None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The different exchanges, in order of first use."""
        return tuple(dict.fromkeys(self.communications))


def select(packed: bool, backend: str, asked: tuple[str, ...] | None) -> Selection:
    """Choose helper, exchanges and partition.

    Args:
        packed: `--use-packed-sequence`.
        backend: `--attention-backend`.
        asked: `--cp-comm-type`, which overrides the backend; None where it isn't given.
    """
    if asked is None:
        able = next(
            each
            for each in CAPABILITIES
            if each.packed == packed and (not each.backends or backend in each.backends)
        )
        asked = able.communications[:1]
    else:
        able = _helper_of(packed, tuple(dict.fromkeys(asked)))
    return Selection(able, asked, able.partition(asked))


def _helper_of(packed: bool, kinds: tuple[str, ...]) -> Capability:
    """The helper whose default is asked for; one that can do all of it, where there is one."""
    choices = [each for each in CAPABILITIES if each.packed == packed]
    able = [each for each in choices if set(kinds) <= set(each.communications)]
    able = able or [each for each in choices if kinds[0] in each.communications] or choices
    return next((each for each in able if each.communications[0] in kinds), able[0])


def unsupported(selection: Selection) -> Iterator[str]:
    """Say which of the chosen exchanges the helper lacks, or can't combine."""
    able = selection.capability
    for name in selection.kinds:
        if name not in able.communications:
            reason = "" if able.packed else "; it needs --use-packed-sequence"
            yield (
                f"--cp-comm-type {name}: {able.helper} has no such exchange, it has "
                f"{', '.join(able.communications)}{reason}"
            )
            return
    if selection.partition is None:
        pairs = ", ".join(f"{name} {COMMUNICATIONS[name].partition}" for name in selection.kinds)
        yield (
            f"--cp-comm-type {' '.join(selection.kinds)}: all layers share one partition of the "
            f"tokens, and these want different ones ({pairs}); a2a goes with any of them"
        )


@dataclass(frozen=True)
class AttentionShape:
    """What an external engine has to compute, in plain numbers.

    Attributes:
        heads: query heads of one tensor-parallel rank.
        kv_heads: key-value heads of one tensor-parallel rank.
        width: channels of a query or key head.
        value_width: channels of a value head.
        cp_size: context-parallel ranks.
        windows: some layer has a sliding window.
        sinks: the softmax has sinks (`--softmax-type` off-by-one or learnable).
        cut_rows: rows attend inside their documents alone (`--reset-attention-mask`).
        fp8: matrix products are in FP8.
        half: tensors are bf16 or fp16.
    """

    heads: int
    kv_heads: int
    width: int
    value_width: int
    cp_size: int
    windows: bool = False
    sinks: bool = False
    cut_rows: bool = False
    fp8: bool = False
    half: bool = True


def transformer_engine_lacks(selection: Selection, shape: AttentionShape) -> str | None:
    """Why TransformerEngine's attention can't run this layout; None where it can."""
    kinds = [COMMUNICATIONS[name] for name in selection.kinds]
    packed = selection.capability.packed
    lacking = [each.name for each in kinds if each.transformer_engine == "no"]
    if lacking:
        return f"it has no exchange like {lacking[0]}"
    if selection.partition != "zigzag":
        return f"it wants the zigzag of every segment, not the partition {selection.partition}"
    if shape.windows and any(each.transformer_engine != "windows" for each in kinds):
        return "it has sliding windows with all_gather and a2a alone"
    if shape.sinks:
        return "its softmax is asked for sinks, which no test here has tried"
    ranks = shape.cp_size if any(each.shares_heads for each in kinds) else 1
    if shape.heads % ranks or shape.kv_heads % ranks:
        return (
            f"its a2a wants {shape.heads} heads and {shape.kv_heads} key-value heads to be "
            f"multiples of {ranks} ranks"
        )
    if packed and shape.fp8:
        return "it has no FP8 with packed sequences"
    if not packed and shape.cut_rows:
        return "rows that attend inside their documents alone are none of its formats"
    return None if shape.half else "it computes in bf16 and fp16 alone"


def magi_lacks(selection: Selection, shape: AttentionShape, alignment_mode: str) -> str | None:
    """Why the package magi_attention can't run this layout; None where it can."""
    others = [name for name in selection.kinds if not COMMUNICATIONS[name].magi]
    if others:
        return f"it has no exchange like {others[0]}"
    if alignment_mode == "segment":
        return "it wants packs that are padded at their end alone"
    if shape.sinks:
        return "its softmax is asked for sinks, which no test here has tried"
    if shape.width != shape.value_width:
        return f"heads of {shape.width} and {shape.value_width} channels differ"
    if shape.width % 8 or shape.width > 192:
        return f"heads of {shape.width} channels are no multiple of 8 up to 192"
    return None if shape.half else "it computes in bf16 and fp16 alone"


def capability_table() -> str:
    """Both tables in Markdown, for the documentation."""
    helpers = [
        (
            f"`{each.helper}`",
            "packs (THD)" if each.packed else "rows (BSHD)",
            ", ".join(f"`{name}`" for name in each.backends) or "any",
            ", ".join(f"`{name}`" for name in each.communications),
            _yes(each.mtp),
            "no",
        )
        for each in CAPABILITIES
    ]
    exchanges = [
        (
            f"`{each.name}`",
            f"{each.partition}{' (or any)' if each.any_partition else ''}",
            each.travels,
            "every segment" if each.pads_segments else "the pack's end",
            "heads a rank must share out" if each.shares_heads else "any",
            _yes(each.takes_sizes),
            _yes(each.takes_chunks),
            {"windows": "yes, windows too"}.get(each.transformer_engine, each.transformer_engine),
            _yes(each.magi),
        )
        for each in COMMUNICATIONS.values()
    ]
    return "\n\n".join(
        (
            _markdown(
                (
                    "helper",
                    "layout",
                    "`--attention-backend`",
                    "`--cp-comm-type`, default first",
                    "MTP labels",
                    "attention dropout",
                ),
                helpers,
            ),
            _markdown(
                (
                    "`--cp-comm-type`",
                    "partition of packs",
                    "what travels",
                    "padding",
                    "head counts",
                    "`--hierarchical-context-parallel-sizes`",
                    "`--magi-attn-chunk-size`",
                    "TransformerEngine's attention",
                    "magi_attention",
                ),
                exchanges,
            ),
        )
    )


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _markdown(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
