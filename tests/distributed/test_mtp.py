"""Multi-token prediction: one gradient for a global batch, however it is laid out.

The reference runs every document alone, in fp64, and every depth on that document's own next
tokens. It shares the modules' weights with the program and none of its shifting or counting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.packed.accelerator.compat import core_version
from tests.distributed.documents import build_model, gradient_of, named
from tests.distributed.harness import Weights, relative_l2, run, sample
from tests.distributed.pool import WorkerPools

EOD, SEQ = 256, 16
FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --mock-data "
    "--tokenizer-type ByteTokenizer --attention-dropout 0 --hidden-dropout 0 --num-workers 0 "
    "--train-iters 1 --lr 1e-3 --lr-decay-style constant --eval-iters 0 --log-interval 1 "
    "--threads 1 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --mtp-loss-scaling-factor 0.7 --global-batch-size 6"
)
PACKED = f"{FLAGS} --use-packed-sequence --untie-embeddings-and-output-weights"
ROWS_AS_BLOCKS = (
    f"{FLAGS} --untie-embeddings-and-output-weights --reset-position-ids --reset-attention-mask "
    "--eod-mask-loss"
)

ROWS = [
    # One-token documents and short ones; the last is cut, and its extra token goes on.
    sample([10, 11, EOD, EOD, 12, EOD, *range(30, 41)], SEQ),
    sample([*range(50, 66), 66], SEQ),
    # The extra token is EOD; the document before it ends with the row's last input.
    sample([80, EOD, *range(90, 104), EOD], SEQ),
    sample([EOD] * 17, SEQ),
    sample([*range(110, 125), EOD, 126], SEQ),
    sample([140, 141, 142, 143, EOD], SEQ),
]
# (input tokens, tokens of the document that follow them in the data)
DOCUMENTS: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((10, 11, EOD), ()),
    ((EOD,), ()),
    ((12, EOD), ()),
    (tuple(range(30, 40)), (40,)),
    (tuple(range(50, 66)), (66,)),
    ((80, EOD), ()),
    (tuple(range(90, 104)), (EOD,)),
    *[((EOD,), ())] * 16,
    ((*range(110, 125), EOD), ()),
    ((140, 141, 142, 143, EOD), ()),
]


@dataclass(frozen=True)
class Prediction:
    """What the reference found.

    Attributes:
        sums: summed loss of the main prediction and of each depth.
        counts: targets of each.
        gradient: of main mean + factor * mean over depths of their means.
    """

    sums: list[float]
    counts: list[int]
    gradient: Weights


def run_documents_alone(flags: str, documents: Sequence[Any], factor: float) -> Prediction:
    """Every document alone through the initial model of a run, in fp64."""
    import torch

    from megatron.packed.accelerator.compat import predicting_layer_name

    model, vocab_size = build_model(flags, double=True)
    depths = model.config.mtp_num_layers or 0
    repeats, detaches = "--mtp-use-repeated-layer" in flags, "--mtp-detach-heads" in flags
    hidden: list[torch.Tensor] = []
    model.decoder.register_forward_hook(lambda module, args, output: hidden.append(output))
    counts = [0] * (1 + depths)
    for tokens, more in documents:
        for depth in range(1 + depths):
            counts[depth] += max(0, min(len(tokens), len(tokens) + len(more) - 1 - depth))
    weights = [1.0, *[factor / max(depths, 1)] * depths]
    sums = [0.0] * (1 + depths)
    for tokens, more in documents:
        data = [*tokens, *more]
        positions = torch.arange(len(tokens))[None]
        hidden.clear()
        model(torch.tensor([tokens]), positions, None)
        (state,) = hidden
        total = torch.zeros((), dtype=torch.float64)
        for depth in range(1 + depths):
            # Positions whose input at this depth is in the data.
            there = min(len(tokens), len(data) - depth)
            if there <= 0:
                break
            state = state[:there]
            if depth:
                layer = model.mtp.layers[0 if repeats else depth - 1]
                ids = torch.tensor([data[depth : depth + there]])
                read = model.embedding(input_ids=ids, position_ids=positions[:, :there] + depth)
                if detaches:
                    read = read.detach()
                    state = state.detach() if depth == 1 else state
                joined = torch.cat((layer.enorm(read), layer.hnorm(state)), dim=-1)
                state = joined @ layer.eh_proj.weight.T
                with model.rotary_pos_emb.positions(positions[:, :there]):
                    state, _ = getattr(layer, predicting_layer_name())(
                        hidden_states=state,
                        attention_mask=None,
                        rotary_pos_emb=model.rotary_pos_emb(there),
                    )
                state = layer.final_layernorm(state)
            targets = data[1 + depth : 1 + depth + there]
            if not targets:
                break
            tied = model.share_embeddings_and_output_weights
            output = model.embedding.word_embeddings if tied else model.output_layer
            weight = output.weight.detach() if detaches and depth else output.weight
            logits = state[: len(targets), 0] @ weight.T[:, :vocab_size]
            loss = torch.nn.functional.cross_entropy(logits, torch.tensor(targets), reduction="sum")
            sums[depth] += loss.item()
            total = total + weights[depth] / counts[depth] * loss
        if total.requires_grad:
            total.backward()
    return Prediction(sums, counts, {n: gradient_of(p) for n, p in named(model)})


def compare(result: Any, reference: Prediction, depths: int) -> None:
    assert relative_l2(result.gradient, reference.gradient) < 1e-5
    assert result.loss_counts == [reference.counts[0]]
    assert result.losses[0] == pytest.approx(reference.sums[0] / reference.counts[0], rel=2e-6)
    for depth in range(1, depths + 1):
        total, count = result.reports[0][f"mtp_{depth} loss"]
        assert count == reference.counts[depth]
        assert total == pytest.approx(reference.sums[depth], rel=2e-6)


DEPTHS = [pytest.param(1, marks=pytest.mark.slow), 2]


@pytest.fixture(scope="module", params=DEPTHS)
def depths(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def reference(depths: int, worker_pool: WorkerPools) -> Prediction:
    command = f"{PACKED} --micro-batch-size 1 --mtp-num-layers {depths}"
    (result,) = worker_pool(1).run(run_documents_alone, command, DOCUMENTS, 0.7)
    return result


CP = "--context-parallel-size"
PP = "--pipeline-model-parallel-size"
TP = "--tensor-model-parallel-size"
SLOW = pytest.mark.slow
RECOMPUTE = "--recompute-granularity full --recompute-num-layers 1 --recompute-method"
LAYOUTS = [
    pytest.param(world, layout, id=layout.replace("--", "").replace(" ", "_"), marks=marks)
    for world, layout, marks in [
        (1, "--micro-batch-size 6", ()),
        (1, "--micro-batch-size 3", SLOW),
        (1, "--micro-batch-size 1", ()),
        (1, "--micro-batch-size 6 --packing-alignment segment", SLOW),
        (1, "--micro-batch-size 2 --packed-sequence-capacity 64", SLOW),
        (1, f"--micro-batch-size 3 {RECOMPUTE} uniform", ()),
        (1, f"--micro-batch-size 3 {RECOMPUTE} block", SLOW),
        (1, "--micro-batch-size 3 --recompute-activations", SLOW),
        (2, "--micro-batch-size 3", ()),
        (2, "--micro-batch-size 1 --use-distributed-optimizer", SLOW),
        (2, f"--micro-batch-size 3 {TP} 2", SLOW),
        (2, f"--micro-batch-size 3 {TP} 2 --sequence-parallel", ()),
        (2, f"--micro-batch-size 2 {PP} 2", ()),
        (2, f"--micro-batch-size 2 {PP} 2 {RECOMPUTE} uniform", SLOW),
        (2, f"--micro-batch-size 1 {PP} 2 --num-virtual-stages-per-pipeline-rank 1", SLOW),
        (2, f"--micro-batch-size 3 {CP} 2 --cp-comm-type p2p", ()),
        (2, f"--micro-batch-size 6 {CP} 2 --cp-comm-type a2a", SLOW),
        (2, f"--micro-batch-size 6 {CP} 2 --cp-comm-type p2p a2a", SLOW),
        (2, f"--micro-batch-size 6 {CP} 2 --cp-comm-type striped", SLOW),
        (2, f"--micro-batch-size 6 {CP} 2 --cp-comm-type all_gather", SLOW),
        (2, f"--micro-batch-size 6 {CP} 2 --attention-backend magi", ()),
        (4, f"--micro-batch-size 6 {CP} 4", SLOW),
        (4, f"--micro-batch-size 3 {CP} 2 --packing-alignment segment", SLOW),
        (4, f"--micro-batch-size 3 {CP} 2 {TP} 2 --sequence-parallel", SLOW),
    ]
]


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS)
def test_a_step_equals_its_documents(
    world_size: int, layout: str, depths: int, reference: Prediction, worker_pool: WorkerPools
) -> None:
    command = f"{PACKED} --mtp-num-layers {depths} {layout}"
    compare(run(worker_pool, world_size, command, rows=ROWS), reference, depths)


@pytest.mark.skipif(core_version() < (0, 17), reason="settings of newer megatron-core")
@pytest.mark.parametrize("tied", ["", pytest.param("untied", marks=SLOW)])
@pytest.mark.parametrize("kind", ["--mtp-detach-heads", "--mtp-use-repeated-layer"])
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (1, "--micro-batch-size 3"),
        pytest.param(1, f"--micro-batch-size 3 {RECOMPUTE} uniform", marks=SLOW),
        (2, f"--micro-batch-size 2 {CP} 2"),
        pytest.param(2, f"--micro-batch-size 2 {PP} 2", marks=SLOW),
        pytest.param(2, f"--micro-batch-size 3 {TP} 2 --sequence-parallel", marks=SLOW),
    ],
)
def test_kinds_of_predictions_of_newer_versions(
    world_size: int, layout: str, kind: str, tied: str, worker_pool: WorkerPools
) -> None:
    """Predictions that train their own layers alone, and one layer for every depth."""
    flags = PACKED if tied else PACKED.replace("--untie-embeddings-and-output-weights", "")
    flags = f"{flags} --mtp-num-layers 2 {kind}"
    command = f"{flags} --micro-batch-size 1"
    (reference,) = worker_pool(1).run(run_documents_alone, command, DOCUMENTS, 0.7)
    result = run(worker_pool, world_size, f"{flags} {layout}", rows=ROWS)
    layers = {name.split(".")[2] for name in result.gradient if name.startswith("mtp.layers")}
    assert layers == ({"0"} if "repeated" in kind else {"0", "1"})
    compare(result, reference, 2)


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (1, "--micro-batch-size 3"),
        (2, f"--micro-batch-size 2 {CP} 2"),
        pytest.param(2, f"--micro-batch-size 2 {PP} 2", marks=SLOW),
    ],
)
def test_rows_equal_packs(
    world_size: int, layout: str, depths: int, reference: Prediction, worker_pool: WorkerPools
) -> None:
    """Rows whose documents attend among themselves: the same model, without a pack."""
    command = f"{ROWS_AS_BLOCKS} --mtp-num-layers {depths} {layout}"
    # Tails of rows are read, unlike those of packs: their ids must exist.
    rows = [each | {"text": np.maximum(each["text"], 0)} for each in ROWS]
    compare(run(worker_pool, world_size, command, rows=rows), reference, depths)


@pytest.mark.parametrize("tied", ["", pytest.param("untied", marks=SLOW)])
@pytest.mark.parametrize(
    "stages", ["Et|tmmL", "Ett|mmL", "Ettmm|L", pytest.param("Et|tmm|L", marks=SLOW)]
)
def test_predictions_on_any_stage(tied: str, stages: str, worker_pool: WorkerPools) -> None:
    more = "--untie-embeddings-and-output-weights" if tied else ""
    flags = f"{FLAGS} {more} --use-packed-sequence --mtp-num-layers 2 --micro-batch-size 2"
    (reference,) = worker_pool(1).run(run_documents_alone, flags, DOCUMENTS, 0.7)
    count = stages.count("|") + 1
    command = f"{flags} {PP} {count} --pipeline-model-parallel-layout {stages}"
    result = run(worker_pool, count, command, rows=ROWS)
    compare(result, reference, 2)


@pytest.mark.parametrize(("world_size", "layout"), [(1, ""), (2, f"{CP} 2")])
def test_depths_without_a_target_weigh_nothing(
    world_size: int, layout: str, worker_pool: WorkerPools
) -> None:
    """No document has three tokens: depth 2 has no loss, and depth 1 has none of its own."""
    rows = [sample([30, EOD, 31, EOD, EOD], SEQ), sample([EOD] * 17, SEQ)]
    flags = f"{PACKED} --micro-batch-size 1 --global-batch-size 2"
    documents = [((30, EOD), ()), ((31, EOD), ()), ((EOD,), ())]
    plain = flags.replace("--mtp-loss-scaling-factor 0.7 ", "")
    (reference,) = worker_pool(1).run(run_documents_alone, plain, documents, 0.0)
    result = run(worker_pool, world_size, f"{flags} --mtp-num-layers 2 {layout}", rows=rows)
    assert result.reports == [{"mtp_1 loss": (0.0, 0.0), "mtp_2 loss": (0.0, 0.0)}]
    assert "mtp" not in next(x for x in result.log.splitlines() if "consumed samples" in x)
    deeper = {name: x for name, x in result.gradient.items() if name.startswith("mtp.")}
    assert deeper and not any(x.any() for x in deeper.values())
    main = {name: x for name, x in result.gradient.items() if name not in deeper}
    assert relative_l2(main, reference.gradient) < 1e-5


def test_beside_a_loss_of_documents(worker_pool: WorkerPools) -> None:
    """The main loss is another objective; the deeper ones stay means over tokens."""
    flags = f"{PACKED} --loss-reduction document --mtp-num-layers 1 --micro-batch-size 2"
    one = run(worker_pool, 1, flags, rows=ROWS)
    main = run(worker_pool, 1, f"{flags} --mtp-loss-scaling-factor 0", rows=ROWS)
    tokens = f"{PACKED} --mtp-num-layers 1 --micro-batch-size 2"
    with_both = run(worker_pool, 1, tokens, rows=ROWS).gradient
    without = run(worker_pool, 1, f"{tokens} --mtp-loss-scaling-factor 0", rows=ROWS).gradient
    expected = {n: main.gradient[n] + with_both[n] - without[n] for n in without}
    assert relative_l2(one.gradient, expected) < 1e-5
    two = run(worker_pool, 2, f"{flags} {CP} 2", rows=ROWS)
    assert relative_l2(two.gradient, one.gradient) < 1e-5
    assert math.isclose(*(r.reports[0]["objective"][0] for r in (one, two)), rel_tol=2e-6)


def test_context_parallelism_keeps_the_curve(worker_pool: WorkerPools) -> None:
    """Uneven documents over 6 steps."""
    rows = [ROWS[(7 * n) % 6] for n in range(36)]
    flags = f"{PACKED} --mtp-num-layers 2 --train-iters 6 --micro-batch-size 3"
    one = run(worker_pool, 1, flags, rows=rows)
    two = run(worker_pool, 2, f"{flags} {CP} 2", rows=rows)
    assert two.losses == pytest.approx(one.losses, rel=2e-6)
    for ours, theirs in zip(two.reports, one.reports, strict=True):
        for name, (total, count) in ours.items():
            assert count == theirs[name][1]
            assert total == pytest.approx(theirs[name][0], rel=2e-6)
    assert one.losses[-1] < one.losses[0]


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(1, "--micro-batch-size 3"), pytest.param(2, f"--micro-batch-size 1 {PP} 2", marks=SLOW)],
)
def test_with_experts(world_size: int, layout: str, worker_pool: WorkerPools) -> None:
    """Layers of deeper predictions hold experts like the decoder's last."""
    flags = (
        f"{PACKED} --mtp-num-layers 1 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 "
        "--moe-router-load-balancing-type none"
    )
    one = run(worker_pool, 1, f"{flags} --micro-batch-size 6", rows=ROWS)
    other = run(worker_pool, world_size, f"{flags} {layout}", rows=ROWS)
    assert any(name.startswith("mtp.") and "experts" in name for name in one.gradient)
    assert relative_l2(other.gradient, one.gradient) < 1e-5
    name = "mtp_1 loss"
    assert other.reports[0][name] == pytest.approx(one.reports[0][name], rel=2e-6)


