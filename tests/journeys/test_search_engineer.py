"""A search engineer: embeddings in Faiss, in shards, with ids and names; a smaller index in the same pipeline, and more items later."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import faiss
import numpy as np
import pytest
from commands import done, refused

import gpq_faiss

N, MORE, QUERIES, WIDTH, CLASSES = 20_000, 2_500, 200, 96, 12
TRAINING = "--preset paper --bits 48 --set training.steps=60 --seed 0"


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:  # type: ignore[type-arg]
    """The working folder with what the engineer has; returns the class of each item, of later ones, and of each query."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    total = N + MORE + QUERIES
    y = rng.integers(0, CLASSES, total)
    x = (0.7 * rng.normal(size=(CLASSES, WIDTH))[y] + rng.normal(size=(total, WIDTH))).astype(np.float32)
    ids = rng.choice(2**62, total, replace=False)
    for i, part in enumerate(np.split(x[:N], 4)):
        np.save(f"vectors-{i}.npy", part)
    np.save("more.npy", x[N : N + MORE])
    np.save("queries.npy", x[N + MORE :])
    np.save("ids.npy", ids[:N])
    np.save("more-ids.npy", ids[N : N + MORE])
    for name, rows in (("names.txt", range(N)), ("more-names.txt", range(N, N + MORE))):
        Path(name).write_text("".join(f"sku-{row:06d}\n" for row in rows))
    with open("items.csv", "w", newline="") as stream:  # one item in ten has a category
        table = csv.writer(stream)
        table.writerow(["id", "category"])
        table.writerows([ids[row], f"class-{y[row]}"] for row in range(0, N, 10))
    with open("queries.csv", "w", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(["id", "category"])
        table.writerows([row, f"class-{y[N + MORE + row]}"] for row in range(QUERIES))
    return y


def test_a_smaller_index_for_a_pipeline_of_faiss(shop: np.ndarray, tmp_path: Path) -> None:  # type: ignore[type-arg]
    y, ids = shop, np.load("ids.npy")

    # The index that there was: float vectors with ids.
    old = faiss.IndexIDMap2(faiss.IndexFlatIP(WIDTH))
    old.add_with_ids(np.concatenate([np.load(f"vectors-{i}.npy") for i in range(4)]), ids)
    faiss.write_index(old, "old.faiss")

    # Codes of the same items, by the categories that some of them have.
    items = "'features:vectors-*.npy' --ids ids.npy --read names=names.txt"
    done(
        f"train 'features:vectors-*.npy' --ids ids.npy --labels items.csv --labelled all {TRAINING} --out model"
    )
    done(f"encode model {items} --labels items.csv --out codes.h5")
    done("index model codes.h5 --out index.faiss")
    assert Path("index.faiss").stat().st_size < Path("old.faiss").stat().st_size / 20

    # The pipeline goes on with plain Faiss, and its queries come from the model.
    queries = np.load("queries.npy")
    xq, _ = gpq_faiss.Encoder.load("model").embed(queries, queries=True)
    plain = faiss.read_index("index.faiss")
    assert (plain.ntotal, plain.d) == (N, xq.shape[1])
    scores, found = plain.search(xq, 10)
    class_of = dict(zip(ids.tolist(), y[:N].tolist(), strict=True))
    right = np.array([[class_of[i] for i in row] for row in found.tolist()]) == y[N + MORE :, None]
    assert right.mean() > 0.75

    # The command gives the same scores, and says which items they are.
    answer = json.loads(done("search model index.faiss queries.npy -k 10 --format json"))
    np.testing.assert_allclose([one["scores"] for one in answer["queries"]], scores, atol=1e-4)
    first = answer["queries"][0]
    assert first["names"][0] == f"sku-{ids.tolist().index(first['ids'][0]):06d}"

    # A second batch, with the same model, and no id twice.
    done("encode model features:more.npy --ids more-ids.npy --read names=more-names.txt --out more.h5")
    done("index model index.faiss more.h5 --out all.faiss")
    assert faiss.read_index("all.faiss").ntotal == N + MORE
    assert "more than once, in index.faiss and in codes.h5" in refused(
        "index model index.faiss codes.h5 --out twice.faiss"
    )
    assert not (tmp_path / "twice.faiss").exists()
    names = {
        name
        for one in json.loads(done("search model all.faiss queries.npy -k 10 --format json"))["queries"]
        for name in one["names"]
    }
    assert any(int(name[4:]) >= N for name in names)

    # Filters: what is not to be shown, and what alone is.
    Path("sold.txt").write_text("".join(f"{i}\n" for i in first["ids"]))
    left = json.loads(done("search model all.faiss queries.npy --rows 0 --deny-ids sold.txt --format json"))
    assert not set(left["queries"][0]["ids"]) & set(first["ids"])
    only = json.loads(
        done("search model all.faiss queries.npy --rows 0 -k 5 --allow-ids sold.txt --format json")
    )
    assert only["queries"][0]["ids"] == first["ids"][:5]
    everything = gpq_faiss.open_index("all.faiss")
    low = everything.search(xq[:3], 5, where=gpq_faiss.Allow(np.load("more-ids.npy")))[1]
    assert np.isin(low, np.load("more-ids.npy")).all()

    # How good are the codes on queries that no training has seen?
    measured = json.loads(
        done("evaluate model features:queries.npy --labels queries.csv --codes codes.h5 --format json")
    )
    assert measured["map"] > 0.5
