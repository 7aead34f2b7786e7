"""``gpq index`` beyond its plain form."""

from __future__ import annotations

from pathlib import Path

import faiss
import pytest
from commands import Shop, done, refused

from gpq_faiss.index.opening import open_engine


@pytest.mark.parametrize("kind", ["fused", "fastscan", "exact", "grouped", "auto"])
def test_kinds(shop: Shop, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "i.faiss"
    assert (
        done("index", shop.model, shop.codes, "--kind", kind, "--memory", "64MB", "--out", out) == f"{out}\n"
    )
    assert (
        faiss.read_index(str(out)).ntotal
        == open_engine(out).ntotal
        == faiss.read_index(str(shop.index)).ntotal
    )


def test_lists_by_recall(shop: Shop, tmp_path: Path) -> None:
    out = tmp_path / "i.faiss"
    said = done("index", shop.model, shop.codes, "--kind", "ivf", "--lists", 5, "--recall", 0.9, "--out", out)
    assert said.startswith("nprobe 1: recall ")
    assert said.endswith(f"\n{out}\n")
    assert open_engine(out).ivf.lists == 5


def test_lists_of_the_class_prototypes(shop: Shop, tmp_path: Path) -> None:
    out = tmp_path / "i.faiss"
    done(
        "index", shop.model, shop.codes, "--kind", "ivf", "--lists", "prototypes", "--nprobe", 3, "--out", out
    )
    assert (open_engine(out).ivf.lists, open_engine(out).ivf.nprobe) == (3, 3)  # there are three classes


def test_options_that_do_not_fit_are_refused(shop: Shop, tmp_path: Path) -> None:
    out = tmp_path / "i.faiss"
    plain = ("index", shop.model, shop.codes, "--out", out)
    for options in (
        ("--memory", "lots"),
        ("--recall", 0.9),
        ("--kind", "ivf", "--recall", 0.9, "--nprobe", 3),
        ("--kind", "ivf", "--recall", 2),
        ("--kind", "ivf", "--lists", "many"),
    ):
        refused(*plain, *options, code=2)
        assert not out.exists()
