"""What the documents say is held to the code: settings, snippets, commands."""

import ast
import dataclasses
import doctest
import functools
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner
from gpq_cli.main import cli
from model_factory import make_model
from PIL import Image
from safetensors.torch import save_file

import gpq_faiss as gpq
from gpq_faiss.config import FINE_TUNING, Config, preset
from gpq_faiss.methods.uncompressed import Classifier

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "notebooks").glob("[0-9]*.py")]


def blocks(page, language=r"\w+"):
    """Language and text of the snippets of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```({language})\n(.*?)^```", text, re.S | re.M)


def test_every_setting_stands_in_the_table_with_its_presets():
    text = (ROOT / "docs" / "settings.md").read_text()
    sections = {f.name: getattr(Config(), f.name) for f in dataclasses.fields(Config)}
    for section, settings in sections.items():
        if not dataclasses.is_dataclass(settings):
            continue
        table = text.split(f"**`[{section}]`**")[1].split("**`[")[0]
        rows = [line.split("|") for line in table.splitlines() if line.count("|") > 3]
        for name in (setting.name for setting in dataclasses.fields(settings)):
            matches = [row for row in rows if f"`{name}`" in row[1]]
            assert len(matches) == 1, f"{section}.{name}"
            names = re.findall(r"`(\w+)`", matches[0][1])
            for cell, preset_name in zip(
                map(str.strip, matches[0][2:4]), ("paper", "recommended"), strict=True
            ):
                shown = (
                    cell.split(", ")[names.index(name)] if len(names) > 1 and cell != "–" else cell
                )
                value = getattr(getattr(preset(preset_name), section), name)
                number = isinstance(value, int | float) and not isinstance(value, bool)
                written = list(value) if isinstance(value, tuple) else value
                agrees = shown == "–" or (
                    float(shown) == value if number else shown == str(written).lower()
                )
                assert agrees, f"{section}.{name} in {preset_name}: {shown}"


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """The working folder, with embeddings and their labels; trainings take some steps alone."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(4), 30)
    items = (rng.standard_normal((120, 16)) + 3 * np.eye(4, 16)[labels]).astype(np.float32)
    arrays = {"clip": items, "items": items, "labels": labels}
    arrays |= {"queries": items[::40], "query_labels": labels[::40]}
    for name, array in arrays.items():
        np.save(f"{name}.npy", array)
    short = {"training": {"steps": 4}, "posterior": {"networks": 1}, "network": {"backbone": "mlp"}}
    config = preset("recommended").with_settings(short)
    monkeypatch.setattr(gpq, "train", functools.partial(gpq.train, config=config), raising=False)
    monkeypatch.setattr(Classifier, "steps", 4)
    return tmp_path


@pytest.fixture
def model(shop):
    return make_model(shop / "model", width=16)


def play(page, *numbers):
    """Run the snippets of a page in order, or those of its Python with these numbers; the names
    that they leave.
    """
    names = {}
    chosen = [blocks(page, "python")[number] for number in numbers] or blocks(page)
    for language, text in chosen:
        if language == "python":
            exec(compile(text, page, "exec"), names)  # noqa: S102  (our own page)
            continue
        run_commands(text)
    return names


def run_commands(text):
    """Run the commands of a snippet, a line each."""
    for line in text.splitlines():
        program, *arguments = shlex.split(line)
        assert program == "gpq"
        result = CliRunner().invoke(cli, ["-q", *arguments], prog_name="gpq")
        assert result.exit_code == 0, f"{line}: {result.output} {result.exception!r}"


@pytest.mark.parametrize(
    ("page", "block"),
    [("README.md", 0), ("docs/tutorial.md", 0), ("docs/tutorial.md", 2), ("docs/data.md", 0)],
)
def test_the_python_of_the_pages_runs(page, block, shop):
    ids = play(page, block).get("ids")
    assert ids is None or np.asarray(ids).shape[1] == 10


def test_the_commands_on_photos_run(shop, monkeypatch):
    """In fewer steps than by default, of a network with random weights."""
    timm = pytest.importorskip("timm", reason="timm is not installed")
    rng = np.random.default_rng(0)
    for i in range(48):
        folder = shop / "photos" / ("beach", "forest", "")[i % 3]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (40, 30, 3), np.uint8)).save(folder / f"{i}.png")
    weights = timm.create_model("tf_efficientnet_lite0").state_dict()
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, "lite0.safetensors")
    for name, value in {"steps": 3, "batch_labelled": 4, "batch_unlabelled": 4}.items():
        monkeypatch.setitem(FINE_TUNING, name, value)
    run_commands(blocks("docs/photos.md", "console")[0][1])
    assert gpq.open_index("index.faiss").ntotal == 48


