"""Command lines that each break one rule on run lengths, rates or batches; see `test_rules.py`."""

from __future__ import annotations

# (rule, flags that break it and nothing else, what the message must hold, WORLD_SIZE)
BROKEN_SCHEDULES = [
    ("learning_rate", "--min-lr 0.1", "--min-lr 0.1: must be at most --lr 0.001", 1),
    ("learning_rate", "--lr-warmup-init 0.1", "--lr-warmup-init 0.1", 1),
    ("warmup", "--lr-warmup-fraction 0.1 --lr-warmup-iters 5", "exclude each other", 1),
    ("warmup", "--lr-warmup-iters 100", "warm-up of 100 iterations", 1),
    ("warmup", "--lr-warmup-fraction 1.0", "warm-up of 100 iterations", 1),
    ("final_decay", "--lr-decay-style WSD", "needs --lr-wsd-decay-iters", 1),
    ("final_decay", "--lr-wsd-decay-iters 5", "needs --lr-decay-style WSD", 1),
    (
        "final_decay",
        "--lr-decay-style WSD --lr-wsd-decay-iters 101",
        "--lr-wsd-decay-iters 101: must be at most",
        1,
    ),
    ("weight_decay", "--start-weight-decay 0.1", "need --weight-decay-incr-style", 1),
    ("weight_decay", "--weight-decay-incr-style cosine", "--start-weight-decay", 1),
    (
        "weight_decay",
        "--weight-decay-incr-style linear --start-weight-decay 0.2 --end-weight-decay 0.1",
        "--end-weight-decay 0.1",
        1,
    ),
    (
        "run_length",
        "--train-samples 400",
        "--train-iters 100 and --train-samples 400: exclude each other",
        1,
    ),
    (
        "run_length",
        "--lr-warmup-samples 20",
        "--lr-warmup-samples 20: the run is counted by --train-iters",
        1,
    ),
    (
        "run_length",
        "--lr-decay-samples 20",
        "use the flag that ends in -iters",
        1,
    ),
    (
        "sizes_of_batches",
        "--step-batch-size-schedule 0:2 --global-batch-size 4",
        "--step-batch-size-schedule and --global-batch-size: exclude each other",
        1,
    ),
    (
        "sizes_of_batches",
        "--step-batch-size-schedule 0:6",
        "--step-batch-size-schedule 0:6: 6 samples must be a multiple of --micro-batch-size 2 x 2",
        2,
    ),
    (
        "sizes_of_batches",
        "--step-batch-size-schedule '0:2 1K:8' --pipeline-model-parallel-size 2 "
        "--num-virtual-stages-per-pipeline-rank 2",
        "--step-batch-size-schedule 0:2 1K:8: gives 1 micro-batches a step, and virtual stages",
        2,
    ),
    ("sizes_of_batches", "--step-batch-size-schedule 4", "'4': must be tokens:samples", 1),
    (
        "sizes_of_batches",
        "--rampup-batch-size 2 4 100 --global-batch-size 8",
        "--rampup-batch-size 2 4 100: increments of 4 must lead from 2 to --global-batch-size 8",
        1,
    ),
]
