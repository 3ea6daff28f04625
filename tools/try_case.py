"""Try somebody's cluster runs on this CPU: shrink each, train three steps, say what became of it.

    python tools/try_case.py cases.jsonl --only 'moe/*' --jobs 2 --report out.json
    python tools/try_case.py tests/functional/test_cases/gpt/some_case/model_config.yaml

FILE holds JSON lines of {"case", "type", "args"}, or is a model_config.yaml of upstream's
functional tests. A line a case: `ok` and its falling losses, `refused` by a flag's name, or
`failed`; then the total. The exit code is 1 if any failed.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from megatron.packed.cases.case import Case, known_flags, read_cases  # noqa: E402
from megatron.packed.cases.launch import Launched, Outcome, end, outcome, start, wait_for_one  # noqa: E402
from megatron.packed.cases.local_files import LocalFiles, localise, make_local_files  # noqa: E402
from megatron.packed.cases.shrink import STEPS, SmallRun, shrink  # noqa: E402
from megatron.packed.errors import DataError  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    """Try every case that matches; return the exit code.

    Args:
        argv: The command line without the program's name.
    """
    options = _parser().parse_args(argv)
    try:
        cases = read_cases(options.file)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    chosen = [case for case in cases if _matches(case.name, options.only)]
    chosen = chosen[options.offset :: options.every]
    if not chosen:
        print(f"error: --only {options.only}: no case of that name", file=sys.stderr)
        return 2
    with _output_folder(options.keep) as folder:
        results = try_cases(
            chosen,
            folder,
            jobs=options.jobs,
            timeout=options.timeout,
            drop_unknown=options.drop_unknown,
        )
    total = Counter(result["status"] for result in results)
    print(", ".join(f"{total[status]} {status}" for status in ("ok", "refused", "failed")))
    if options.report:
        Path(options.report).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 1 if total["failed"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", help="JSON lines, or a model_config.yaml")
    parser.add_argument("--only", default="*", help="pattern of names, or a part of them")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--report", help="write the outcomes to this JSON file")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds a run may take")
    parser.add_argument("--every", type=int, default=1, help="take every n-th case alone")
    parser.add_argument("--offset", type=int, default=0, help="first of them")
    parser.add_argument(
        "--drop-unknown", action="store_true", help="leave out flags that this build doesn't have"
    )
    parser.add_argument("--keep", help="folder to keep the runs' output in")
    return parser


@contextlib.contextmanager
def _output_folder(kept: str | None) -> Iterator[Path]:
    if kept is not None:
        Path(kept).mkdir(parents=True, exist_ok=True)
        yield Path(kept).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="try_case_") as folder:
        yield Path(folder)


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatch(name, pattern) or pattern in name


def try_cases(
    cases: Sequence[Case],
    folder: Path,
    *,
    jobs: int = 1,
    timeout: float = 180.0,
    drop_unknown: bool = False,
) -> list[dict[str, Any]]:
    """Run cases, a few at once, and print a line for each as it ends.

    Args:
        cases: What to try.
        folder: For corpora and output.
        jobs: Runs at once.
        timeout: Seconds for each.
        drop_unknown: Leave out flags that this build doesn't have.

    Returns:
        One record a case, in the order of `cases`.
    """
    files = make_local_files(folder)
    program = _load_program()
    waiting, running = list(enumerate(cases)), {}
    results: dict[int, dict[str, Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                number, case = waiting.pop(0)
                place = folder / f"run_{number:03d}"
                shutil.rmtree(place, ignore_errors=True)  # a kept run's checkpoints would be loaded
                place.mkdir()
                run = _prepare(case, files, place, drop_unknown)
                running[number] = start(run, place, program, timeout)
            for launched in wait_for_one(list(running.values())):
                number = next(n for n, each in running.items() if each is launched)
                del running[number]
                result = outcome(launched, STEPS)
                results[number] = _record(launched, result)
                print(_line(launched.run, result), flush=True)
    finally:
        for launched in running.values():
            end(launched)
    return [results[number] for number in sorted(results)]


def _prepare(case: Case, files: LocalFiles, folder: Path, drop_unknown: bool) -> SmallRun:
    """The case as it runs here."""
    run = localise(shrink(case), files, folder)
    unknown = [name for name in run.args if name not in known_flags()] if drop_unknown else []
    if not unknown:
        return run
    args = {name: value for name, value in run.args.items() if name not in unknown}
    return replace(run, args=args, notes=(*run.notes, f"without {' '.join(unknown)}"))


def _load_program() -> Callable[[], None]:
    """Import the training program with all it stands on, once for all ranks to come."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHDYNAMO_DISABLE"):
        os.environ.setdefault(variable, "1")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    warnings.simplefilter("ignore")  # of libraries that miss CUDA's
    from megatron.packed.accelerator import select_accelerator

    select_accelerator("cpu")
    import pretrain_gpt
    from megatron.packed.cli import user_errors
    from megatron.packed.training import environment, setup  # noqa: F401

    def program() -> None:
        with user_errors():
            pretrain_gpt.main()

    return program


def _line(run: SmallRun, result: Outcome) -> str:
    notes = f" [{'; '.join(run.notes)}]" if run.notes else ""
    return (
        f"{result.status:<8}{run.case.name}: {result.reason} "
        f"({run.processes} processes, {result.seconds:.0f} s){notes}"
    )


def _record(launched: Launched, result: Outcome) -> dict[str, Any]:
    return {
        "case": launched.run.case.name,
        "type": launched.run.case.kind,
        "status": result.status,
        "reason": result.reason,
        "losses": list(result.losses),
        "processes": launched.run.processes,
        "seconds": round(result.seconds, 1),
        "notes": list(launched.run.notes),
        "flags": launched.words,
    }


if __name__ == "__main__":
    sys.exit(main())
