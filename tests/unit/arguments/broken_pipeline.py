"""Flags that break a rule on pipeline stages, for test_rules.py."""

from __future__ import annotations

PP2, PP4 = "--pipeline-model-parallel-size 2 ", "--pipeline-model-parallel-size 4 "
_LAYOUT = "--pipeline-model-parallel-layout "
_VIRTUAL = "--num-virtual-stages-per-pipeline-rank "
_PER_STAGE = "--num-layers-per-virtual-pipeline-stage "
_FIRST, _LAST = "--decoder-first-pipeline-num-layers ", "--decoder-last-pipeline-num-layers "
_EMBEDDING = "--account-for-embedding-in-pipeline-split "
_LOSS = "--account-for-loss-in-pipeline-split "
_GROUP = "--microbatch-group-size-per-virtual-pipeline-stage "

# (rule, flags that break it and nothing else, what the message must hold, WORLD_SIZE)
BROKEN_PIPELINE = [
    (
        "layout",
        "--pipeline-model-parallel-size 3",
        "--num-layers 4: 4 layers must be a multiple of --pipeline-model-parallel-size 3",
        3,
    ),
    (
        "layout",
        PP2 + _EMBEDDING,
        "--num-layers 4: 4 layers and the embedding must be a multiple of",
        2,
    ),
    (
        "layout",
        PP4 + _FIRST + "3",
        r"4 layers less 3 \(--decoder-first.* leaves 1, which 3 other processes can't share",
        4,
    ),
    ("layout", PP2 + _FIRST + "3 " + _LAST + "2", "leaves -1, which 0 other processes", 2),
    ("layout", _FIRST + "4", "need --pipeline-model-parallel-size of 2 or more", 1),
    (
        "layout",
        PP2 + _FIRST + "3 " + _LOSS,
        "--decoder-first-pipeline-num-layers and --account-for-loss.*: exclude each other",
        2,
    ),
    (
        "layout",
        PP2 + _FIRST + "2 " + _PER_STAGE + "1",
        "with interleaving, give --num-virtual-stages-per-pipeline-rank instead",
        2,
    ),
    (
        "layout",
        PP2 + _VIRTUAL + "2 " + _PER_STAGE + "1",
        "--num-layers-per-virtual-pipeline-stage 1 and --num-virtual.* 2: exclude each other",
        2,
    ),
    ("layout", PP2 + _VIRTUAL + "3", "rank 3: must divide the 2 layers of every process", 2),
    ("layout", PP2 + _PER_STAGE + "3", "stage 3: must divide the 2 layers of a process", 2),
    (
        "layout",
        "--num-layers 1 --pipeline-model-parallel-size 3 " + _EMBEDDING + _LOSS + _PER_STAGE + "2",
        "must divide the 1 layers of a process",
        3,
    ),
    ("layout", PP2 + _LAYOUT + "Ett|txL", r"Ett\|txL: holds 'x'", 2),
    ("layout", PP2 + _LAYOUT + "Ett|t|tL", "has 3 stages, which must be a multiple of", 2),
    ("layout", PP2 + _LAYOUT + "tt|ttL", "must start with its only E", 2),
    ("layout", PP2 + _LAYOUT + "EEtt|ttL", "must start with its only E", 2),
    ("layout", PP2 + _LAYOUT + "Ett|tt", "must end with its only L", 2),
    ("layout", PP2 + _LAYOUT + "EttL|ttL", "must end with its only L", 2),
    ("layout", PP2 + _LAYOUT + "Ett|tL", "places 3 layers .* --num-layers is 4", 2),
    ("layout", PP2 + _LAYOUT + "Ettm|ttL", "every m in one stage, after the last t", 2),
    ("layout", PP4 + _LAYOUT + "Ett|tt|m|mL", "every m in one stage, after the last t", 4),
    (
        "layout",
        PP2 + "--mtp-num-layers 1 --position-embedding-type rope " + _LAYOUT + "Et|tt|tm|L",
        "must not hold m on the first process",
        2,
    ),
    (
        "layout",
        PP2 + _LAYOUT + "Ett|ttL " + _VIRTUAL + "2",
        "says all there is to say about stages; leave --num-virtual-stages-per-pipeline-rank out",
        2,
    ),
    ("interleaving", _VIRTUAL + "2", "2 virtual stages on each process: need .* 2 or more", 1),
    (
        "interleaving",
        PP2 + _VIRTUAL + "2 --no-overlap-p2p-communication --global-batch-size 4",
        "of 3 or more with --no-overlap-p2p-communication, not 2",
        2,
    ),
    ("interleaving", PP2 + _GROUP + "2", "stage 2: needs virtual stages", 2),
    (
        "overlapped_exchanges",
        "--overlap-p2p-communication-warmup-flush --no-overlap-p2p-communication",
        "contradict each other",
        1,
    ),
    (
        "micro_batches",
        PP2 + _VIRTUAL + "2 --global-batch-size 2",
        "--global-batch-size: gives 1 micro-batches a step, and virtual stages take 2 in a row",
        2,
    ),
    (
        "micro_batches",
        PP2 + _VIRTUAL + "2 --global-batch-size 8 " + _GROUP + "1",
        "take 1 in a row .* at least --pipeline-model-parallel-size 2",
        2,
    ),
    (
        "micro_batches",
        PP2 + _VIRTUAL + "2 --global-batch-size 10",
        "the last 1 must be at least --pipeline-model-parallel-size 2; 4 or 6 micro-batches",
        2,
    ),
    (
        "evaluation_micro_batches",
        PP2 + _VIRTUAL + "2 --global-batch-size 8 --eval-global-batch-size 6",
        "--eval-global-batch-size: gives 3 micro-batches a step, .* last 1 must be at least",
        2,
    ),
    (
        "data_last",
        PP2 + "--use-tp-pp-dp-mapping --num-experts 4 --context-parallel-size 2",
        "--use-tp-pp-dp-mapping: with pipeline stages, .* = 1 must equal .* = 2; change them",
        4,
    ),
]
