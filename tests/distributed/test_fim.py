"""Training on documents whose middle comes last: one curve, whoever reads them."""

from __future__ import annotations

import pytest

from tests.distributed.corpora import write_byte_corpus
from tests.distributed.harness import run
from tests.distributed.pool import WorkerPools

FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --split 1,0,0 "
    "--tokenizer-type ByteTokenizer --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 "
    "--lr 1e-3 --lr-decay-style constant --log-interval 1 --threads 1 --micro-batch-size 1 "
    "--global-batch-size 4 --train-iters 3 --position-embedding-type rope --fim-data --fim-rate 1 "
    "--use-packed-sequence "
)


@pytest.mark.parametrize("strategy", ["rows", "windowed_best_fit"])
def test_layouts_and_workers_change_nothing(
    strategy: str, worker_pool: WorkerPools, tmp_path_factory: pytest.TempPathFactory
):
    texts = [f"document {number}: " + "words and words " * (number % 5) for number in range(40)]
    prefix = write_byte_corpus(tmp_path_factory.mktemp("fim") / "corpus", texts)
    flags = f"{FLAGS} --data-path {prefix} --packing-strategy {strategy} "
    one = run(worker_pool, 1, flags + "--num-workers 0")
    assert "--fim-data adds to the vocabulary: <fim_prefix> <fim_suffix> <fim_middle>" in one.log
    two = run(worker_pool, 2, flags + "--num-workers 2")
    assert two.losses == pytest.approx(one.losses, rel=2e-6)
    assert two.loss_counts == one.loss_counts
    plain = run(worker_pool, 1, flags.replace("--fim-rate 1 ", "--fim-rate 0 ") + "--num-workers 0")
    assert plain.losses != pytest.approx(one.losses, rel=1e-4)
