"""Optimizers and precision over layouts: Muon, shared-out states, loss scales, rates apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.packed.errors import TrainingError
from megatron.packed.model.builder import wrap_for_training
from tests.distributed.harness import RankResult, assert_bitwise_equal, run
from tests.distributed.pool import WorkerPools
from tests.distributed.test_checkpoint import stop_and_go_on
from tests.distributed.test_parity import COMMON, LLAMA, LLAMA_TIED, PACKED, check_parity

MUON = "--optimizer muon --muon-extra-scale-factor 0.2 --muon-momentum 0.9 --weight-decay 0.1 "
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel "
PP2, CP2 = "--pipeline-model-parallel-size 2 ", "--context-parallel-size 2 "
SHARED = "--use-distributed-optimizer "

RUNS = {
    "muon-tp2": (2, MUON, TP2),
    "muon-tp2-pp2": (4, MUON + "--muon-use-nesterov --muon-no-split-qkv ", TP2 + PP2),
    "dist-muon-dp2": (2, MUON, SHARED),
    "decoupled-pp2": (2, "--decoupled-lr 2e-3 --decoupled-min-lr 1e-3 ", PP2),
    "qk-norm-decay-tp2": (2, "--qk-layernorm --apply-wd-to-qk-layernorm --weight-decay 0.1 ", TP2),
    "data-last-pp2-dp2": (4, "", PP2 + "--use-tp-pp-dp-mapping " + SHARED),
    "data-last-cp2-pp2": (4, "", CP2 + PP2 + "--use-tp-pp-dp-mapping"),
    "instances-dp4": (4, "", SHARED + "--num-distributed-optimizer-instances 2"),
    "instances-cp2-dp2": (4, "", CP2 + SHARED + "--num-distributed-optimizer-instances 2"),
    "distributed-cp2-dp2": (4, "", CP2 + SHARED),
}
EVERY_RUN = {"muon-tp2", "dist-muon-dp2", "decoupled-pp2", "data-last-pp2-dp2", "instances-dp4"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in EVERY_RUN else pytest.mark.slow) for n in RUNS],
)
def test_layout_equals_one_process(
    name: str,
    worker_pool: WorkerPools,
    data_flags: str,
    one_process: Callable[[str], RankResult],
) -> None:
    world_size, what, layout = RUNS[name]
    flags = f"{COMMON} {LLAMA} {PACKED} {what}"
    result = run(worker_pool, world_size, f"{flags} {layout} {data_flags}")
    reference = one_process(flags)
    result.statistics.padded_tokens = reference.statistics.padded_tokens = 0
    check_parity(result, reference)


def test_muon_moves_matrices_and_adam_the_rest(
    one_process: Callable[[str], RankResult],
) -> None:
    """With a scale that makes Muon's step tiny, only what Adam has moves by its rate."""
    flags = f"{COMMON} {LLAMA_TIED} {PACKED} --train-iters 5 --weight-decay 0 "
    result = one_process(flags + "--optimizer muon --muon-extra-scale-factor 1e-6")
    assert one_process(flags).losses[0] == result.losses[0]
    for name, start in result.initial_weights.items():
        moved = (result.final_weights[name] - start).abs().max()
        matrix = start.dim() == 2 and "embedding" not in name and "output_layer" not in name
        assert (moved < 1e-5) == matrix, name


def test_decoupled_rate_is_of_embedding_and_output_layer(
    one_process: Callable[[str], RankResult],
) -> None:
    result = one_process(f"{COMMON} {LLAMA} {PACKED} --decoupled-lr 0 --decoupled-min-lr 0")
    for name, start in result.initial_weights.items():
        same = torch.equal(start, result.final_weights[name])
        assert same == ("embedding" in name or "output_layer" in name), name
    assert "learning rate: 1.000000E-04 | decoupled learning rate: 0.000000E+00" in result.log


def overlapped_wrap(config: Any, *args: Any) -> Any:
    """In place of `wrap_for_training`: what a CPU is spared."""
    return wrap_for_training(config.with_values({"overlap_grad_reduce": True}), *args)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "what"),
    [("", ""), ("", SHARED), (PP2 + "--num-virtual-stages-per-pipeline-rank 2 ", SHARED)],
    ids=["dp4", "dp4-shared", "dp2-pp2-virtual-shared"],
)
def test_gradients_that_go_out_early_are_the_same(
    layout: str,
    what: str,
    worker_pool: WorkerPools,
    data_flags: str,
    one_process: Callable[[str], RankResult],
) -> None:
    # The number of micro-batches grows: megatron-core learns from the first step how often a
    # gradient is added to before it goes out, and would let it out too early afterwards.
    flags = (
        f"{COMMON} {LLAMA} {PACKED} --num-layers 4 --rampup-batch-size 4 4 16 --global-batch-size 8"
    )
    replace = {"megatron.packed.model.builder.wrap_for_training": overlapped_wrap}
    result = run(worker_pool, 4, f"{flags} {what} {layout} {data_flags}", replace=replace)
    check_parity(result, one_process(flags))


# --- loss scale -----------------------------------------------------------------------------------

FP16 = f"{COMMON} {LLAMA} {PACKED} --fp16 --log-interval 1 "


def scale_of(trainer: Any) -> float:
    return float(trainer.step.optimizer.get_loss_scale())


