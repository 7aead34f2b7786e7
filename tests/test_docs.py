"""What the documents say is held to the code: settings, snippets, commands."""

from __future__ import annotations

import ast
import dataclasses
import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from model_factory import make_model, random_input

import gpq_faiss as gpq
from gpq_faiss.config import Config, merge, preset
from gpq_faiss.encoder import Encoder
from gpq_faiss.stages.encode import encode
from gpq_faiss.stages.index import index

ROOT = Path(__file__).parent.parent


def settings() -> list[tuple[str, str]]:
    return [
        (section.name, setting.name)
        for section in dataclasses.fields(Config)
        if dataclasses.is_dataclass(getattr(Config(), section.name))
        for setting in dataclasses.fields(getattr(Config(), section.name))
    ]


@pytest.mark.parametrize(("section", "name"), settings(), ids=lambda v: v)
def test_every_setting_stands_in_the_table_with_its_presets(section: str, name: str) -> None:
    text = (ROOT / "docs" / "settings.md").read_text()
    part = text.split(f"**`[{section}]`**")[1].split("**`[")[0]
    rows = [
        line
        for line in part.splitlines()
        if re.search(rf"`{name}`", line.split("|")[1] if "|" in line else "")
    ]
    assert len(rows) == 1, f"{section}.{name}"
    names = re.findall(r"`(\w+)`", rows[0].split("|")[1])
    for column, which in ((2, "paper"), (3, "recommended")):
        cell = rows[0].split("|")[column].strip()
        if cell == "–":
            continue
        shown = cell.split(", ")[names.index(name)] if len(names) > 1 else cell
        value = getattr(getattr(preset(which), section), name)
        if isinstance(value, bool):
            assert shown == str(value).lower()
        elif isinstance(value, (int, float)):
            assert float(shown) == value
        elif isinstance(value, tuple):
            assert shown == str(list(value))
        else:
            assert shown == value


def _tiny() -> Config:
    """The default with so few steps that it trains in a second."""
    return merge(
        preset("recommended"),
        {"training": {"steps": 4}, "posterior": {"networks": 1}, "network": {"hidden": [16]}},
    )


@pytest.mark.parametrize(
    ("page", "block"),
    [("README.md", 0), ("docs/tutorial.md", 0), ("docs/tutorial.md", 1), ("docs/data.md", 0)],
)
def test_the_python_of_the_pages_runs(
    page: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(4), 30)
    np.save("clip.npy", (rng.standard_normal((120, 16)) + 3 * np.eye(4, 16)[labels]).astype(np.float32))
    np.save("labels.npy", labels)
    np.save("queries.npy", rng.standard_normal((3, 16)).astype(np.float32))
    monkeypatch.setattr(gpq, "train", functools.partial(gpq.train, config=_tiny()), raising=False)
    code = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)[block]
    names: dict[str, object] = {}
    exec(code, names)  # noqa: S102
    ids = names["ids"] if "ids" in names else getattr(names.get("found"), "ids", None)
    assert ids is None or np.asarray(ids).shape[1] == 10