def test_the_initial_weights_depend_on_no_layout(worker_pool: WorkerPools) -> None:
    from tests.distributed.harness import assert_bitwise_equal

    flags = f"{PACKED} --mtp-num-layers 2 --micro-batch-size 2"
    one = run(worker_pool, 1, flags, rows=ROWS).initial_weights
    for layout in (f"{PP} 2", f"{TP} 2 --sequence-parallel"):
        other = run(worker_pool, 2, f"{flags} {layout}", rows=ROWS).initial_weights
        assert_bitwise_equal(other, one)
    first, second = (one[f"mtp.layers.{n}.eh_proj.weight"] for n in (0, 1))
    assert not first.equal(second)


@pytest.mark.slow
@pytest.mark.parametrize(
    "stages",
    [
        "--num-virtual-stages-per-pipeline-rank 2",
        "--pipeline-model-parallel-layout Et|t|t|tmmL",
    ],
)
def test_virtual_stages(stages: str, worker_pool: WorkerPools) -> None:
    flags = f"{PACKED} --num-layers 4 --mtp-num-layers 2 --micro-batch-size 1"
    one = run(worker_pool, 1, flags, rows=ROWS)
    other = run(worker_pool, 2, f"{flags} {PP} 2 {stages}", rows=ROWS)
    assert other.losses == pytest.approx(one.losses, rel=2e-6)
    assert relative_l2(other.gradient, one.gradient) < 1e-5
    assert other.reports[0] == {n: pytest.approx(x, rel=2e-6) for n, x in one.reports[0].items()}


