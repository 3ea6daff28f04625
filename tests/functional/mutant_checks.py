"""Every mutant is caught by a test of the suite.

    python -m tests.functional.mutant_checks               all; docs/mutants.md
    python -m tests.functional.mutant_checks --only 'rope*' --no-docs

A check is what a test asserts, as one short run. It must pass on the product as it is and fail on
the mutant. Exits with 1 if a mutant survives.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHDYNAMO_DISABLE"):
    os.environ.setdefault(_variable, "1")

from tests.distributed import (  # noqa: E402
    test_document_loss,
    test_model_families,
    test_moe_documents,
    test_mtp,
    test_packed_documents,
    test_restart,
)
from tests.distributed.corpora import write_byte_corpus  # noqa: E402
from tests.distributed.documents import run_documents  # noqa: E402
from tests.distributed.harness import run  # noqa: E402
from tests.distributed.pool import WorkerPools, start_fork_server  # noqa: E402
from tests.distributed.recording import stream  # noqa: E402
from tests.functional.mutants import MUTANTS, MutatedPools  # noqa: E402
from tests.functional.parity import compare  # noqa: E402
from tests.functional.parity_layouts import LAYOUTS, MODELS, PACKED, samples  # noqa: E402
from tests.functional.parity_reference import train_documents  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 3


class Survived(AssertionError):
    """A mutant that its check doesn't see."""


@dataclass(frozen=True)
class Check:
    """What a test asserts.

    Attributes:
        test: its node id.
        run: the assertion; takes pools for references and pools for what is tested.
    """

    test: str
    run: Callable[[Any, Any], None]


# ---- checks --------------------------------------------------------------------------------------


def _train_like_documents(layout_name: str, pools: Any, tested: Any) -> None:
    """The first steps of a layout of the parity matrix."""
    (layout,) = (each for each in LAYOUTS if each.name == layout_name)
    flags = f"{MODELS[layout.model]} {{}} --train-iters {STEPS}"
    alone = flags.format(PACKED + "--micro-batch-size 1")
    (reference,) = pools(1).run(train_documents, alone, STEPS)
    result = run(tested, layout.processes, flags.format(layout.flags), rows=samples())
    difference = compare(layout.name, result, reference)
    assert difference.passed, " ".join(difference.line().split())


def _parity(layout: str) -> Check:
    test = f"tests/functional/test_parity_matrix.py::test_layout[{layout}]"
    return Check(test, partial(_train_like_documents, layout))


def _of(module: str, test: str) -> str:
    return f"tests/distributed/{module}.py::{test}"


def _padded_segments(pools: Any, tested: Any) -> None:
    flags = f"{test_packed_documents.COMMON} {test_packed_documents.MODELS['rope']}"
    pieces = test_packed_documents.PIECES
    (alone,) = pools(1).run(run_documents, f"{flags} --micro-batch-size 1", pieces, True)
    test_packed_documents.test_in_double_precision(8, flags, alone, tested)


def _learned_positions(pools: Any, tested: Any) -> None:
    flags = f"{test_packed_documents.COMMON} {test_packed_documents.MODELS['learned']}"
    pieces = test_packed_documents.PIECES
    (alone,) = pools(1).run(run_documents, f"{flags} --micro-batch-size 1", pieces, True)
    test_packed_documents.test_a_step_equals_its_documents(
        1, "--micro-batch-size 1", flags, alone, tested
    )


def _nan_in_padding(pools: Any, tested: Any) -> None:
    test_packed_documents.test_nan_in_padding_stays_out_of_the_loss(tested)


def _deeper_predictions(pools: Any, tested: Any) -> None:
    command = f"{test_mtp.PACKED} --micro-batch-size 1 --mtp-num-layers 2"
    documents = test_mtp.DOCUMENTS
    (reference,) = pools(1).run(test_mtp.run_documents_alone, command, documents, 0.7)
    test_mtp.test_a_step_equals_its_documents(1, "--micro-batch-size 6", 2, reference, tested)


