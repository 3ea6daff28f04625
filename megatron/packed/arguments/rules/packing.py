"""Rules on packing: what packs are made of, and how long they are."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.packed.arguments.config import Config, all_specs


def packing_switch(config: Config) -> Iterator[str]:
    if config.packing.use_packed_sequence:
        return
    for dest, spec in all_specs().items():
        value = config.get(dest)
        if dest == "overlong_documents" and config.sft.sft:
            continue  # rows of conversations obey it
        if spec.group == "packing" and config.is_given(dest) and value != spec.default:
            shown = f"{spec.name} {value}" if spec.takes_value else spec.name
            yield f"{shown}: needs --use-packed-sequence; without it nothing is packed"


def packing_strategy(config: Config) -> Iterator[str]:
    packing = config.packing
    if not packing.use_packed_sequence:
        return
    strategy = packing.packing_strategy
    if config.is_given("packing_window") and strategy != "windowed_best_fit":
        yield (
            f"--packing-window {packing.packing_window}: is windowed_best_fit's, and "
            f"--packing-strategy is {strategy}; change one of them"
        )
    if config.is_given("overlong_documents") and strategy == "rows":
        yield (
            f"--overlong-documents {packing.overlong_documents}: needs a --packing-strategy that "
            "packs whole documents, such as windowed_best_fit; rows cut documents at their end"
        )
    if not packing.packs_documents:
        return
    if packing.document_boundaries == "eod":
        yield (
            f"--document-boundaries eod: --packing-strategy {strategy} takes whole documents by "
            "the corpus's index; use index, or --packing-strategy rows"
        )
    if config.data.dataloader_type == "cyclic":
        yield (
            f"--dataloader-type cyclic: --packing-strategy {strategy} shuffles the documents of "
            "every epoch itself; leave it out, or use --packing-strategy rows"
        )


def pack_capacity(config: Config) -> Iterator[str]:
    capacity = config.packing.packed_sequence_capacity
    micro, length = config.training.micro_batch_size, config.data.seq_length
    if config.packing.use_packed_sequence and capacity is not None and capacity < micro * length:
        yield (
            f"--packed-sequence-capacity {capacity}: must be at least --micro-batch-size {micro} "
            f"x --seq-length {length} = {micro * length}, which a micro-batch may hold"
        )


RULES = (
    packing_switch,
    packing_strategy,
    pack_capacity,
)
