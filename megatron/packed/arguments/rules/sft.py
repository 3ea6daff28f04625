"""Rules on fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.packed.arguments.config import Config

# Their libraries don't tell special tokens from text, or have none.
_WITHOUT_CHAT = (
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "NullTokenizer",
)


def fine_tuning(config: Config) -> Iterator[str]:
    data, packing = config.data, config.packing
    if not config.sft.sft:
        if config.is_given("sft_tokenizer_prompt_format"):
            yield (
                f"--sft-tokenizer-prompt-format {config.sft.sft_tokenizer_prompt_format}: "
                "is how --sft writes conversations; ask for it too"
            )
        return
    if data.mock_data:
        yield "--sft: needs JSON lines files as --data-path; --mock-data has no conversations"
    if data.tokenizer_type in _WITHOUT_CHAT:
        yield (
            f"--sft: {data.tokenizer_type} can't write a conversation's special tokens; use "
            "HuggingFaceTokenizer with the model's tokenizer.json"
        )
    if packing.use_packed_sequence and packing.packing_strategy == "rows":
        yield (
            "--packing-strategy rows: cuts conversations at the ends of rows, and --sft packs them "
            "whole; use best_fit_decreasing or another"
        )
    if data.dataloader_type == "cyclic" and not packing.use_packed_sequence:
        yield "--dataloader-type cyclic: --sft shuffles every epoch itself; leave it out"


RULES = (fine_tuning,)