def _weighted_documents(pools: Any, tested: Any) -> None:
    here = test_document_loss
    flags, reduction, lengths = here.OBJECTIVES["document"]
    weights = here.weights_of(reduction, lengths)
    command = f"{here.FLAGS} --global-batch-size 6 --micro-batch-size 1"
    (result,) = pools(1).run(here.run_weighted, command, here.PIECES, weights)
    total = sum(w * loss for w, loss in zip(weights, result.losses, strict=True))
    objective = flags, result, total / result.count
    here.test_a_step_equals_its_documents(2, "--micro-batch-size 3", objective, tested)


def _padded_experts(pools: Any, tested: Any) -> None:
    here = test_moe_documents
    flags = f"{here.EXPERTS} {here.DOCUMENT_LOSS} --micro-batch-size 1"
    (alone,) = pools(1).run(run_documents, flags, here.PIECES, True)
    here.test_packs_equal_documents("padded", tested, alone)


def _windows(pools: Any, tested: Any) -> None:
    here, family = test_model_families, "window-in-some-layers"
    flags = f"{here.COMMON} {here.FAMILIES[family]} --micro-batch-size 1"
    (alone,) = pools(1).run(run_documents, flags, here.PIECES, True)
    here.test_a_step_equals_its_documents(family, "one", tested, lambda name: alone)


