"""How far segments and packs are padded, and why no further.

Three things ask for multiples. A zigzag partition cuts every segment in `2 * cp` equal chunks;
every partition cuts the pack in `cp` equal parts; sequence parallelism cuts each part in `tp`,
and quantised matrix products want what is left to be a multiple of 16, 32 or 128 tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.packed.packing import checks

# Rows of a quantised matrix product, after division by CP and TP.
QUANTISATION_MULTIPLE = {None: 1, "fp8": 16, "mxfp8": 32, "nvfp4": 128}
MODES = ("default", "segment", "pack")
PARTITIONS = ("contiguous", "zigzag", "zigzag_pack", "striped", "dispatch")


@dataclass(frozen=True)
class Alignment:
    """Multiples to which lengths are padded: `pad(n) = (-n) mod a`.

    Attributes:
        segment: every segment's padded length is a multiple of this.
        pack: the pack's padded length is a multiple of this; the last segment takes the padding.
    """

    segment: int = 1
    pack: int = 1

    def __post_init__(self) -> None:
        for name in ("segment", "pack"):
            value = checks.integer(f"alignment.{name}", getattr(self, name), 1)
            if value > 2**31 - 1:
                raise ValueError(f"alignment.{name}: {value} exceeds 2**31 - 1")

    @property
    def pack_multiple(self) -> int:
        """Multiple that the whole pack obeys: both rules together."""
        return math.lcm(self.segment, self.pack)

    @classmethod
    def for_layout(
        cls,
        *,
        partition: str = "contiguous",
        cp_size: int = 1,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        quantisation: str | None = None,
        mode: str = "default",
        chunk_size: int = 1,
    ) -> Alignment:
        """Return the alignment that a parallel layout needs.

        Args:
            partition: how the pack is cut over context-parallel ranks, one of `PARTITIONS`.
            cp_size: context-parallel ranks.
            tp_size: tensor-parallel ranks.
            sequence_parallel: activations are split over tensor-parallel ranks along tokens.
            quantisation: None, "fp8", "mxfp8" or "nvfp4".
            mode: "default" pays only what the partition needs; "pack" never pads a segment;
                "segment" is the rule of Megatron forks: every segment to `tp * cp * 2` (with
                FP8 `tp * cp * 16`), and with one context-parallel rank the pack to `tp` (with
                FP8 `tp * 8`).
            chunk_size: tokens of a dispatched chunk where the engine fixes it; the pack then
                divides into whole chunks for every rank.

        Raises:
            ValueError: for an unknown name, a size below 1, or mode "pack" with a partition that
                cuts every segment.
        """
        checks.integer("cp_size", cp_size, 1)
        checks.integer("tp_size", tp_size, 1)
        checks.integer("chunk_size", chunk_size, 1)
        if chunk_size != 1 and partition != "dispatch":
            raise ValueError(f"chunk_size: only dispatch cuts chunks, got it with {partition!r}")
        if partition not in PARTITIONS:
            raise ValueError(f"partition: {partition!r} must be one of {', '.join(PARTITIONS)}")
        if mode not in MODES:
            raise ValueError(f"mode: {mode!r} must be one of {', '.join(MODES)}")
        if quantisation not in QUANTISATION_MULTIPLE:
            names = ", ".join(str(name) for name in QUANTISATION_MULTIPLE)
            raise ValueError(f"quantisation: {quantisation!r} must be one of {names}")
        multiple = QUANTISATION_MULTIPLE[quantisation]
        tp = tp_size if sequence_parallel else 1
        per_segment = partition == "zigzag" and cp_size > 1
        halves = 2 if partition == "zigzag_pack" and cp_size > 1 else 1
        # Quantised products see the tokens of one TP rank even where only the tail is padded.
        needed = math.lcm(cp_size * halves * tp, cp_size * tp * multiple, cp_size * chunk_size)

        match mode:
            case "segment" if cp_size > 1:
                # The fork multiplies by TP whether or not activations are split over it.
                every = tp_size * cp_size * (16 if quantisation else 2)
                return cls(segment=every, pack=math.lcm(needed, every))
            case "segment":
                return cls(pack=math.lcm(needed, tp_size * (8 if quantisation else 1)))
            case "pack" if per_segment:
                raise ValueError(
                    "mode: 'pack' leaves segments unaligned, but the zigzag partition cuts each "
                    f"one in {2 * cp_size} chunks; use 'default', or another partition"
                )
        return cls(segment=2 * cp_size * tp if per_segment else 1, pack=needed)
