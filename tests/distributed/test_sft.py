"""Conversations: one loss, packed or a row each, on any layout; only assistants' turns count."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.distributed.harness import relative_l2, run
from tests.distributed.pool import WorkerPools

FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 192 --sft "
    "--sft-tokenizer-prompt-format chatml --tokenizer-type ByteTokenizer --attention-dropout 0 "
    "--hidden-dropout 0 --num-workers 0 --lr 1e-3 --lr-decay-style constant --log-interval 1 "
    "--threads 1 --micro-batch-size 1 --global-batch-size 2 --position-embedding-type rope "
    "--calculate-per-token-loss "
)
PACKED = "--use-packed-sequence "
# Each of ChatML's <|im_end|> and EOD is learnt with the answer.
ENDING = len("<|im_end|>") + 1


def conversations(count: int) -> list[list[tuple[str, str]]]:
    generator = random.Random(3)
    words = ["yes", "a longer answer", "no", "it depends on what you mean"]
    return [
        [
            (f"question {turn} of {number}", generator.choice(words))
            for turn in range(generator.randint(1, 2))
        ]
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sft") / "chats.jsonl"
    with open(path, "w") as stream:
        for turns in conversations(12):
            messages = [
                {"role": role, "content": text}
                for pair in turns
                for role, text in zip(("user", "assistant"), pair, strict=True)
            ]
            stream.write(json.dumps({"messages": messages}) + "\n")
    return path


def learnt() -> int:
    """Tokens that all conversations teach: answers, their ends, and one EOD each."""
    answers = [answer for turns in conversations(12) for _, answer in turns]
    return sum(len(a) + len("<|im_end|>") for a in answers) + 12


def test_packed_is_row_by_row_over_a_whole_pass(chats: Path, worker_pool: WorkerPools):
    flags = (
        f"{FLAGS} --train-data-path {chats} --valid-data-path {chats} --full-validation "
        "--eval-interval 1 --train-iters 1 --lr 0 "
    )
    rows = run(worker_pool, 1, flags)
    loss, tokens = rows.validations[0]
    assert tokens == learnt()
    for world_size, more in (
        (1, PACKED),
        (1, PACKED + "--packing-strategy next_fit --overlong-documents split"),
        (2, PACKED + "--context-parallel-size 2"),
        (2, "--eval-global-batch-size 4 --eval-micro-batch-size 2"),
    ):
        other = run(worker_pool, world_size, flags + more)
        assert other.validations[0][1] == tokens, more
        assert other.validations[0][0] == pytest.approx(loss, rel=2e-6), more


@pytest.mark.parametrize("packing", ["", PACKED])
def test_training_is_one_curve_on_any_layout(packing: str, chats: Path, worker_pool: WorkerPools):
    flags = f"{FLAGS} {packing} --data-path {chats} --split 1,0,0 --eval-iters 0 --train-iters 4 "
    one = run(worker_pool, 1, flags)
    assert one.losses[-1] < one.losses[0]
    for more in ("", "--context-parallel-size 2", "--pipeline-model-parallel-size 2"):
        two = run(worker_pool, 2, flags + more)
        assert two.losses == pytest.approx(one.losses, rel=2e-6), more
        assert two.loss_counts == one.loss_counts
        assert relative_l2(two.gradient, one.gradient) < 1e-5


def test_long_conversations_go_by_the_flag(chats: Path, worker_pool: WorkerPools):
    flags = (
        f"{FLAGS} --train-data-path {chats} --valid-data-path {chats} --full-validation "
        "--eval-interval 1 --train-iters 1 --seq-length 64 "
    )
    split = [run(worker_pool, 1, flags + packing).validations[0][1] for packing in ("", PACKED)]
    assert split == [learnt()] * 2  # a cut loses no target
    cut = [
        run(worker_pool, 1, f"{flags} {packing} --overlong-documents truncate").validations[0][1]
        for packing in ("", PACKED)
    ]
    assert cut[0] == cut[1] < learnt()


def test_a_bad_line_is_named_on_every_rank(chats: Path, worker_pool: WorkerPools, tmp_path: Path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(chats.read_text() + '{"messages": []}\n')
    flags = f"{FLAGS} --data-path {bad} --split 1,0,0 --eval-iters 0 --train-iters 1 "
    with pytest.raises(Exception, match="bad.jsonl:13: 'messages' must be a list") as raised:
        run(worker_pool, 2, flags)
    assert "DataError" in str(raised.value) or "messages" in str(raised.value)
    assert not list((tmp_path / "cache").glob("*.idx"))
