"""``gpq index`` beyond its plain form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from click.testing import CliRunner
from commands import Shop, done, refused
from gpq_cli.main import cli

from gpq_faiss.indexes.opening import open_in_memory


@pytest.mark.parametrize("kind", ["fused", "ivf"])
def test_kinds(shop: Shop, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "i.faiss"
    assert (
        done("index", shop.model, shop.codes, "--kind", kind, "--memory", "64MB", "--out", out) == f"{out}\n"
    )
    assert (
        faiss.read_index(str(out)).ntotal
        == open_in_memory(out).ntotal
        == faiss.read_index(str(shop.index)).ntotal
    )


def test_options_that_do_not_fit_are_refused(shop: Shop, tmp_path: Path) -> None:
    out = tmp_path / "i.faiss"
    plain = ("index", shop.model, shop.codes, "--out", out)
    for options in (("--memory", "lots"), ("--memory", "1MB")):
        refused(*plain, *options, code=2)
        assert not out.exists()


def answers(text: str) -> dict[str, Any]:
    """What was found, whichever way it was found."""
    found: dict[str, Any] = json.loads(text)
    assert found.pop("description")
    return found


@pytest.mark.parametrize("budget", [(), ("--memory", "64MB")])
def test_lists_are_searched_in_memory_and_in_place(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: tuple[str, ...]
) -> None:
    monkeypatch.setattr("gpq_faiss.indexes.opening._COPIES", 10**6)  # no budget holds the index
    out, same = tmp_path / "lists.faiss", ("--format", "json", "-k", 80)
    features, codes, index = tmp_path / "noise.npy", tmp_path / "codes.h5", tmp_path / "index.faiss"
    np.save(features, np.random.default_rng(0).normal(size=(300, 16)).astype(np.float32))
    done("encode", shop.model, f"features:{features}", "--out", codes)
    done("index", shop.model, codes, "--kind", "ivf", "--memory", "64MB", "--out", out)
    done("index", shop.model, codes, "--out", index)
    plain = answers(done("search", shop.model, index, features, *same))
    search = ("search", shop.model, out, features, *same)
    assert answers(done(*search, *budget)) == plain
    every = answers(done(*search, *budget, "--nprobe", 1000))
    assert every.pop("proven_exact") == 300
    assert every == plain
    if budget:
        few = answers(done(*search, *budget, "--nprobe", 1))
        assert few.pop("proven_exact") < 300
        assert few != plain


def test_a_file_that_plain_faiss_searches_badly_comes_with_a_warning(shop: Shop, tmp_path: Path) -> None:
    for kind in ("flat", "fastscan"):
        call = ["index", shop.model, shop.codes, "--kind", kind, "--out", tmp_path / f"{kind}.faiss"]
        said = CliRunner().invoke(cli, [str(word) for word in call])
        assert said.exit_code == 0
        assert ("plain Faiss finds only part" in said.stderr) == (kind == "fastscan")
        assert faiss.read_index(str(call[-1])).ntotal == open_in_memory(call[-1]).ntotal
