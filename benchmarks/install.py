"""Sizes of the installations with the extras `search` and `train`.

    python benchmarks/install.py

Creates two environments in a temporary folder, installs the checkout into each with uv, and
measures site-packages. This takes some minutes and 9 GB of disk, and needs a package index.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from common import Results, make_parser, publish, run_main

from gpq_faiss.evaluation.tables import render

ROOT = Path(__file__).parent.parent


def install(folder: Path, extra: str) -> Results:
    """Install the checkout with one extra into a new environment, and return its sizes."""
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or "uv"
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, folder], check=True)
    pip: list[str | Path] = [uv, "pip", "install", "--quiet", "--python", folder / "bin" / "python"]
    subprocess.run([*pip, f"{ROOT}[{extra}]"], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    sizes = {}
    for entry in site.iterdir():
        files = (
            [entry] if entry.is_file() else [path for path in entry.rglob("*") if path.is_file()]
        )
        sizes[entry.name] = sum(path.stat().st_size for path in files) / 1e6
    largest = sorted(sizes, key=lambda name: -sizes[name])[:4]
    return {
        "extra": f"`{extra}`",
        "site-packages": f"{sum(sizes.values()):,.0f} MB",
        "packages": len(list(site.glob("*.dist-info"))),
        "largest": ", ".join(f"{name} {sizes[name]:,.0f} MB" for name in largest),
    }


def main() -> None:
    """Install, measure, write the results."""
    parser = make_parser(__doc__, "install.json")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        rows = [install(Path(folder) / extra, extra) for extra in ("search", "train")]
    publish({"rows": rows}, out, markdown)
    print(out.with_suffix(".md").read_text(encoding="utf-8"))


def markdown(results: Results) -> str:
    """Return a row for each installation."""
    return f"# Sizes of the installations\n\n{render(results['rows'], 'markdown')}"


if __name__ == "__main__":
    run_main(main)
