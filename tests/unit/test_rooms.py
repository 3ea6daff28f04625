"""Arrows between the rooms of megatron.packed point one way; read from the imports themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "megatron" / "packed"
NAME = "megatron.packed"

# Each room may import those before it. `docs/architecture.md` shows the same list.
ROOMS = (
    "errors",
    "json_text",
    "processes",
    "extensions",
    "checkpoint",
    "arguments",
    "accelerator",
    "data",
    "packing",
    "attention",
    "context_parallel",
    "loss",
    "model",
    "training",
    "cases",
    "cli",
)

# The command line reads the table of helpers, which itself imports nothing of this package.
LEAVES = {"context_parallel.capabilities": "arguments"}

# What only some rooms may import from outside: planning stays light, packing knows no processes.
BARRED = {
    "errors": {"torch", "megatron.core", "numpy"},
    "json_text": {"torch", "megatron.core", "numpy"},
    "processes": {"torch", "megatron.core", "numpy"},
    "extensions": {"torch", "megatron.core", "numpy"},
    "arguments": {"megatron.core", "numpy"},
    "packing": {"torch.distributed"},
    "data": {"torch.distributed"},
}


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Every module or member that a file imports, anywhere in it, as a dotted name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide arrows"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def sources() -> dict[str, ast.AST]:
    """Dotted names below the package, and their parsed files."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = ast.parse(path.read_text())
    return found


def violations(files: dict[str, ast.AST]) -> list[str]:
    """Imports that point up, or out of a room into what it must not know."""
    problems = []
    for file, tree in files.items():
        room = file.split(".")[0]
        for name in imported_names(tree):
            below = name.removeprefix(f"{NAME}.") if name.startswith(f"{NAME}.") else None
            if below is None:
                barred = [b for b in BARRED.get(room, ()) if f"{name}.".startswith(f"{b}.")]
                problems += [f"{file} imports {name}: {room} must not know {b}" for b in barred]
                continue
            target = below.split(".")[0]
            if file in LEAVES:
                problems.append(f"{file} imports {name}: it is a leaf")
            elif target == room or LEAVES.get(".".join(below.split(".")[:2])) == room:
                continue
            elif target not in ROOMS or room not in ROOMS:
                problems.append(f"{file} imports {name}: name the room in {Path(__file__).name}")
            elif ROOMS.index(target) > ROOMS.index(room):
                problems.append(f"{file} imports {name}: {room} stands below {target}")
    return problems


def test_arrows_point_one_way():
    assert violations({file: tree for file, tree in sources().items() if file}) == []


def test_every_room_is_in_the_list():
    rooms = {
        path.stem for path in PACKAGE.iterdir() if path.is_dir() and (path / "__init__.py").exists()
    }
    assert rooms <= set(ROOMS)


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        ("packing.plan", "from megatron.packed.attention import plans", "stands below attention"),
        ("attention.executor", "import megatron.packed.training.loop", "stands below training"),
        ("attention.x", "def f():\n    from megatron.packed.model import gpt", "below model"),
        ("arguments.config", "import megatron.core", "must not know megatron.core"),
        ("packing.batch", "from torch import distributed", "must not know torch.distributed"),
        ("data.x", "from megatron.packed.context_parallel import capabilities", "below context"),
        ("context_parallel.capabilities", "from megatron.packed.errors import E", "is a leaf"),
        ("context_parallel.capabilities", "import megatron.packed.context_parallel.x", "leaf"),
        ("model.x", "from megatron.packed.attic import y", "name the room"),
    ],
)
def test_an_arrow_that_points_up_is_found(file, line, message):
    (problem,) = violations({file: ast.parse(line)})
    assert message in problem


def test_nothing_imports_the_entry_point():
    for tree in sources().values():
        assert not any(name.split(".")[0] == "pretrain_gpt" for name in imported_names(tree))