def _goes_on(pools: Any, tested: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        texts = [f"document {number} " * (1 + number % 7) for number in range(400)]
        prefix = write_byte_corpus(Path(folder) / "text", texts)
        flags = (
            f"{test_restart.FLAGS} --data-path {prefix} --data-cache-path {folder}/cache "
            "--split 90,5,5 --tokenizer-type ByteTokenizer --num-workers 0 --micro-batch-size 1 "
            "--packing-strategy rows"
        )
        (whole,) = pools(1).run(stream, flags, 24, every=4)
        (again,) = tested(1).run(stream, flags, 12, state=whole.states[12])
    assert again.batches == whole.batches[12:], "other samples follow after a restart"


_ONE_PACK, _CP2 = _parity("one pack of 4 rows"), _parity("CP2 ring")
_PADDED = Check(_of("test_packed_documents", "test_in_double_precision[rope-8]"), _padded_segments)

CHECKS: dict[str, Check] = {
    "next-document": _ONE_PACK,
    "label-at-the-end": _ONE_PACK,
    "positions-go-on": Check(
        _of(
            "test_packed_documents",
            "test_a_step_equals_its_documents[learned-1---micro-batch-size 1]",
        ),
        _learned_positions,
    ),
    "boundary-off-by-one": _ONE_PACK,
    "padding-attended": _PADDED,
    "real-for-padded": _PADDED,
    "rows-unmasked": _parity("BSHD, 4 rows"),
    "window-off-by-one": Check(
        _of("test_model_families", "test_a_step_equals_its_documents[window-in-some-layers-one]"),
        _windows,
    ),
    "mtp-leak": Check(
        _of("test_mtp", "test_a_step_equals_its_documents[2-micro-batch-size_6]"),
        _deeper_predictions,
    ),
    "nan-times-zero": Check(
        _of("test_packed_documents", "test_nan_in_padding_stays_out_of_the_loss"), _nan_in_padding
    ),
    "mean-of-means": _parity("2 packs of 2 rows"),
    "weights-per-rank": Check(
        _of(
            "test_document_loss",
            "test_a_step_equals_its_documents[document-micro-batch-size_3_1]",
        ),
        _weighted_documents,
    ),
    "padding-routed": Check(
        _of("test_moe_documents", "test_packs_equal_documents[padded]"), _padded_experts
    ),
    "aux-loss-scale": _parity("experts, CP2 ring"),
    "local-positions": _CP2,
    "local-denominator": _CP2,
    "local-report": _CP2,
    "dkv-lost": _CP2,
    "gradients-not-reduced": _CP2,
    "replicas-of-keys": _parity("CP4 a2a"),
    "chunk-lost": _parity("CP2 dispatch"),
    "norms-not-reduced": _parity("TP2 SP"),
    "init-by-layout": _parity("PP2 VPP2"),
    "replicas-read-the-same": _parity("DP2, sharded optimizer"),
    "sample-repeated": Check(
        _of("test_restart", "test_a_stream_goes_on_where_it_stopped[rows]"), _goes_on
    ),
}
assert CHECKS.keys() == MUTANTS.keys(), CHECKS.keys() ^ MUTANTS.keys()


# ---- running them --------------------------------------------------------------------------------


def catch(pools: WorkerPools, name: str) -> str:
    """Run a mutant's check on the mutant, in ranks of its own.

    Args:
        pools: for references.
        name: of the mutant.

    Returns:
        The first line of what the check says.

    Raises:
        Survived: if it says nothing.
    """
    own = WorkerPools()  # whatever a fault leaves behind ends with these processes
    try:
        CHECKS[name].run(pools, MutatedPools(own, name))
    except Exception as error:  # a fault may also make the product itself stop
        lines = [line for line in str(error).splitlines() if line.strip()]
        # Without pytest, a plain assertion says nothing but where it stands.
        said = lines[0] if lines else traceback.extract_tb(error.__traceback__)[-1].line
        return f"{type(error).__name__}: {said}"
    finally:
        own.close()
    raise Survived(f"{name}: {CHECKS[name].test} doesn't see that {MUTANTS[name].fault}")


def write_page(path: Path, caught: dict[str, str]) -> None:
    """docs/mutants.md."""
    lines = [
        "# Mutants: would the tests notice?",
        "",
        f"{len(caught)} faults, put into the product by `tests/functional/mutants.py` for one "
        "call in the processes of a test, and the test that fails because of each. Every one of "
        "these tests passes on the product as it is. `make mutants` tries all and writes this "
        "page; a few of them are in `make test`.",
        "",
        "| mutant | fault | caught by | which says |",
        "|---|---|---|---|",
    ]
    for name, how in caught.items():
        said = f"`{how}`".replace("|", "\\|")
        said = said if len(said) <= 160 else said[:156] + "...`"
        test = CHECKS[name].test.replace("tests/", "", 1)
        lines.append(f"| {name} | {MUTANTS[name].fault} | `{test}` | {said} |")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Try mutants and write the page; the exit code says whether all were caught."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", help="pattern of mutants' names")
    parser.add_argument("--docs", type=Path, default=REPOSITORY / "docs", help="folder to write to")
    parser.add_argument("--no-docs", action="store_true", help="print alone")
    options = parser.parse_args(argv)
    chosen = [name for name in CHECKS if fnmatch.fnmatch(name, options.only)]
    if not chosen:
        parser.error(f"--only {options.only}: no mutant of that name")
    start_fork_server()
    pools = WorkerPools()
    caught: dict[str, str] = {}
    failed = 0
    try:
        for test in dict.fromkeys(CHECKS[name].test for name in chosen):
            next(check for check in CHECKS.values() if check.test == test).run(pools, pools)
            print(f"passes    {test}", flush=True)
        for name in chosen:
            begin = time.monotonic()
            try:
                caught[name] = catch(pools, name)
                verdict = "caught"
            except Survived as error:
                caught[name], verdict, failed = str(error), "SURVIVED", failed + 1
            print(
                f"{verdict:<9} {name} ({time.monotonic() - begin:.0f} s): {caught[name]}",
                flush=True,
            )
    finally:
        pools.close()
    print(f"{len(chosen) - failed} of {len(chosen)} mutants caught")
    if not options.no_docs and not failed:
        write_page(options.docs / "mutants.md", caught)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
