"""Which tokenizer, and its files."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.packed.arguments.declare import flag

_flag = partial(flag, section="tokenizer")
TOKENIZER_TYPES = (
    "GPT2BPETokenizer",
    "HuggingFaceTokenizer",
    "SFTTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "ByteTokenizer",
    "NullTokenizer",
)
MODEL_FILE_TOKENIZERS = (
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
)
# Upstream's tokenizers of models that aren't trained here: they parse, to be refused by name.
OTHER_MODELS_TOKENIZERS = (
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "MultimodalTokenizer",
    "NullMultimodalTokenizer",
)


@dataclass(frozen=True, kw_only=True)
class TokenizerFields:
    """How text becomes token ids; the data group has these fields."""

    tokenizer_type: str = _flag(
        "Kind of tokenizer.",
        default="GPT2BPETokenizer",
        choices=TOKENIZER_TYPES + OTHER_MODELS_TOKENIZERS,
    )
    tokenizer_model: str | None = _flag(
        "tokenizer.json or a folder that holds one, or a SentencePiece or tiktoken model."
    )
    vocab_file: str | None = _flag("GPT-2's vocab.json.")
    merge_file: str | None = _flag("GPT-2's merges.txt.")
    vocab_size: int | None = _flag("Vocabulary before padding; NullTokenizer needs it.", at_least=1)
    vocab_extra_ids: int = _flag(
        "Further ids of SentencePieceTokenizer, after its vocabulary.", default=0, at_least=0
    )
    eod_token: str | None = _flag("End-of-document token, where the tokenizer's files name none.")
    tiktoken_pattern: str | None = _flag(
        "Expression that splits text for TikTokenizer.", choices=("v1", "v2")
    )
    tiktoken_num_special_tokens: int = _flag(
        "Ids that TikTokenizer keeps for special tokens.", default=1000, at_least=3
    )
    tiktoken_special_tokens: tuple[str, ...] | None = _flag("Names of TikTokenizer's specials.")
    legacy_tokenizer: bool = _flag(
        "Upstream's older tokenizer classes; ours give the same ids as both.", default=False
    )
