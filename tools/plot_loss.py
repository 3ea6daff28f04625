"""Draw the loss curve of a run from its TensorBoard folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron.packed.cases.curves import read_scalar
from megatron.packed.cli import user_errors


def plot(folder: Path, output: Path) -> None:
    """Write the picture.

    Args:
        folder: the TensorBoard folder.
        output: PNG to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.0, 4.0), dpi=120)
    axes.plot(*read_scalar(folder, "lm loss"), label="training", linewidth=1.5)
    axes.plot(*read_scalar(folder, "lm loss validation"), "o-", label="validation")
    axes.set_xlabel("iteration")
    axes.set_ylabel("loss per supervised token (nats)")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)
    print(f"wrote {output}")


def main() -> None:
    """Parse the command line and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensorboard-dir", type=Path, required=True, help="Folder of the run.")
    parser.add_argument("--output", type=Path, required=True, help="PNG to write.")
    arguments = parser.parse_args()
    plot(arguments.tensorboard_dir, arguments.output)


if __name__ == "__main__":
    with user_errors():
        main()
