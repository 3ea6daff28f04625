#!/usr/bin/env bash
# Pre-train a small GPT on packed documents: two CPU processes share every pack by context
# parallelism. `make demo` prepares the data.
#
# The same script trains on GPUs: raise the sizes, point DATA_ARGS at your corpus, and drop
# --accelerator cpu.
set -euo pipefail
cd "$(dirname "$0")/.."

DEMO=${DEMO:-demo}
# torchrun warns without it; --threads sets what a process really uses.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

DISTRIBUTED_ARGS=(
    --standalone
    --nproc-per-node 2
)

MODEL_ARGS=(
    --num-layers 4
    --hidden-size 256
    --num-attention-heads 4
    --group-query-attention
    --num-query-groups 2
    --max-position-embeddings 1024
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
)

TRAINING_ARGS=(
    --accelerator cpu
    --use-packed-sequence
    --seq-length 1024
    --micro-batch-size 2
    --global-batch-size 8
    --train-iters 60
    --lr 2e-3
    --min-lr 2e-4
    --lr-decay-style cosine
    --lr-warmup-iters 6
    --weight-decay 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
    --seed 1234
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
    --context-parallel-size 2
    --use-distributed-optimizer
)

DATA_ARGS=(
    --data-path "$DEMO/corpus_text_document"
    --data-cache-path "$DEMO/cache"
    --split 95,5,0
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$DEMO/tokenizer"
    --num-workers 1
)

EVAL_AND_LOGGING_ARGS=(
    --log-interval 5
    --log-throughput
    --eval-interval 30
    --eval-iters 4
    --tensorboard-dir "$DEMO/tensorboard"
)

rm -rf "$DEMO/tensorboard"
torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
    "${MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}"