def test_the_tutorial_makes_its_three_files_from_photos(tmp_path, monkeypatch):
    """By a smaller network, with random weights."""
    timm = pytest.importorskip("timm", reason="timm is not installed")
    monkeypatch.chdir(tmp_path)
    for name in ("photos/beach/0.jpg", "photos/forest/1.jpg", "photos/2.jpg", "new/3.jpg"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30)).save(name)
    network = timm.create_model("resnet10t", num_classes=0)
    monkeypatch.setattr(timm, "create_model", lambda *args, **options: network)
    play("docs/tutorial.md", 1)
    assert np.load("labels.npy").tolist() == [-1, 0, 1]
    assert np.load("clip.npy").shape == (3, network.num_features)
    assert np.load("queries.npy").dtype == np.float32


def test_the_snippets_on_existing_pipelines_run_in_order(model):
    assert play("docs/existing-pipelines.md")["ids"].min() >= 1000


def test_the_python_of_the_page_on_evaluation_runs(model):
    gpq.encode(model, "features:items.npy", "codes.h5")
    assert 0 < play("docs/evaluation.md", 0)["result"].map < 1


def test_the_faiss_example_of_the_readme_runs_without_this_package(model):
    (text,) = (text for _, text in blocks("README.md", "python") if text.startswith("import faiss"))
    gpq.index(model, gpq.encode(model, "features:items.npy", "codes.h5"), "index.faiss")
    np.save(
        "query_vectors.npy", gpq.Encoder.load(model).embed(np.load("queries.npy"), queries=True)[0]
    )
    check = (
        "\nimport sys\nassert not [m for m in sys.modules if m.startswith(('gpq', 'torch'))]"
        "\nassert ids.shape == (3, 10) and (scores[:, :-1] >= scores[:, 1:]).all()"
    )
    call = [sys.executable, "-I", "-c", text + check]
    completed = subprocess.run(call, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr


def test_code_on_the_extending_page_is_in_the_example_package():
    example = ROOT / "examples" / "gpq-faiss-example"
    files = [
        f.read_text() for f in (*example.glob("gpq_faiss_example/*.py"), example / "pyproject.toml")
    ]
    shown = blocks("docs/extending.md", "python|toml")
    assert shown
    for _, block in shown:
        assert any(block in text for text in files), block


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_and_notebooks_use_the_public_names_alone(page):
    text = page.read_text(encoding="utf-8")
    code = (
        text
        if page.suffix == ".py"
        else "\n".join(block for _, block in blocks(str(page), "python"))
    )
    imported, used = [], set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported.append(str(node.module))
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "gpq"
        ):
            used.add(node.attr)
    internal = [name for name in imported if name.split(".")[0] in ("gpq_faiss", "gpq_cli", "cli")]
    assert set(internal) <= {"gpq_faiss"}
    assert used <= set(gpq.__all__)
    # Nor does the text name a module; links to sources have slashes, groups of entry points
    # quotation marks.
    assert set(re.findall(r"(?<!\")\bgpq_(?:faiss|cli)\.(\w+)", text)) <= set(gpq.__all__)


def options_of(command):
    """Of a command, and of those below it."""
    options = {
        text
        for parameter in command.params
        for text in (*parameter.opts, *parameter.secondary_opts)
    }
    return options.union(*map(options_of, getattr(command, "commands", {}).values())) | {
        "-h",
        "--help",
    }


@pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "Makefile", ROOT / "CONTRIBUTING.md"],
    ids=lambda page: page.name,
)
def test_commands_are_shown_with_options_that_they_have(page):
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    calls = re.findall(r"\bgpq ([a-z-]+)\b([^`\n#|;&)]*)", text)
    for name, arguments in calls:
        command = cli.get_command(click.Context(cli), name)
        if command is not None:
            shown = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", arguments))
            assert shown <= options_of(command), f"gpq {name}{arguments}"


def test_reference_lists_every_name_and_the_map_existing_files():
    text = (ROOT / "docs/reference/python.md").read_text()
    listed = re.findall(r"^::: gpq_faiss\.(.+)\.(\w+)$", text, re.M)
    assert gpq._MODULES.items() <= {name: module for module, name in listed}.items()
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:gpq_faiss|cli|tests|benchmarks|tools)/[\w/.]+)`", text)
    results = re.findall(r"benchmarks/results/[\w.-]+", (ROOT / "README.md").read_text())
    assert [name for name in named + results if not (ROOT / name).exists()] == []


# Docstrings ---------------------------------------------------------------------------------------

WITH_EXAMPLES = sorted(
    f for f in (ROOT / "gpq_faiss").rglob("*.py") if ">>> " in f.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("file", WITH_EXAMPLES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_the_examples_of_a_module_run(file):
    name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
