"""Signs of life, slow ranks, and ranks that hang."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

import pytest

from megatron.packed.errors import EXIT_HANG, DataError
from megatron.packed.training.watch import HangWatch, Heartbeat, straggler_lines
from tests.faults.fleet import Fleet, both, hang, slow_down


def test_slow_and_hanging_ranks_are_named(fault_flags: str, tmp_path: Path) -> None:
    flags = f"{fault_flags} --log-straggler --heartbeat-file {tmp_path / 'alive' / 'beat.json'}"
    hook = partial(
        both,
        one=partial(slow_down, seconds=0.5, rank=1),
        other=partial(hang, iteration=4, rank=1, patience=8.0),
    )
    fleet = Fleet(2, flags, tmp_path / "records", prepare=hook)
    codes = fleet.run()
    assert EXIT_HANG in codes, fleet.output(1)
    slow = "WARNING: straggler: rank 1 takes "
    assert fleet.output().count(slow) == 3 and "straggler: rank 0" not in fleet.output()
    assert fleet.output().count("forward-backward before gradient reduction (ms): min ") == 3
    for rank, where in ((0, "finalize_model_grads"), (1, "stuck_here")):
        text = fleet.output(rank)
        assert f"error: rank {rank} on " in text and "iteration 3 (--distributed-timeout" in text
        assert f"in {where}" in text[text.index("error: rank") :]
    beat = json.loads((tmp_path / "alive" / "beat.json").read_text())
    assert beat["iteration"] >= 1 and beat["consumed_samples"] == 4 * beat["iteration"]
    assert {"phase", "time", "host", "pid"} <= beat.keys()


def test_lines_about_slow_ranks() -> None:
    lines = straggler_lines([0.1, 0.11, 0.25, 0.09], threshold=2.0, slowest=2)
    assert (
        "min 90.0 (rank 3), 100.0 (rank 0) | median 100.0 | max 250.0 (rank 2), 110.0" in lines[0]
    )
    assert lines[1:] == [
        "WARNING: straggler: rank 2 takes 250.0 ms a step before gradient reduction, "
        "2.50 times the median"
    ]
    # Of two ranks the faster one is the measure.
    assert "2.00 times" in straggler_lines([0.1, 0.2], threshold=1.5, slowest=1)[1]
    assert len(straggler_lines([0.1], threshold=1.5, slowest=1)) == 1


def test_signs_of_life_keep_a_process_alive(
    capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    timers: list[float] = []
    later = "megatron.packed.training.watch.faulthandler.dump_traceback_later"
    monkeypatch.setattr(later, lambda seconds, exit: timers.append(seconds))
    watch = HangWatch(0.4, time_to_print=0.1, end=codes.append)
    with watch.watching():
        for _ in range(6):
            time.sleep(0.15)
            watch.beat("step")
        assert codes == []
        time.sleep(1.2)
    assert codes == [EXIT_HANG]
    assert timers and set(timers) == {0.4 * 1.5 + 2 * 0.1}
    assert "in step (--distributed-timeout-minutes)" in capfd.readouterr().err
    with watch.watching():
        pass
    time.sleep(0.8)
    assert codes == [EXIT_HANG]


def test_a_heartbeat_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(DataError, match=r"--heartbeat-file .*can't be written"):
        Heartbeat(tmp_path / "taken" / "beat.json").check()
