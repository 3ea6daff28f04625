"""Which tokenizer, and its files."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.packed.arguments.declare import EVERYWHERE, Replaced, flag

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
    special_tokens: tuple[str, ...] | None = _flag(
        "Names of TikTokenizer's specials, as newer versions spell it.",
        "--tokenizer-special-tokens",
    )
    padded_vocab_size: int | None = _flag(
        "Rows of the embedding, in place of --make-vocab-size-divisible-by.", at_least=1
    )
    pad_vocab_size: bool = _flag(
        "Give the embedding as many rows as the tokenizer has ids.",
        "--no-pad-vocab-size",
        "--disable-pad-vocab-size",
        default=True,
        negative=True,
    )
    null_tokenizer_eod_id: int | None = _flag(
        "End of documents for NullTokenizer; by default --vocab-size, one more id.", at_least=0
    )
    null_tokenizer_pad_id: int = _flag(
        "Padding for NullTokenizer.",
        default=-1,
        replaced=Replaced("padding goes by position, whatever its id", "EOD's id", -1, EVERYWHERE),
    )
    tokenizer_hf_use_fast: bool = _flag(
        "Take the fast tokenizer of HuggingFaceTokenizer; always so.", default=False
    )
    tokenizer_hf_no_use_fast: bool = _flag(
        "Take the slow tokenizer of HuggingFaceTokenizer.",
        default=False,
        refused=(
            "slow tokenizers are programs, and may give other ids than tokenizer.json, which is "
            "what is read here; leave it out"
        ),
    )
    tokenizer_hf_include_special_tokens: bool = _flag(
        "Add to every text what HuggingFaceTokenizer's own files add to it; the default.",
        default=False,
    )
    tokenizer_hf_no_include_special_tokens: bool = _flag(
        "Add nothing to texts, such as the BOS of HuggingFaceTokenizer's own files.", default=False
    )
    trust_remote_code: bool = _flag(
        "Let HuggingFaceTokenizer run programs that come with a tokenizer.",
        default=False,
        replaced=Replaced(
            "a tokenizer is read from its tokenizer.json, and nothing of it is run",
            "tokenizer.json",
            False,
            EVERYWHERE,
        ),
    )
    metadata_path: str | None = _flag(
        "JSON file that says which class a tokenizer is of.",
        "--tokenizer-metadata",
        "--metadata-path",
        refused="--tokenizer-type says which one it is; give that and leave this out",
    )
    tokenizer_sentencepiece_legacy: bool = _flag(
        "Let SentencePiece tokenizers take further special tokens.",
        default=False,
        replaced=Replaced(
            "without further special tokens both give the same ids",
            "the model's ids",
            False,
            EVERYWHERE,
        ),
    )
    tokenizer_sentencepiece_ignore_extra_whitespaces: bool = _flag(
        "Keep blanks that a SentencePiece model drops.",
        "--no-tokenizer-sentencepiece-ignore-extra-whitespaces",
        "--disable-tokenizer-sentencepiece-ignore-extra-whitespaces",
        default=True,
        negative=True,
        refused=(
            "blanks are kept or dropped as the model was trained to; leave it out, or train the "
            "model to keep them"
        ),
    )
    chat_template: str | None = _flag(
        "Jinja template of conversations.",
        refused=(
            "templates are read from the tokenizer's own files; put it there, and choose "
            "--sft-tokenizer-prompt-format chat-template"
        ),
    )
    tokenizer_prompt_format: str | None = _flag(
        "Prompt format of MultimodalTokenizer.",
        refused=(
            "models of images aren't trained here; for conversations give "
            "--sft-tokenizer-prompt-format"
        ),
    )
