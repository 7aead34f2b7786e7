"""Sizes of the installations `search` and `train`, and the commands without torch.

    python benchmarks/install.py

Creates two environments in a temporary folder, installs the checkout into each with uv, and measures site-packages. In the one
without torch, an index is built, searched and evaluated with an exported encoder; the results must equal those of
this environment, which trained the model. Takes some minutes and 9 GB, and needs a package index.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import gpq, make_parser, publish, run_main, save_features
from sklearn.datasets import load_digits

from gpq_faiss.errors import DataError

ROOT = Path(__file__).parent.parent


def install(folder: Path, extra: str) -> dict[str, Any]:
    """A new environment with the checkout and one extra: its megabytes of site-packages, and its largest packages."""
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        raise DataError("uv is needed: pip install uv")
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, folder], check=True)
    python = folder / "bin" / "python"
    subprocess.run([uv, "pip", "install", "--quiet", "--python", python, f"{ROOT}[{extra}]"], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    sizes = {entry.name: size(entry) for entry in site.iterdir()}
    largest = sorted(sizes, key=lambda name: -sizes[name])[:8]
    return {
        "megabytes": round(sum(sizes.values()) / 1e6),
        "packages": len(list(site.glob("*.dist-info"))),
        "largest": {name: round(sizes[name] / 1e6) for name in largest},
        "torch": (site / "torch").exists(),
    }


def size(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    return sum(one.stat().st_size for one in files)


def make_shop(here: Path) -> None:
    """A model, codes and its encoder, made with torch; and labelled queries."""
    x, y = load_digits(return_X_y=True)
    for name, rows in (("items", slice(0, 1500)), ("queries", slice(1500, None))):
        save_features(here, x[rows].astype(np.float32), y[rows], name)
    data = ("features:items.npy", "--labels", "items-labels.npy")
    training = ("--preset", "paper", "--labelled", "20-per-class", "--set", "training.steps=100")
    gpq("train", *data, *training, "--bits", "48", "--out", "model", cwd=here)
    gpq("encode", "model", *data, "--out", "codes.h5", cwd=here)
    gpq("export-encoder", "model", "--out", "encoder.onnx", cwd=here)


def try_out(here: Path, python: object, model: str, name: str) -> dict[str, Any]:
    """What index, search and evaluate answer, with the queries encoded by ``model``."""

    def run(*call: str) -> str:
        return str(gpq(*call, python=python, cwd=here).stdout)

    index = f"{name}.faiss"
    run("index", "model", "codes.h5", "--out", index)
    run("info", index)
    run("export", "model", "--to", "faiss", "--out", f"{name}-empty.faiss")
    found = json.loads(run("search", model, index, "queries.npy", "-k", "10", "--format", "json"))
    labels = ["--labels", "queries-labels.npy", "--codes", "codes.h5", "--format", "json"]
    measured = json.loads(run("evaluate", model, "features:queries.npy", *labels))
    return {"ids": [query["ids"] for query in found["queries"]], "map": measured["map"]}


def main() -> None:
    parser = make_parser(__doc__, "install.json")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        sizes = {extra: install(here / extra, extra) for extra in ("search", "train")}
        if sizes["search"]["torch"] or not sizes["train"]["torch"]:
            raise DataError("torch belongs to the extra train alone")
        make_shop(here)
        light = here / "search" / "bin" / "python"
        answers = try_out(here, light, "encoder.onnx", "light")
        whole = try_out(here, sys.executable, "model", "whole")
        same = float(np.mean(np.array(answers["ids"]) == np.array(whole["ids"])))
        # An ONNX encoder differs in the last digits.
        if same < 0.99 or abs(answers["map"] - whole["map"]) > 1e-4:
            raise DataError(
                f"the installation without torch gives other answers: {same:.2%} of the results are the same"
            )
        call = ("encode", "model", "features:items.npy", "--out", "more.h5")
        refused = gpq(*call, python=light, cwd=here, check=False)
        if refused.returncode != 2 or "pip install 'gpq-faiss[train]'" not in refused.stderr:
            raise DataError(f"gpq encode without torch: {refused.stderr.strip()[-300:]}")
    figures = {"same_results": same, "map_without_torch": answers["map"], "map": whole["map"]}
    publish({"installations": sizes, **figures}, out, markdown)
    print(out.with_suffix(".md").read_text(encoding="utf-8"))


def markdown(results: dict[str, Any]) -> str:
    """A row an installation."""
    lines = [
        "# Sizes of the installations",
        "",
        "| extra | site-packages | packages | largest |",
        "|---|--:|--:|---|",
    ]
    for extra, row in results["installations"].items():
        largest = ", ".join(
            f"{name} {megabytes:,} MB" for name, megabytes in list(row["largest"].items())[:4]
        )
        lines.append(f"| `{extra}` | {row['megabytes']:,} MB | {row['packages']} | {largest} |")
    return "\n".join(lines)


if __name__ == "__main__":
    run_main(main)