@pytest.mark.parametrize(
    ("world_size", "layout"), [(1, ""), pytest.param(2, f"{PP} 2", marks=SLOW)]
)
@pytest.mark.parametrize("tied", [pytest.param(True, marks=SLOW), False])
def test_restart(
    tied: bool, world_size: int, layout: str, tmp_path: Path, worker_pool: WorkerPools
) -> None:
    """A checkpoint of one process goes on under any layout."""
    rows = [ROWS[(7 * n) % 6] for n in range(24)]
    flags = f"{PACKED} --mtp-num-layers 2 --micro-batch-size 3 --train-iters 4"
    if tied:
        flags = flags.replace("--untie-embeddings-and-output-weights", "")
    whole = run(worker_pool, 1, flags, rows=rows)
    run(worker_pool, 1, f"{flags} --exit-interval 2 --save {tmp_path}", rows=rows)
    rest = run(worker_pool, world_size, f"{flags} --load {tmp_path} {layout}", rows=rows)
    if world_size == 1:
        assert rest.losses == whole.losses[2:]
        assert rest.reports == whole.reports[2:]
    assert rest.losses == pytest.approx(whole.losses[2:], rel=2e-6)
    for ours, theirs in zip(rest.reports, whole.reports[2:], strict=True):
        assert ours == {name: pytest.approx(x, rel=2e-6) for name, x in theirs.items()}
