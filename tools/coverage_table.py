"""Coverage by package, as a Markdown table, from the data of ``make coverage``."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def packages(files: dict[str, dict[str, dict[str, int]]]) -> dict[str, list[int]]:
    """Package -> statements, those covered, branches, those covered."""
    found: dict[str, list[int]] = defaultdict(lambda: [0] * len(COUNTS))
    for name, file in files.items():
        package = Path(name).relative_to("gpq_faiss").parts[0].removesuffix(".py")
        found[package] = [a + file["summary"][count] for a, count in zip(found[package], COUNTS, strict=True)]
    return dict(sorted(found.items()))


def main() -> None:
    """Print the table; ``.coverage`` is that of the working folder."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "coverage.json"
        subprocess.run([sys.executable, "-m", "coverage", "json", "-q", "-o", str(out)], check=True)
        table = packages(json.loads(out.read_text())["files"])
    table["all"] = [sum(column) for column in zip(*table.values(), strict=True)]
    print("| package | statements | covered | branches | covered |\n|---|--:|--:|--:|--:|")
    for package, (statements, lines, branches, taken) in table.items():
        share = f"{100 * taken / branches:.1f} %" if branches else "–"
        print(
            f"| {package} | {statements:,} | {100 * lines / max(1, statements):.1f} % | {branches:,} | {share} |"
        )


if __name__ == "__main__":
    main()
