"""Corpora, tokenizers and indexed datasets: from files on disk to rows of token ids.

The modules are imported one by one, so that a tool which needs no torch doesn't load it:

- `tokenizers`: text to ids and back, by the registry of `--tokenizer-type`; one file for each
  library (`hugging_face_tokenizer`, `gpt2_tokenizer`, `sentencepiece_tokenizer`,
  `tiktoken_tokenizer`) on top of `tokenizer_base` and `vocabulary_files`
- `row_dataset`, `builders`: `.bin/.idx` files to rows of `S + 1` ids, blended and split
- `samplers`, `loader`: which rows this rank reads, in which order, in which process
- `bshd`: rows to the unpacked batch
- `validation`: everything that can be wrong with the files, said before training starts
- `files`: outputs that appear whole or not at all
"""
