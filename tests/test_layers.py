"""Imports go one way: a room imports only rooms listed before it, and heavy libraries stay in their
rooms.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "gpq_faiss"

# Lowest first. Rooms before nn/ need no torch.
# fmt: off
LAYERS = [
    "errors", "plugins", "inputs", "progress", "files", "signals", "launch", "compiled",
    "evaluation", "codes", "ids", "config", "report", "store", "faissio", "data", "scale",
    "indexes", "nn", "losses", "gpu", "methods", "training", "encoder", "stages", "cluster",
    "serve", "experiment",
]
# fmt: on

# Library -> the rooms that may import it at all.
ONLY_IN = {
    "h5py": {"store"},
    "faiss": {"codes", "faissio", "indexes", "gpu", "methods", "stages", "experiment"},
    "matplotlib": {"report"},
    "pydantic": {"config", "experiment", "encoder", "serve"},
    "ray": {"cluster"},
    **{name: {"serve"} for name in ("fastapi", "starlette", "uvicorn", "python_multipart")},
    **{name: set() for name in ("click", "cli", "gpq_cli")},
}
NO_TORCH = {*LAYERS[: LAYERS.index("nn")], "cluster"}
FILES = {
    file.relative_to(PACKAGE): ast.parse(file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))
}


def room_of(file):
    return file.parts[0].removesuffix(".py")


def imports():
    """Room, place and absolute dotted name of everything that is imported, anywhere in a file."""
    for file, tree in FILES.items():
        package = ["gpq_faiss", *file.parts[:-1]]
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                names = [
                    ".".join([*base, *filter(None, [node.module]), alias.name])
                    for alias in node.names
                ]
            for name in names:
                yield room_of(file), f"{file}:{getattr(node, 'lineno', 0)} imports {name}", name


def test_imports_point_upward_and_libraries_stay_in_their_rooms():
    assert set(map(room_of, FILES)) - {"__init__"} <= set(LAYERS)
    allowed = {room: {*LAYERS[: LAYERS.index(room) + 1], "__version__"} for room in LAYERS}
    internal = [
        (room, location, name)
        for room, location, name in imports()
        if name.startswith("gpq_faiss.")
    ]
    assert len(internal) > 300
    wrong = [
        location
        for room, location, name in internal
        if name.split(".")[1] not in allowed.get(room, set(LAYERS))
    ]
    assert not wrong
    wrong = []
    for room, location, name in imports():
        top = name.split(".")[0]
        if room not in ONLY_IN.get(top, {room}) or (top == "torch" and room in NO_TORCH):
            wrong.append(location)
    assert not wrong