def test_the_code_of_the_page_on_extending_is_that_of_the_example_package() -> None:
    example = ROOT / "examples" / "gpq-faiss-example"
    files = [
        path.read_text() for path in (*example.glob("gpq_faiss_example/*.py"), example / "pyproject.toml")
    ]
    blocks = re.findall(r"```(?:python|toml)\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.S)
    assert blocks
    for block in blocks:
        assert any(block in text for text in files), block


def test_the_faiss_example_of_the_readme_runs_without_this_package(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    blocks = [block for block in blocks if block.startswith("import faiss")]
    assert blocks
    model = make_model(tmp_path / "model", width=20)
    x = random_input("features", 50, width=20)
    np.save(tmp_path / "x.npy", x)
    codes = encode(model, f"features:{tmp_path / 'x.npy'}", tmp_path / "codes.h5")
    index(model, codes, tmp_path / "index.faiss")
    vectors, _ = Encoder.load(model).embed(x)
    np.save(tmp_path / "query_vectors.npy", vectors[:3])
    check = (
        "\nimport sys\nassert not [m for m in sys.modules if m.startswith(('gpq', 'torch'))]"
        "\nassert ids.shape == (3, 10) and (scores[:, :-1] >= scores[:, 1:]).all()"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-I", "-c", blocks[0] + check],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_figures_in_the_readme_come_from_committed_results() -> None:
    """Every results file that the README names is there."""
    named = re.findall(r"benchmarks/results/[\w.-]+", (ROOT / "README.md").read_text())
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_python_of_the_page_on_evaluation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = make_model(tmp_path / "model", width=20)
    np.save("items.npy", random_input("features", 60, width=20))
    np.save("queries.npy", random_input("features", 4, width=20, seed=1))
    np.save("labels.npy", np.arange(60) % 3)
    np.save("query_labels.npy", np.array([0, 1, 2, 0]))
    encode(model, "features:items.npy", tmp_path / "codes.h5")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "evaluation.md").read_text(), re.S)
    names: dict[str, Any] = {}
    exec(blocks[0], names)  # noqa: S102
    by_index = np.sort(gpq.MemoryIndex.build(names["packed"], names["Z"]).search(names["xq"], 60)[0])
    by_tables = np.sort(names["tables"][:, np.arange(len(names["Z"])), names["codes"]].sum(axis=2))
    assert np.allclose(by_tables, by_index, atol=1e-4)
    assert names["result"].n_database == 60
    assert 0 < names["result"].map < 1


def python_of(page: Path) -> str:
    """The Python of a page or of a notebook's script."""
    text = page.read_text(encoding="utf-8")
    return text if page.suffix == ".py" else "\n".join(re.findall(r"```python\n(.*?)```", text, re.S))


PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "notebooks").glob("[0-9]*.py"),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_and_notebooks_use_the_public_names_alone(page: Path) -> None:
    imported, used = [], set()
    for node in ast.walk(ast.parse(python_of(page))):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported.append(str(node.module))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "gpq":
            used.add(node.attr)
    internal = [name for name in imported if name.split(".")[0] in ("gpq_faiss", "gpq_cli", "cli")]
    assert set(internal) <= {"gpq_faiss"}
    assert used <= set(gpq.__all__)
    # Nor does the text name a module; links to sources have slashes, groups of entry points quotation marks.
    named = re.findall(r"(?<!\")\bgpq_(?:faiss|cli)\.(\w+)", page.read_text(encoding="utf-8"))
    assert set(named) <= set(gpq.__all__)


def options_of(command: Any) -> set[str]:
    """Of a command, and of those below it."""
    own = {text for parameter in command.params for text in (*parameter.opts, *parameter.secondary_opts)}
    return own.union(*map(options_of, getattr(command, "commands", {}).values())) | {"-h", "--help"}


@pytest.mark.parametrize(
    "page",
    [*PAGES, *map(ROOT.joinpath, ("Makefile", "compose.yaml", "CONTRIBUTING.md"))],
    ids=lambda page: page.name,
)
def test_commands_are_shown_with_options_that_they_have(page: Path) -> None:
    from gpq_cli.main import cli

    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    calls = re.findall(r"\bgpq ([a-z-]+)\b([^`\n#|;&)]*)", text)
    if page.suffix == ".yaml":
        calls += [("serve", call.replace(",", " ")) for call in re.findall(r"command: \[(.*)\]", text)]
    for name, rest in calls:
        command = cli.get_command(click.Context(cli), name)
        if command is not None:
            assert set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", rest)) <= options_of(command), (
                f"gpq {name}{rest}"
            )


def test_the_reference_has_every_public_name() -> None:
    listed = re.findall(
        r"^::: gpq_faiss\.(.+)\.(\w+)$", (ROOT / "docs/reference/python.md").read_text(), re.M
    )
    assert gpq._WHERE.items() <= {name: module for module, name in listed}.items()


def test_the_map_names_every_room_and_files_that_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rooms = re.findall(r"`([\w/]+)`", " ".join(re.findall(r"^\| (`.*?) \|", text.split("## Rules")[0], re.M)))
    here = {
        path.name.removesuffix(".py")
        for path in (ROOT / "gpq_faiss").iterdir()
        if not path.name.startswith("__") and (path.suffix == ".py" or (path / "__init__.py").exists())
    }
    assert {room.strip("/") for room in rooms} == here
    walks = re.findall(r"^\d\. .*$", text, re.M)
    assert len(walks) > 20
    named = re.findall(r"`((?:gpq_faiss|cli|tests|benchmarks|tools)/[\w/.]+)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []
