"""Whole runs of the training program against golden values, to five decimals.

    python -m tests.functional.run                             all cases, through torchrun
    python -m tests.functional.run --only 'cp2_*' --jobs 2     some; --model and --tag choose, too
    python -m tests.functional.run --in-process                in ranks that stay, much quicker
    python -m tests.functional.run --record --only gpt3/bshd   write golden values, say what changed
    python -m tests.functional.run --twice                     every case again, bit by bit the same
    python -m tests.functional.run --cases DIR                 upstream's case folders, made small

A case is a folder with upstream's model_config.yaml and golden_values_cpu.json, see case_files.py.
The exit code is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHDYNAMO_DISABLE"):
    os.environ.setdefault(_variable, "1")

from megatron.packed.cases.curves import (  # noqa: E402
    DECIMALS,
    Curves,
    compare,
    draw_overlay,
    golden_text,
    read_golden,
    read_tensorboard,
)
from tests.distributed.pool import WorkerPools, start_fork_server  # noqa: E402
from tests.functional.case_files import FunctionalCase, find_cases, make_corpus  # noqa: E402
from tests.functional.launching import Launch, in_pool, through_torchrun  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[2]
METRICS = ("lm loss", "mtp_1 loss", "mtp_2 loss", "grad-norm", "lm loss validation")
HALF_A_UNIT = 0.5 * 10**-DECIMALS


@dataclass(frozen=True)
class CaseResult:
    """What became of a case.

    Attributes:
        case: model/case.
        status: ok, failed, or recorded.
        message: why, in a line.
        seconds: that it took.
    """

    case: str
    status: str
    message: str
    seconds: float = 0.0


class CaseFailed(Exception):
    """A case that isn't what it should be."""


# ---- one case ------------------------------------------------------------------------------------


def curves_of(folder: Path) -> Curves:
    """The metrics that golden values hold, of a TensorBoard folder."""
    found = read_tensorboard(folder)
    return {name: found[name] for name in METRICS if found.get(name)}


def train(case: FunctionalCase, work: Path, prefix: Path, launch: Launch) -> Curves:
    """Run a case and return its curves; of a ckpt-resume, its second part must repeat the first's.

    Raises:
        CaseFailed: when it doesn't.
    """
    launch(case.words(work, prefix), case.processes, case.environment, work)
    curves = curves_of(work / "tensorboard")
    if case.kind == "ckpt-resume":
        words = case.words(work, prefix, resume=True)
        launch(words, case.resume_processes, case.environment, work)
        _check_resumed(case, curves, curves_of(work / "tensorboard_resumed"))
    return curves


def _check_resumed(case: FunctionalCase, whole: Curves, resumed: Curves) -> None:
    """Bit by bit on the same layout, to rounding on another one."""
    half, steps = case.iterations // 2, case.iterations
    bound = 2e-6 if case.resume_args else 0.0
    for name in ("lm loss", *(each for each in whole if each.startswith("mtp_"))):
        if sorted(resumed[name]) != list(range(half + 1, steps + 1)):
            raise CaseFailed(f"{name}: went on with step {min(resumed[name])}, not {half + 1}")
        found = compare(resumed[name], whole[name], bound)
        if found.first is not None:
            raise CaseFailed(
                f"{name}: after the restart other values from step {found.first} on "
                f"(relative difference up to {found.largest:.1e})"
            )


def check_golden(case: FunctionalCase, curves: Curves) -> None:
    """Compare with the golden values.

    Raises:
        CaseFailed: there are none, of other metrics or steps, or other values.
    """
    if not case.golden.is_file():
        raise CaseFailed(f"has no {case.golden.name}; write it with --record")
    golden = read_golden(case.golden)
    if curves.keys() != golden.keys():
        raise CaseFailed(f"logs {sorted(curves)}, golden values are {sorted(golden)}")
    for name, reference in golden.items():
        curve = curves[name]
        if curve.keys() != reference.keys():
            raise CaseFailed(f"{name}: {len(curve)} steps logged, golden are {len(reference)}")
        for step, value in reference.items():
            if not abs(curve[step] - value) <= HALF_A_UNIT * 1.01:
                raise CaseFailed(
                    f"{name}: {curve[step]:.{DECIMALS}f} at step {step}, golden is "
                    f"{value:.{DECIMALS}f}"
                )


def record(case: FunctionalCase, curves: Curves, pictures: Path) -> str:
    """Write golden values; a line on what changed, and a picture where something did."""
    text = golden_text(curves)
    old = read_golden(case.golden) if case.golden.is_file() else None
    case.golden.write_text(text, encoding="utf-8")
    if old is None:
        return "new golden values"
    changes = []
    for name, curve in curves.items():
        found = compare({step: round(v, DECIMALS) for step, v in curve.items()}, old.get(name, {}))
        if found.first is not None or curve.keys() != old.get(name, {}).keys():
            changes.append(f"{name}: up to {found.largest:.1e} from step {found.first} on")
    if changes:
        picture = pictures / f"{case.model}_{case.name}.png"
        draw_overlay(picture, {"old": old["lm loss"], "new": curves["lm loss"]}, "lm loss")
        changes.append(f"see {picture}")
    return "; ".join(changes) or "golden values as before"


@dataclass(frozen=True)
class Runner:
    """How cases are run.

    Attributes:
        launch: starts the program and waits for it.
        folder: of all output.
        prefix: of the corpus.
        recording: write golden values in place of comparing with them.
        twice: run each case again and ask for the same bits.
        pictures: where pictures of changes go.
    """

    launch: Launch
    folder: Path
    prefix: Path
    recording: bool = False
    twice: bool = False
    pictures: Path = Path("functional_diff")

    def __call__(self, case: FunctionalCase) -> CaseResult:
        """Run one case and judge it."""
        begin = time.monotonic()
        try:
            curves = self._train(case, 1)
            if self.twice and self._train(case, 2) != curves:
                raise CaseFailed("a second run gives other bits")
            if self.recording:
                result = CaseResult(case.id, "recorded", record(case, curves, self.pictures))
            else:
                check_golden(case, curves)
                result = CaseResult(case.id, "ok", f"lm loss {_ends(curves['lm loss'])}")
        except Exception as error:  # of whatever kind: it is this case's, and others go on
            lines = str(error).strip().splitlines() or [""]
            result = CaseResult(case.id, "failed", f"{type(error).__name__}: {lines[-1]}")
        return replace(result, seconds=round(time.monotonic() - begin, 1))

    def _train(self, case: FunctionalCase, number: int) -> Curves:
        work = Path(tempfile.mkdtemp(prefix=f"{case.model}_{case.name}_{number}_", dir=self.folder))
        return train(case, work, self.prefix, self.launch)


def _ends(curve: dict[int, float]) -> str:
    return f"{curve[min(curve)]:.5f} > {curve[max(curve)]:.5f}"


# ---- all of them ---------------------------------------------------------------------------------


def run_all(
    cases: Sequence[FunctionalCase],
    run_one: Callable[[FunctionalCase], CaseResult],
    jobs: int,
    kept: Path | None,
) -> list[CaseResult]:
    """Run cases, `jobs` at once, and print each as it ends; those that `kept` calls ok are done."""
    known = dict(_kept(kept))
    waiting = [case for case in cases if case.id not in known]
    with ThreadPoolExecutor(max_workers=jobs) as threads:
        for result in threads.map(run_one, waiting):
            known[result.case] = result
            print(f"{result.status:<9}{result.case} ({result.seconds} s): {result.message}")
            sys.stdout.flush()
            if kept is not None and result.status != "failed":
                with kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
    return [known[case.id] for case in cases]


def _kept(path: Path | None) -> Iterator[tuple[str, CaseResult]]:
    if path is not None and path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            result = CaseResult(**json.loads(line))
            yield result.case, result


