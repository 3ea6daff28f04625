"""The parity matrix: every layout trains what one process trains on one document at a time.

    python -m tests.functional.parity                      all layouts; docs/parity.md and .png
    python -m tests.functional.parity --only 'CP*' --no-docs

Exits with 1 if a layout's losses differ by more than 2e-6 (relative), its first gradient or its
final weights by more than 1e-5 (relative L2), or if it counts other targets.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHDYNAMO_DISABLE"):
    os.environ.setdefault(_variable, "1")

from tests.distributed.harness import RankResult, relative_l2, run  # noqa: E402
from tests.distributed.pool import WorkerPools, start_fork_server  # noqa: E402
from tests.functional.parity_layouts import (  # noqa: E402
    BATCH,
    LAYOUTS,
    MODELS,
    PACKED,
    SEQ,
    STEPS,
    Layout,
    samples,
)
from tests.functional.parity_reference import Reference, train_documents  # noqa: E402

LOSS_BOUND, GRADIENT_BOUND, WEIGHT_BOUND = 2e-6, 1e-5, 1e-5
REPOSITORY = Path(__file__).resolve().parents[2]
RUN_TIMEOUT = 900.0


@dataclass(frozen=True)
class Difference:
    """How far a layout is from the reference.

    Attributes:
        layout: its name.
        loss: largest relative difference of a step's loss.
        gradient: relative L2 of the first step's gradient.
        weights: relative L2 of the final weights.
        seconds: that the run took.
        fault: what is wrong besides the numbers.
    """

    layout: str
    loss: float
    gradient: float
    weights: float
    seconds: float = 0.0
    fault: str = ""

    @property
    def passed(self) -> bool:
        """Whether all bounds are kept."""
        return (
            not self.fault
            and self.loss <= LOSS_BOUND
            and self.gradient <= GRADIENT_BOUND
            and self.weights <= WEIGHT_BOUND
        )

    def line(self) -> str:
        """A row of the printed matrix."""
        verdict = "ok  " if self.passed else "FAIL"
        return (
            f"{verdict} {self.layout:<34} loss {self.loss:8.1e}  gradient {self.gradient:8.1e}  "
            f"weights {self.weights:8.1e}  {self.seconds:5.1f} s  {self.fault}"
        )


def reference_of(pools: WorkerPools, model: str) -> Reference:
    """The run of documents of a model."""
    flags = f"{MODELS[model]} {PACKED} --micro-batch-size 1"
    (reference,) = pools(1).run(train_documents, flags, timeout=RUN_TIMEOUT)
    return reference


def measure(pools: WorkerPools, layout: Layout, reference: Reference) -> Difference:
    """Train a layout and compare it."""
    begin = time.monotonic()
    flags = f"{MODELS[layout.model]} {layout.flags}"
    try:
        result = run(pools, layout.processes, flags, rows=samples(), timeout=RUN_TIMEOUT)
    except Exception as error:  # any failure of a layout is a row of the matrix
        nan = float("nan")
        fault = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return Difference(layout.name, nan, nan, nan, time.monotonic() - begin, fault)
    return compare(layout.name, result, reference, time.monotonic() - begin)


def compare(
    name: str, result: RankResult, reference: Reference, seconds: float = 0.0
) -> Difference:
    """Differences of a run from the reference."""
    fault = "" if result.loss_counts == reference.counts else "other targets are counted"
    if len(result.losses) != len(reference.losses) or not all(result.updated):
        fault = "other updates were made"
    pairs = zip(result.losses, reference.losses, strict=False)
    return Difference(
        layout=name,
        loss=max(abs(ours / theirs - 1) for ours, theirs in pairs),
        gradient=relative_l2(result.gradient, reference.gradient),
        weights=relative_l2(result.final_weights, reference.weights),
        seconds=seconds,
        fault=fault,
    )


# ---- documents -----------------------------------------------------------------------------------


def write_page(path: Path, differences: Sequence[Difference]) -> None:
    """docs/parity.md."""
    known = {layout.name: layout for layout in LAYOUTS}
    worst = {
        what: max(getattr(each, what) for each in differences)
        for what in ("loss", "gradient", "weights")
    }
    passed = sum(each.passed for each in differences)
    lines = [
        "# Parity of layouts",
        "",
        f"{passed} of {len(differences)} layouts train what one process trains on one document at "
        f"a time: {STEPS} steps of {BATCH} rows of {SEQ} tokens, Adam at a rate of 1e-3, fp32. The "
        "reference (`tests/functional/parity_reference.py`) shares the model's modules and initial "
        "weights with the program; batches, targets, sums, clipping and Adam are its own.",
        "",
        "`make parity` measures it again and writes this page; a quarter of the layouts is in "
        "`make test`. Bounds: 2e-6 for every step's loss (relative), 1e-5 for the first gradient "
        "and the final weights (relative L2), and the same targets counted in every step.",
        "",
        f"Worst of all: loss {worst['loss']:.1e}, gradient {worst['gradient']:.1e}, weights "
        f"{worst['weights']:.1e}.",
        "",
        "![differences of all layouts](parity.png)",
        "",
    ]
    for group in dict.fromkeys(known[each.layout].group for each in differences):
        lines += [f"## {group.capitalize()}", ""]
        lines += [
            "| layout | processes | loss | gradient | weights | |",
            "|---|---|---|---|---|---|",
        ]
        for each in differences:
            if known[each.layout].group == group:
                lines.append(
                    f"| {each.layout} | {known[each.layout].processes} | {each.loss:.1e} | "
                    f"{each.gradient:.1e} | {each.weights:.1e} | "
                    f"{'ok' if each.passed else '**' + (each.fault or 'over the bound') + '**'} |"
                )
        lines.append("")
    path.write_text("\n".join(lines), encoding="utf-8")


def draw(path: Path, differences: Sequence[Difference]) -> None:
    """Points for the three differences of every layout, on a logarithmic axis with the bounds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.0, 0.17 * len(differences) + 1.4), dpi=120)
    heights = range(len(differences), 0, -1)
    floor = 1e-9
    for what, marker, colour in (
        ("loss", "o", "tab:blue"),
        ("gradient", "s", "tab:orange"),
        ("weights", "^", "tab:green"),
    ):
        values = [max(floor, getattr(each, what)) for each in differences]
        axes.plot(values, heights, marker, color=colour, markersize=4, label=what)
    axes.axvline(LOSS_BOUND, color="tab:blue", linewidth=1, linestyle="--")
    axes.axvline(WEIGHT_BOUND, color="tab:green", linewidth=1, linestyle="--")
    axes.set_xscale("log")
    axes.set_yticks(list(heights), [each.layout for each in differences], fontsize=6)
    axes.set_ylim(0, len(differences) + 1)
    axes.set_xlabel("relative difference from one document at a time (dashed: bounds)")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper center", fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; the exit code says whether all passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", help="pattern of layouts' names")
    parser.add_argument("--docs", type=Path, default=REPOSITORY / "docs", help="folder to write to")
    parser.add_argument("--no-docs", action="store_true", help="print alone")
    parser.add_argument("--resume", type=Path, help="JSON lines to keep and to go on from")
    options = parser.parse_args(argv)
    chosen = [layout for layout in LAYOUTS if fnmatch.fnmatch(layout.name, options.only)]
    if not chosen:
        parser.error(f"--only {options.only}: no layout of that name")
    start_fork_server()
    pools = WorkerPools()
    try:
        differences = _measure_all(pools, chosen, options.resume)
    finally:
        pools.close()
    passed = sum(each.passed for each in differences)
    print(f"{passed} of {len(differences)} layouts within the bounds")
    if not options.no_docs:
        write_page(options.docs / "parity.md", differences)
        draw(options.docs / "parity.png", differences)
    return 0 if passed == len(differences) else 1


def _measure_all(
    pools: WorkerPools, layouts: Sequence[Layout], kept: Path | None
) -> list[Difference]:
    known: dict[str, Difference] = {}
    if kept is not None and kept.is_file():
        for line in kept.read_text(encoding="utf-8").splitlines():
            known[json.loads(line)["layout"]] = Difference(**json.loads(line))
    references: dict[str, Reference] = {}
    for layout in layouts:
        if layout.name not in known:
            if layout.model not in references:
                references[layout.model] = reference_of(pools, layout.model)
            known[layout.name] = measure(pools, layout, references[layout.model])
            if kept is not None:
                with kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(known[layout.name])) + "\n")
        print(known[layout.name].line(), flush=True)
    return [known[layout.name] for layout in layouts]


if __name__ == "__main__":
    sys.exit(main())
