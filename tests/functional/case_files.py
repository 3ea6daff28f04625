"""Cases of the functional tests: upstream's model_config.yaml, with a few keys of our own.

Upstream's keys are ENV_VARS, MODEL_ARGS (flag: value) and TEST_TYPE (regular or ckpt-resume). Ours
are PROCESSES, TAGS, and for ckpt-resume RESUME_ARGS and RESUME_PROCESSES, what the second part of
the run is laid out by. Values may hold ${DATA_PATH}, ${DATA_CACHE_PATH}, ${TENSORBOARD_PATH} and
${CHECKPOINT_PATH}.
"""

from __future__ import annotations

import fnmatch
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from megatron.packed.cases.case import Value, command_line, read_cases
from tests.distributed.corpora import write_byte_corpus

FOLDER = Path(__file__).resolve().parent / "test_cases"
GOLDEN = "golden_values_cpu.json"
TYPES = ("regular", "ckpt-resume")


@dataclass(frozen=True)
class FunctionalCase:
    """A run whose curves are known.

    Attributes:
        model: folder of the case's folder.
        name: the case's folder.
        folder: where its files are.
        kind: regular or ckpt-resume.
        processes: ranks.
        args: value of each flag.
        environment: variables.
        tags: what it is about.
        resume_args: flags that the second part of a ckpt-resume adds or changes.
        resume_processes: ranks of the second part.
    """

    model: str
    name: str
    folder: Path
    kind: str
    processes: int
    args: Mapping[str, Value]
    environment: Mapping[str, str]
    tags: tuple[str, ...]
    resume_args: Mapping[str, Value]
    resume_processes: int

    @property
    def id(self) -> str:
        """model/case."""
        return f"{self.model}/{self.name}"

    @property
    def golden(self) -> Path:
        """Where the golden values are."""
        return self.folder / GOLDEN

    @property
    def iterations(self) -> int:
        """Of the whole run."""
        return int(str(self.args["--train-iters"]))

    def words(self, work: Path, prefix: Path, *, resume: bool = False) -> list[str]:
        """The command line.

        Args:
            work: folder of this run's output.
            prefix: of the corpus.
            resume: of the second part of a ckpt-resume.
        """
        places = {
            "DATA_PATH": str(prefix),
            "DATA_CACHE_PATH": str(prefix.parent / "cache"),
            "TENSORBOARD_PATH": str(work / ("tensorboard_resumed" if resume else "tensorboard")),
            "CHECKPOINT_PATH": str(work / "checkpoints"),
        }
        args = dict(self.args)
        if resume:
            args |= self.resume_args
            args["--load"] = "${CHECKPOINT_PATH}"
            args["--ckpt-step"] = self.iterations // 2
            args = {name: value for name, value in args.items() if value is not False}
        words = command_line(args)
        return [Template(word).safe_substitute(places) for word in words]


def find_cases(
    *, only: str = "*", model: str = "*", tag: str | None = None
) -> list[FunctionalCase]:
    """Cases of this repository that match, in order of their names.

    Args:
        only: pattern of a case's name, or of model/case.
        model: pattern of its model.
        tag: one that it must have.
    """
    # By name first: reading all of them takes seconds.
    paths = [
        path
        for path in sorted(FOLDER.glob("*/*/model_config.yaml"))
        if fnmatch.fnmatch(path.parents[1].name, model)
        and (
            fnmatch.fnmatch(path.parent.name, only)
            or fnmatch.fnmatch(f"{path.parents[1].name}/{path.parent.name}", only)
        )
    ]
    cases = [_read(path) for path in paths]
    return [case for case in cases if tag is None or tag in case.tags]


def _read(path: Path) -> FunctionalCase:
    import yaml

    (case,) = read_cases(path)
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    if case.kind not in TYPES:
        raise ValueError(f"{path}: TEST_TYPE {case.kind} must be one of {', '.join(TYPES)}")
    processes = int(content.get("PROCESSES", 1))
    return FunctionalCase(
        model=path.parents[1].name,
        name=path.parent.name,
        folder=path.parent,
        kind=case.kind,
        processes=processes,
        args=case.args,
        environment={k: str(v) for k, v in (content.get("ENV_VARS") or {}).items()},
        tags=tuple(content.get("TAGS") or ()),
        resume_args=content.get("RESUME_ARGS") or {},
        resume_processes=int(content.get("RESUME_PROCESSES", processes)),
    )


def make_corpus(folder: Path) -> Path:
    """Write documents of made-up words, the same on every machine; return the corpus's prefix."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_byte_corpus(folder / "text", _texts())


def _texts(documents: int = 1500) -> Iterator[str]:
    """Lengths have a long tail: most documents hold a few words, some hundreds."""
    draw = random.Random(1234).random  # its stream is the same in every version
    letters = "etaoinshrdlu"
    words = [
        "".join(letters[int(draw() * 12)] for _ in range(1 + int(draw() * 7))) for _ in range(60)
    ]
    for _ in range(documents):
        length = 1 + int(2 / (0.01 + draw()))
        yield " ".join(words[int(60 * draw() ** 2)] for _ in range(length))
