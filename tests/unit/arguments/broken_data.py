"""Command lines that each break one rule on documents, tokenizers or packs; see `test_rules.py`."""

from __future__ import annotations

# (rule, flags that break it and nothing else, what the message must hold, WORLD_SIZE)
BROKEN_DATA = [
    ("data_source", "--data-path a", "--data-path and --mock-data: exclude", 1),
    ("split_proportions", "--split 90,ten", "--split 90,ten", 1),
    ("split_proportions", "--split 0,0,0", "not all 0", 1),
    ("split_proportions", "--split 1,1,1,1", "up to three", 1),
    (
        "tokenizer",
        "--tokenizer-type HuggingFaceTokenizer",
        "HuggingFaceTokenizer: needs --tokenizer-model",
        1,
    ),
    (
        "fine_tuning",
        "--sft-tokenizer-prompt-format chatml",
        "--sft-tokenizer-prompt-format chatml: is how --sft",
        1,
    ),
    ("fill_in_the_middle", "--fim-data", "--fim-data: --mock-data has no text to change", 1),
    ("dataloader", "--dataloader-type external", "external is refused: it takes iterators", 1),
    (
        "validation_sets",
        "--multiple-validation-sets",
        "--multiple-validation-sets: needs --valid-data-path",
        1,
    ),
    ("validation_sets", "--validation-set-names a b", "--validation-set-names a b: names those", 1),
    (
        "evaluation_batch",
        "--eval-global-batch-size 3 --eval-micro-batch-size 2",
        "--eval-global-batch-size 3: must be a multiple of --eval-micro-batch-size 2 x 1",
        1,
    ),
    ("tokenizer", "--tokenizer-type Llama2Tokenizer", "Llama2Tokenizer: needs --tokenizer-mod", 1),
    (
        "tokenizer_options",
        "--tokenizer-special-tokens a",
        "--tokenizer-special-tokens a: are TikTokenizer's; those of NullTokenizer are in",
        1,
    ),
    ("tokenizer", "--tokenizer-type GPT2BPETokenizer", "needs --vocab-file and --merge-file", 1),
    (
        "tokenizer",
        "--tokenizer-type TikTokenizer --tokenizer-model x",
        "needs --tiktoken-pattern",
        1,
    ),
    (
        "tokenizer",
        "--tokenizer-type BertWordPieceCase",
        "BertWordPieceCase is refused: it belongs to BERT",
        1,
    ),
    ("packing_switch", "--packing-alignment pack", "pack: needs --use-packed-sequence", 1),
    ("packing_switch", "--packing-strategy next_fit", "next_fit: needs --use-packed-sequence", 1),
    ("packing_switch", "--document-boundaries index", "index: needs --use-packed-sequence", 1),
    ("packing_switch", "--packed-sequence-capacity 512", "512: needs --use-packed-sequence", 1),
    ("packing_switch", "--check-packing-metadata", "metadata: needs --use-packed-sequence", 1),
    (
        "packing_strategy",
        "--use-packed-sequence --packing-window 10 --packing-strategy next_fit",
        "--packing-window 10: is windowed_best_fit's, and --packing-strategy is next_fit",
        1,
    ),
    (
        "packing_strategy",
        "--use-packed-sequence --overlong-documents drop",
        "--overlong-documents drop: needs a --packing-strategy that packs whole documents",
        1,
    ),
    (
        "packing_strategy",
        "--use-packed-sequence --packing-strategy next_fit --document-boundaries eod",
        "--document-boundaries eod: --packing-strategy next_fit takes whole documents",
        1,
    ),
    (
        "packing_strategy",
        "--use-packed-sequence --packing-strategy next_fit --dataloader-type cyclic",
        "--dataloader-type cyclic: --packing-strategy next_fit shuffles the documents",
        1,
    ),
    (
        "pack_capacity",
        "--use-packed-sequence --packed-sequence-capacity 255",
        "--packed-sequence-capacity 255: must be at least --micro-batch-size 2 x --seq-length 128",
        1,
    ),
]
