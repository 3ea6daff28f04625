"""Flags that break a rule on the optimizer or its precision, for test_rules.py."""

from __future__ import annotations

_AWARE = "--use-precision-aware-optimizer"
_INSTANCES = "--num-distributed-optimizer-instances "

# (rule, flags that break it and nothing else, what the message must hold, WORLD_SIZE)
BROKEN_OPTIMIZER = [
    ("precision", "--bf16 --fp16", "--bf16 and --fp16: exclude each other", 1),
    ("precision", "--grad-reduce-in-bf16", "--grad-reduce-in-bf16: needs --bf16", 1),
    (
        "precision",
        "--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32",
        "--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32: exclude",
        1,
    ),
    (
        "optimizer_precision",
        "--exp-avg-dtype bf16",
        f"--exp-avg-dtype bf16: needs {_AWARE}; add it or leave this out",
        1,
    ),
    ("optimizer_precision", _AWARE, f"{_AWARE}: needs --use-distributed-optimizer", 1),
    (
        "optimizer_precision",
        f"{_AWARE} --optimizer sgd",
        f"{_AWARE}: is an Adam, and --optimizer is sgd",
        1,
    ),
    (
        "optimizer_precision",
        f"{_AWARE} --use-distributed-optimizer --main-grads-dtype bf16 --bf16",
        "--main-grads-dtype bf16: needs --bf16 and --grad-reduce-in-bf16",
        1,
    ),
    (
        "gradient_buckets",
        "--ddp-num-buckets 2 --ddp-bucket-size 1000",
        "--ddp-num-buckets 2 and --ddp-bucket-size 1000: exclude each other",
        1,
    ),
    ("loss_scale", "--loss-scale 8", "--loss-scale 8: needs --fp16 or --bf16", 1),
    (
        "loss_scale",
        "--fp16 --initial-loss-scale 2 --min-loss-scale 4",
        "--min-loss-scale 4: must be at most --initial-loss-scale 2",
        1,
    ),
    (
        "decoupled_learning_rate",
        "--decoupled-min-lr 1e-4",
        "--decoupled-min-lr 0.0001: needs --decoupled-lr",
        1,
    ),
    (
        "decoupled_learning_rate",
        "--decoupled-lr 1e-4 --decoupled-min-lr 1e-3",
        "--decoupled-min-lr 0.001: must be at most --decoupled-lr 0.0001",
        1,
    ),
    (
        "decoupled_learning_rate",
        "--decoupled-lr 1e-5 --min-lr 1e-4",
        "--decoupled-lr 1e-05: must be at least --min-lr 0.0001; give --decoupled-min-lr",
        1,
    ),
    (
        "distributed_optimizer_instances",
        _INSTANCES + "2",
        "instances 2: needs --use-distributed-optimizer",
        2,
    ),
    (
        "distributed_optimizer_instances",
        _INSTANCES + "2 --use-distributed-optimizer",
        "instances 2: must divide data-parallel 3 x context-parallel 1 processes = 3",
        3,
    ),
    ("muon", "--optimizer muon --fp16", "--optimizer muon: has no loss scale for --fp16", 1),
    (
        "muon",
        "--optimizer muon --muon-num-ns-steps 4",
        "--muon-num-ns-steps 4: must be a multiple of 5",
        1,
    ),
    (
        "muon",
        "--optimizer muon --use-distributed-optimizer " + _INSTANCES + "2",
        "--optimizer dist_muon: keeps each matrix's state whole on one replica",
        2,
    ),
]