@pytest.mark.parametrize("layout", [(1, ""), (2, PP2), (2, SHARED)], ids=["one", "pp2", "dp2"])
def test_overflow_skips_the_update_and_halves_the_scale(
    layout: tuple[int, str], worker_pool: WorkerPools, data_flags: str
) -> None:
    world_size, flags = layout
    scale = "--initial-loss-scale 4096 --hysteresis 1 --loss-scale-window 3 "
    result = run(worker_pool, world_size, f"{FP16} {scale} {flags} {data_flags}", inspect=scale_of)
    skipped = result.updated.index(True)
    assert 0 < skipped < 7
    assert result.updated[:skipped] == [False] * skipped
    assert result.grad_norms[:skipped] == [None] * skipped
    assert len(set(result.learning_rates[:skipped])) == 1, "no schedule goes on meanwhile"
    assert f"loss scale: 4096.0 | number of skipped iterations:   {1}" in result.log
    assert f"loss scale: {4096 / 2**skipped:.1f} | grad norm" in result.log
    assert "number of nan iterations:   0" in result.log
    assert result.losses[-1] < result.losses[0]


def test_a_constant_scale_changes_nothing_but_rounding(
    worker_pool: WorkerPools, data_flags: str, one_process: Callable[[str], RankResult]
) -> None:
    full = one_process(f"{COMMON} {LLAMA} {PACKED}")
    half = run(worker_pool, 1, f"{FP16} --loss-scale 64 {data_flags}")
    assert all(half.updated)
    assert half.losses == pytest.approx(full.losses, rel=2e-3)
    assert half.grad_norms == pytest.approx(full.grad_norms, rel=1e-2)
    assert "loss scale: 64.0 |" in half.log


def test_with_a_constant_scale_overflow_is_an_error(
    worker_pool: WorkerPools, data_flags: str
) -> None:
    with pytest.raises(TrainingError, match="NaN or Inf at iteration 1"):
        run(worker_pool, 1, f"{FP16} --loss-scale 1e9 {data_flags}")


def gradient_dtypes(trainer: Any) -> set[torch.dtype]:
    return {buffer.grad_dtype for chunk in trainer.step.model for buffer in chunk.buffers}


@pytest.mark.parametrize(
    ("flags", "dtype"), [("", torch.float32), ("--grad-reduce-in-bf16", torch.bfloat16)]
)
def test_gradients_accumulate_in(
    flags: str, dtype: torch.dtype, worker_pool: WorkerPools, data_flags: str
) -> None:
    short = f"{COMMON} {LLAMA} {PACKED} --bf16 --train-iters 3 --eval-iters 0 {flags}"
    result = run(worker_pool, 2, f"{short} {data_flags}", inspect=gradient_dtypes)
    assert result.extra == [{dtype}] * 2
    assert result.losses[-1] < result.losses[0]


# --- replicas -------------------------------------------------------------------------------------

CHECKED = f"{COMMON} {LLAMA} {PACKED} --check-weight-hash-across-dp-replicas-interval 2 "


def flip_a_bit(trainer: Any) -> None:
    """On rank 3 alone, when it first runs: one bit of one element."""
    if torch.distributed.get_rank() != 3:
        return
    model = trainer.step.model[0]

    def flip(*_: Any) -> None:
        handle.remove()
        for name, parameter in model.named_parameters():
            if name.endswith("layers.0.mlp.linear_fc2.weight"):
                parameter.data.view(torch.int32)[1, 2] ^= 1 << 12

    handle = model.register_forward_pre_hook(flip)


def test_a_flipped_bit_in_a_replica_is_found(worker_pool: WorkerPools, data_flags: str) -> None:
    """Two stages of two replicas: ranks 2 and 3 hold the second layer, their chunk's first."""
    message = (
        r"replicas differ after iteration 2: decoder\.layers\.1\.mlp\.linear_fc2\.weight on rank 3 "
        "differs from rank 2"
    )
    with pytest.raises(TrainingError, match=message):
        run(worker_pool, 4, f"{CHECKED} {PP2} {data_flags}", prepare=flip_a_bit)


def test_equal_replicas_pass(worker_pool: WorkerPools, data_flags: str) -> None:
    short = f"{CHECKED} {CP2} {SHARED} --train-iters 4 --eval-iters 0"
    assert len(run(worker_pool, 4, f"{short} {data_flags}").losses) == 4


# --- stop and go on -------------------------------------------------------------------------------

RESUMED = {
    "decoupled-shared": (2, "--decoupled-lr 5e-4 " + SHARED),
    "decoupled": (1, "--decoupled-lr 5e-4 --decoupled-min-lr 2e-4 "),
    "mup-decoupled": (1, "--use-mup --mup-base-hidden-size 32 --decoupled-lr 5e-4 "),
    "muon-virtual": (
        2,
        MUON + PP2 + "--num-layers 4 --num-virtual-stages-per-pipeline-rank 2 ",
    ),
    "dist-muon-bf16": (2, MUON + SHARED + "--bf16 "),
    "fp16-shared": (2, SHARED + "--fp16 --initial-loss-scale 4096 --loss-scale-window 3 "),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "decoupled" else pytest.mark.slow) for n in RESUMED],
)
def test_a_run_goes_on_where_it_stopped(
    name: str, worker_pool: WorkerPools, data_flags: str, tmp_path: Path
) -> None:
    world_size, flags = RESUMED[name]

    def train(world_size: int, more: str, **options: Any) -> RankResult:
        short = f"{COMMON} {LLAMA} {PACKED} --eval-iters 0 {more} {data_flags}"
        return run(worker_pool, world_size, short, **options)

    whole, first, second = stop_and_go_on(train, tmp_path, world_size, flags)
    assert first.losses + second.losses == whole.losses
    assert first.updated + second.updated == whole.updated
    assert first.learning_rates + second.learning_rates == whole.learning_rates
    assert_bitwise_equal(second.final_weights, whole.final_weights)
