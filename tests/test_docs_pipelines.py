"""Every snippet of docs/existing-pipelines.md, run in order in one folder."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from gpq_cli.main import cli
from model_factory import make_model, random_input

PAGE = Path(__file__).parent.parent / "docs" / "existing-pipelines.md"


def test_the_snippets_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "model")
    np.save("items.npy", random_input("features", 300))
    np.save("queries.npy", random_input("features", 5, seed=1))
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    assert {language for language, _ in blocks} == {"console", "python"}
    names: dict[str, Any] = {}
    for number, (language, text) in enumerate(blocks):
        if language == "python":
            exec(compile(text, f"{PAGE.name}, snippet {number}", "exec"), names)  # noqa: S102  (our own page)
            continue
        for line in text.splitlines():
            program, *arguments = shlex.split(line)
            assert program == "gpq"
            result = CliRunner().invoke(cli, ["-q", *arguments], prog_name="gpq")
            assert result.exit_code == 0, f"{line}: {result.output} {result.exception!r}"
    # What the page says of the results, beyond its own assertions.
    assert names["ids"].min() >= 1000
