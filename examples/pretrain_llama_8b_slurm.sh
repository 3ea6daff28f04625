#!/usr/bin/env bash
#SBATCH --job-name=llama-8b-packed
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#
# Pre-train an 8B model on packed documents: one srun task a node, eight processes each.
#
#   sbatch examples/pretrain_llama_8b_slurm.sh
set -euo pipefail

# Needed before Blackwell with tensor parallelism: kernels and collectives share one queue.
export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS_PER_NODE=8
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=${MASTER_PORT:-6000}

DATA_PATH=${DATA_PATH:?prefix of the preprocessed corpus, without .bin/.idx}
TOKENIZER_MODEL=${TOKENIZER_MODEL:?folder that holds tokenizer.json}
OUTPUT=${OUTPUT:?folder for TensorBoard and index files}

DISTRIBUTED_ARGS=(
    --nnodes "$SLURM_NNODES"
    --nproc-per-node "$GPUS_PER_NODE"
    --rdzv-id "$SLURM_JOB_ID"
    --rdzv-backend c10d
    --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT"
)

MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --max-position-embeddings 8192
    --position-embedding-type rope
    --rotary-base 500000
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
)

TRAINING_ARGS=(
    --use-packed-sequence
    --seq-length 8192
    --micro-batch-size 1
    --global-batch-size 512
    --train-iters 100000
    --bf16
    --lr 3e-4
    --min-lr 3e-5
    --lr-decay-style cosine
    --lr-warmup-iters 2000
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 4
    --pipeline-model-parallel-size 1
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

DATA_ARGS=(
    --data-path "$DATA_PATH"
    --data-cache-path "$OUTPUT/cache"
    --split 999,1,0
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$TOKENIZER_MODEL"
)

EVAL_AND_LOGGING_ARGS=(
    --log-interval 10
    --log-throughput
    --eval-interval 1000
    --eval-iters 32
    --tensorboard-dir "$OUTPUT/tensorboard"
)

srun --kill-on-bad-exit=1 torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
    "${MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}"