def write_junit(path: Path, results: Sequence[CaseResult]) -> None:
    """JUnit's XML, a test case each."""
    failed = [each for each in results if each.status == "failed"]
    suite = ElementTree.Element(
        "testsuite", name="functional", tests=str(len(results)), failures=str(len(failed))
    )
    for each in results:
        model, name = each.case.split("/", 1)
        entry = ElementTree.SubElement(
            suite, "testcase", classname=f"functional.{model}", name=name, time=str(each.seconds)
        )
        if each.status == "failed":
            ElementTree.SubElement(entry, "failure", message=each.message)
    ElementTree.ElementTree(suite).write(path, encoding="utf-8", xml_declaration=True)


def try_upstream(folder: Path, only: str, jobs: int) -> list[CaseResult]:
    """Shrink and try every model_config.yaml under a folder, as tools/try_case.py does."""
    sys.path.insert(0, str(REPOSITORY / "tools"))
    import try_case

    from megatron.packed.cases.case import read_cases

    paths = sorted(folder.glob("**/model_config.yaml"))
    cases = [
        replace(case, name=f"{path.parents[1].name}/{case.name}")
        for path in paths
        for case in read_cases(path)
    ]
    chosen = [case for case in cases if try_case._matches(case.name, only)]
    with tempfile.TemporaryDirectory(prefix="upstream_cases_") as work:
        records = try_case.try_cases(chosen, Path(work), jobs=jobs)
    return [CaseResult(r["case"], r["status"], r["reason"], r["seconds"]) for r in records]


def main(argv: Sequence[str] | None = None) -> int:
    """Run cases; the exit code says whether all passed."""
    options = _parser().parse_args(argv)
    if options.cases is not None:
        results = try_upstream(options.cases, options.only, options.jobs)
    else:
        cases = find_cases(only=options.only, model=options.model, tag=options.tag)
        results = _run_ours(cases, options) if cases else []
    if not results:
        print("error: no case of that name, model and tag", file=sys.stderr)
        return 2
    if options.junit is not None:
        write_junit(options.junit, results)
    failed = sum(each.status == "failed" for each in results)
    print(f"{len(results) - failed} passed, {failed} failed")
    return 1 if failed else 0


def _run_ours(cases: Sequence[FunctionalCase], options: argparse.Namespace) -> list[CaseResult]:
    with tempfile.TemporaryDirectory(prefix="functional_") as name:
        folder = Path(options.keep or name).resolve()
        prefix = make_corpus(folder / "corpus")
        pools = None
        launch: Launch = through_torchrun
        if options.in_process:
            start_fork_server()
            pools = WorkerPools()
            launch = in_pool(pools)
        runner = Runner(
            launch, folder, prefix, options.record, options.twice, options.pictures.resolve()
        )
        try:
            return run_all(cases, runner, 1 if pools else options.jobs, options.resume)
        finally:
            if pools is not None:
                pools.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", help="pattern of a case's name, or of model/case")
    parser.add_argument("--model", default="*", help="pattern of models")
    parser.add_argument("--tag", help="cases with this tag alone")
    parser.add_argument(
        "--cases", type=Path, help="try upstream's cases of this folder, made small"
    )
    parser.add_argument("--record", action="store_true", help="write golden values")
    parser.add_argument("--twice", action="store_true", help="run each again: the same bits")
    parser.add_argument("--in-process", action="store_true", help="in ranks that stay")
    parser.add_argument("--jobs", type=int, default=1, help="cases at once, through torchrun")
    parser.add_argument("--resume", type=Path, help="JSON lines of cases that have passed")
    parser.add_argument("--junit", type=Path, help="XML file to write")
    parser.add_argument("--keep", help="folder to keep the runs' output in")
    parser.add_argument(
        "--pictures", type=Path, default=Path("functional_diff"), help="of changes, with --record"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
