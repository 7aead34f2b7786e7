"""Imports go one way: a room imports only rooms listed before it, and heavy libraries stay in their rooms."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "gpq_faiss"

# Lowest first. codes/ to index/ and evaluate/ come before nn/ since training validates by ranking codes.
LAYERS = [
    "errors",
    "inputs",
    "stages",
    "files",
    "signals",
    "evaluate",
    "codes",
    "config",
    "report",
    "store",
    "faissio",
    "data",
    "index",
    "nn",
    "losses",
    "build",
    "gpu",
    "methods",
    "batches",
    "checkpoint",
    "train",
    "encode",
    "search",
    "evaluation",
    "experiment",
    "export_encoder",
    "info",
    "pipeline",
]

# Library -> the rooms that may import it at all.
ONLY_IN = {
    "h5py": {"store"},
    "faiss": {"codes", "faissio", "index", "build", "gpu", "methods"},
    "matplotlib": {"report"},
    "click": set(),
    "tqdm": set(),
}
NO_TORCH = {
    *("errors", "inputs", "files", "signals", "evaluate", "codes", "config", "report", "store"),
    *("faissio", "data", "index", "build"),
}
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything that ``file`` imports, anywhere in it."""
    package = ["gpq_faiss", *file.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def test_every_file_belongs_to_a_layer() -> None:
    assert {room_of(f) for f in FILES} - {"__init__"} <= set(LAYERS)


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_point_upward(file: Path) -> None:
    room = room_of(file)
    if room == "__init__":
        assert not [name for _, name in imports(file) if name != "__future__.annotations"]
        return
    allowed = {*LAYERS[: LAYERS.index(room) + 1], "__version__"}
    wrong = [
        f"{file.name}:{line} imports {name}"
        for line, name in imports(file)
        if name.startswith("gpq_faiss.") and name.split(".")[1] not in allowed
    ]
    assert not wrong


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_libraries_stay_in_their_rooms(file: Path) -> None:
    room = room_of(file)
    top = {name.split(".")[0] for _, name in imports(file)}
    assert not {lib for lib, rooms in ONLY_IN.items() if lib in top and room not in rooms}
    if room in NO_TORCH:
        assert "torch" not in top


def test_the_command_line_is_on_top() -> None:
    wrong = [
        str(f) for f in FILES for _, name in imports(f) if name.split(".")[0] in {"cli", "gpq_cli", "click"}
    ]
    assert not wrong
