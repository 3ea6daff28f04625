"""What runs have logged: TensorBoard folders and golden values, read alike and compared.

A file of golden values is `{metric: {start_step, end_step, step_interval, values: {step: value}}}`
with five decimals, as upstream's functional tests keep them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.packed.errors import DataError

Curve = dict[int, float]
Curves = dict[str, Curve]
DECIMALS = 5


@dataclass(frozen=True)
class Comparison:
    """How far a curve is from another at the steps that both have.

    Attributes:
        steps: of both.
        largest: relative difference.
        mean: relative difference.
        first: step at which they first differ by more than was asked; None if they never do.
    """

    steps: int
    largest: float
    mean: float
    first: int | None


def read_scalar(folder: Path, name: str) -> tuple[list[int], list[float]]:
    """Read one scalar of a TensorBoard folder.

    Args:
        folder: where the event files are.
        name: the scalar's tag.

    Returns:
        Steps and values; empty if the tag doesn't occur.

    Raises:
        DataError: the folder holds no event file.
    """
    curve = read_tensorboard(folder).get(name, {})
    return list(curve), list(curve.values())


def read_tensorboard(folder: Path) -> Curves:
    """Read every scalar of a TensorBoard folder by its tag; the last value of a step counts.

    Args:
        folder: where the event files are.

    Raises:
        DataError: the folder holds no event file.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if not any(folder.glob("events.out.tfevents.*")):
        raise DataError(
            f"--tensorboard-dir {folder}: holds no TensorBoard events; train with "
            "--tensorboard-dir first"
        )
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: {event.step: event.value for event in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
    }


def read_golden(path: Path) -> Curves:
    """Read a file of golden values.

    Args:
        path: JSON; values by step, or a list of them.

    Raises:
        DataError: the file can't be read, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {name: _golden_curve(entry) for name, entry in content.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: must hold golden values, metric: start_step, end_step, step_interval and "
            f"values ({error})"
        ) from None


def _golden_curve(entry: Mapping[str, object]) -> Curve:
    values = entry["values"]
    if isinstance(values, Mapping):
        pairs = [(int(step), value) for step, value in values.items()]
    else:
        assert isinstance(values, Sequence)
        first, interval = int(str(entry["start_step"])), int(str(entry["step_interval"]))
        pairs = [(first + interval * place, value) for place, value in enumerate(values)]
    # Upstream writes "nan" for a step that wasn't logged.
    return {step: float(value) for step, value in pairs if not math.isnan(float(value))}


def golden_text(curves: Curves) -> str:
    """Golden values as their file holds them.

    Args:
        curves: of a run; none empty.
    """
    entries = {}
    for name, curve in curves.items():
        steps = sorted(curve)
        entries[name] = {
            "start_step": steps[0],
            "end_step": steps[-1],
            "step_interval": steps[1] - steps[0] if len(steps) > 1 else 1,
            "values": {str(step): round(curve[step], DECIMALS) for step in steps},
        }
    return json.dumps(entries, indent=1) + "\n"


def read_curves(path: Path) -> Curves:
    """Read a TensorBoard folder or a file of golden values.

    Args:
        path: one or the other.

    Raises:
        DataError: it is neither.
    """
    return read_tensorboard(path) if path.is_dir() else read_golden(path)


def compare(curve: Curve, reference: Curve, bound: float = 0.0) -> Comparison:
    """Compare a curve with another one.

    Args:
        curve: values by step.
        reference: values by step.
        bound: relative difference from which on they diverge.
    """
    steps = sorted(curve.keys() & reference.keys())
    differences = {step: _relative(curve[step], reference[step]) for step in steps}
    largest = max(differences.values(), default=math.nan)
    mean = sum(differences.values()) / len(steps) if steps else math.nan
    first = next((step for step, size in differences.items() if size > bound), None)
    return Comparison(len(steps), largest, mean, first)


def _relative(value: float, reference: float) -> float:
    if value == reference or (math.isnan(value) and math.isnan(reference)):
        return 0.0
    if math.isnan(value) or math.isnan(reference):
        return math.inf
    return abs(value - reference) / max(abs(reference), 1e-300)


def draw_overlay(path: Path, curves: Mapping[str, Curve], metric: str) -> None:
    """Draw curves over each other, and below them how far they are from the first.

    Args:
        path: PNG to write.
        curves: by what the legend calls them.
        metric: label of the axis.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(7.0, 5.5), dpi=120, sharex=True, height_ratios=(2, 1)
    )
    first = next(iter(curves.values()))
    for name, curve in curves.items():
        above.plot(list(curve), list(curve.values()), label=name, linewidth=1.5)
        steps = sorted(curve.keys() & first.keys())
        below.plot(steps, [_relative(curve[step], first[step]) for step in steps], linewidth=1.5)
    above.set_ylabel(metric)
    below.set_ylabel("relative difference")
    below.set_xlabel("iteration")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    above.legend(frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
