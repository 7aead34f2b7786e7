"""``gpq search``: kinds, budgets, filters, ranges; every way gives what the plain one gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import ITEMS, Shop, done, refused


def found(*args: object) -> list[dict[str, Any]]:
    queries: list[dict[str, Any]] = json.loads(done("search", *args, "--format", "json"))["queries"]
    return queries


@pytest.fixture(scope="module")
def plain(shop: Shop) -> list[dict[str, Any]]:
    return found(shop.model, shop.index, shop.queries, "-k", 9)


def test_a_search_in_place_answers_alike(
    shop: Shop, plain: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found(shop.model, shop.index, shop.queries, "-k", 9, "--memory", "2GB") == plain
    monkeypatch.setattr("gpq_faiss.indexes.opening._COPIES", 10**6)  # no budget holds the index
    monkeypatch.delattr("gpq_faiss.indexes.opening.open_in_memory")
    small = ("--memory", "1MB", "--threads", 1)
    assert found(shop.model, shop.index, shop.queries, "-k", 9, *small) == plain


@pytest.fixture(params=[(), ("--memory", "2MB")])
def budget(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """No budget, and one that (as the test has it) does not hold the index."""
    monkeypatch.setattr("gpq_faiss.indexes.opening._COPIES", 10**6)
    options: tuple[str, ...] = request.param
    return options


def test_filters_by_lists_of_ids(shop: Shop, tmp_path: Path, budget: tuple[str, ...]) -> None:
    every = [q["ids"] for q in found(shop.model, shop.index, shop.queries, "-k", ITEMS)]
    chosen = np.arange(0, ITEMS, 3)
    np.save(tmp_path / "ids.npy", chosen)
    (tmp_path / "ids.txt").write_text("\n".join(map(str, chosen)) + "\n")
    search = (shop.model, shop.index, shop.queries, "-k", 9, *budget)
    for name in ("ids.npy", "ids.txt"):
        for option, inside in (
            ("--allow-ids", True),
            ("--deny-ids", False),
            ("--allow-ids", True),
            ("--deny-ids", False),
        ):
            got = [q["ids"] for q in found(*search, option, tmp_path / name)]
            assert got == [[i for i in ids if (i % 3 == 0) == inside][:9] for ids in every]


def test_all_items_above_a_score(shop: Shop, budget: tuple[str, ...]) -> None:
    every = found(shop.model, shop.index, shop.queries, "-k", ITEMS)
    least = float(np.median([q["scores"][5] for q in every]))
    got = found(shop.model, shop.index, shop.queries, "--min-score", least, *budget)
    assert [q["ids"] for q in got] == [
        [i for i, s in zip(q["ids"], q["scores"], strict=True) if s >= least] for q in every
    ]
    text = done(
        "search", shop.model, shop.index, shop.queries, "--min-score", least, *budget, "--format", "json"
    )
    assert json.loads(text)["min_score"] == least
    assert "k" not in json.loads(text)
    assert (
        done("search", shop.model, shop.index, shop.queries, "--min-score", 1e6, *budget).strip()
        == "no item found"
    )


def test_lists_of_ids_that_are_none_are_named(shop: Shop, tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_text("3\nfour\n")
    np.save(tmp_path / "bad.npy", np.ones((2, 2)))
    search = ("search", shop.model, shop.index, shop.queries)
    for name in ("bad.txt", "bad.npy", "none.txt"):
        assert name in refused(*search, "--allow-ids", tmp_path / name)
    assert "at least 262,144" in refused(*search, "--memory", "1kB", code=2)


def test_fewer_results_than_asked_for_are_one_line_on_stderr(
    shop: Shop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "some.txt").write_text("3\n4\n5\n")
    found(shop.model, shop.index, shop.queries, "-k", 5, "--allow-ids", tmp_path / "some.txt")
    lines = [line for line in caplog.messages if "fewer" in line]
    assert lines == ["7 of 7 queries have fewer than 5 results: too few items pass the filter"]
