"""Compare the curves of runs: a table of differences from the first one, and a picture.

python tools/compare_loss_curves.py run_a/tensorboard run_b/tensorboard --output curves.png
python tools/compare_loss_curves.py golden_values_cpu.json run/tensorboard --metric "grad-norm"
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron.packed.cases.curves import Curve, compare, draw_overlay, read_curves
from megatron.packed.cli import user_errors
from megatron.packed.errors import DataError


def table(curves: dict[str, Curve], bound: float) -> list[str]:
    """Lines of the table; the first curve is what the others are compared with."""
    (reference_name, reference), *others = curves.items()
    width = max(len(name) for name in curves)
    lines = [f"{reference_name:<{width}}  {len(reference):>5} steps, what follows is compared with"]
    for name, curve in others:
        found = compare(curve, reference, bound)
        first = "never" if found.first is None else f"at step {found.first}"
        lines.append(
            f"{name:<{width}}  {found.steps:>5} steps, relative difference at most "
            f"{found.largest:.2e}, mean {found.mean:.2e}, more than {bound:g} {first}"
        )
    return lines


def main() -> None:
    """Parse the command line and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "runs", type=Path, nargs="+", help="TensorBoard folders or golden values, two or more"
    )
    parser.add_argument("--metric", default="lm loss", help="the scalar")
    parser.add_argument("--bound", type=float, default=1e-6, help="difference that is divergence")
    parser.add_argument("--output", type=Path, help="PNG to write")
    options = parser.parse_args()
    if len(options.runs) < 2:
        raise DataError(f"{options.runs[0]}: one run has nothing to be compared with; name two")
    curves: dict[str, Curve] = {}
    for path in options.runs:
        found = read_curves(path)
        if options.metric not in found:
            raise DataError(
                f"--metric {options.metric}: {path} has none of that name; it has "
                f"{', '.join(sorted(found))}"
            )
        curves[str(path)] = found[options.metric]
    print("\n".join(table(curves, options.bound)))
    if options.output is not None:
        draw_overlay(options.output, curves, options.metric)
        print(f"wrote {options.output}")


if __name__ == "__main__":
    with user_errors():
        main()
