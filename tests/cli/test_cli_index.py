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


@pytest.mark.parametrize("kind", ["fused"])
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


def test_lists_by_recall(shop: Shop, tmp_path: Path) -> None:
    out = tmp_path / "i.faiss"
    said = done("index", shop.model, shop.codes, "--kind", "ivf", "--lists", 5, "--recall", 0.9, "--out", out)
    assert said.startswith("nprobe 1: recall ")
    assert said.endswith(f"\n{out}\n")
    assert open_in_memory(out).ivf.lists == 5


def test_lists_of_the_class_prototypes(shop: Shop, tmp_path: Path) -> None:
    out = tmp_path / "i.faiss"
    done(
        "index", shop.model, shop.codes, "--kind", "ivf", "--lists", "prototypes", "--nprobe", 3, "--out", out
    )
    assert (open_in_memory(out).ivf.lists, open_in_memory(out).ivf.nprobe) == (
        3,
        3,
    )  # there are three classes


def test_options_that_do_not_fit_are_refused(shop: Shop, tmp_path: Path) -> None:
    out = tmp_path / "i.faiss"
    plain = ("index", shop.model, shop.codes, "--out", out)
    for options in (
        ("--memory", "lots"),
        ("--recall", 0.9),
        ("--kind", "ivf", "--recall", 0.9, "--nprobe", 3),
        ("--kind", "ivf", "--recall", 2),
        ("--kind", "ivf", "--memory", "64MB", "--recall", 2),
        ("--kind", "ivf", "--lists", "many"),
    ):
        refused(*plain, *options, code=2)
        assert not out.exists()


def answers(text: str) -> dict[str, Any]:
    """What was found, whichever way it was found."""
    found: dict[str, Any] = json.loads(text)
    assert found.pop("description")
    return found


@pytest.mark.parametrize("assign", ["auto", "tables"])
@pytest.mark.parametrize("budget", [(), ("--memory", "64MB")])
def test_lists_are_searched_in_memory_and_in_place(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, assign: str, budget: tuple[str, ...]
) -> None:
    monkeypatch.setattr("gpq_faiss.indexes.opening._COPIES", 10**6)  # no budget holds the index
    out, same = tmp_path / "lists.faiss", ("--format", "json", "-k", 80)
    features, codes, index = tmp_path / "noise.npy", tmp_path / "codes.h5", tmp_path / "index.faiss"
    np.save(features, np.random.default_rng(0).normal(size=(300, 16)).astype(np.float32))  # without clusters
    done("encode", shop.model, f"features:{features}", "--out", codes)
    build = ("index", shop.model, codes, "--kind", "ivf", "--memory", "64MB", "--lists", 3)
    done(*build, "--assign", assign, "--nprobe", 1, "--out", out)
    done("index", shop.model, codes, "--out", index)
    plain = answers(done("search", shop.model, index, features, *same))
    search = ("search", shop.model, out, features, *same)
    assert answers(done(*search, *budget, "--nprobe", 3)) == plain
    assert answers(done(*search, *budget, "--kind", "exact")) == plain
    few = answers(done(*search, *budget))
    assert answers(done(*search, *budget, "--nprobe", 1)) == few != plain
    tuned = answers(done(*search, *budget, "--recall", 1))
    assert tuned.pop("operating_points")[-1]["recall"] == 1
    assert tuned == plain
    lines = done("search", shop.model, out, features, *budget, "-k", 80, "--recall", 0.9).splitlines()
    assert lines[0].startswith("nprobe 1: recall 0.")


def test_a_recall_within_a_budget_is_kept_in_the_file(shop: Shop, tmp_path: Path) -> None:
    out = tmp_path / "lists.faiss"
    said = done(
        "index",
        shop.model,
        shop.codes,
        *("--kind", "ivf", "--lists", 6, "--memory", "64MB", "--list-form", "fused", "--recall", 0.9),
        *("--out", out),
    )
    assert said.startswith("nprobe 1: recall ")
    index = faiss.read_index(str(out))
    assert isinstance(index, faiss.IndexIVFPQ)
    assert f"nprobe {index.nprobe}: recall " in said
    assert open_in_memory(out).ivf.nprobe == index.nprobe


def test_a_file_that_plain_faiss_searches_badly_comes_with_a_warning(shop: Shop, tmp_path: Path) -> None:
    for kind in ("flat", "fastscan"):
        call = ["index", shop.model, shop.codes, "--kind", kind, "--out", tmp_path / f"{kind}.faiss"]
        said = CliRunner().invoke(cli, [str(word) for word in call])
        assert said.exit_code == 0
        assert ("gpq evaluate --index" in said.stderr) == (kind == "fastscan")
        assert faiss.read_index(str(call[-1])).ntotal == open_in_memory(call[-1]).ntotal
