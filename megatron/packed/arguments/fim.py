"""Fill in the middle: what is changed, how often, and with which tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.packed.arguments.declare import flag

_flag = partial(flag, section="fill in the middle")


@dataclass(frozen=True, kw_only=True)
class FimFields:
    """Documents whose middle comes last; the data group has these fields."""

    fim_data: bool = _flag("Change documents for filling in the middle.", default=False)
    fim_rate: float = _flag(
        "Share of documents that are changed.", default=0.5, at_least=0.0, at_most=1.0
    )
    fim_spm_rate: float = _flag(
        "Share of changed documents whose suffix comes first.",
        default=0.5,
        at_least=0.0,
        at_most=1.0,
    )
    fim_split_sample: str | None = _flag("Token that splits documents into fragments.")
    fim_fragment_rate: float | None = _flag(
        "Share of fragments that are changed.", at_least=0.0, at_most=1.0
    )
    fim_no_prefix: str | None = _flag("Text that begins fragments which are left alone.")
    fim_prefix_token: str = _flag("Token before the prefix.", default="<fim_prefix>")
    fim_middle_token: str = _flag("Token before the middle.", default="<fim_middle>")
    fim_suffix_token: str = _flag("Token before the suffix.", default="<fim_suffix>")
    fim_pad_token: str = _flag(
        "Accepted: rows that become shorter are padded by position.", default="<fim_pad>"
    )
    fim_eod_token: str = _flag(
        "End of a document; always the tokenizer's own.", default="<|endoftext|>"
    )
