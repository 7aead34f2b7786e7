"""Names, labels and kept columns from the data to the results, through every form of an index."""

import logging
from pathlib import Path

import numpy as np
import pytest
from model_factory import make_model

import gpq_faiss as gpq
from gpq_faiss.build.item_files import open_items
from gpq_faiss.errors import GpqError
from gpq_faiss.faissio.model import read_model
from gpq_faiss.store.items import items_path

N = 120


def data(folder, stem, first, classes):
    """Features with ids, names and labels, as codes."""
    rng = np.random.default_rng(first)
    np.savez(
        folder / f"{stem}.npz",
        features=rng.standard_normal((N, 20)).astype(np.float32),
        ids=rng.permutation(N) * 3 + first,
        names=np.array([f"{stem}/{i}.jpg" for i in range(N)]),
        title=np.array([f"Title {i}" for i in range(N)]),
        labels=np.arange(N) % len(classes),
        class_names=np.array(classes),
    )
    out = folder / f"{stem}.codes.h5"
    source = gpq.open_data(f"features:{folder / stem}.npz", keep="title")
    return gpq.encode(folder / "model", source, out)


@pytest.fixture
def folder(tmp_path):
    make_model(tmp_path / "model", width=20, M=4)
    np.save(tmp_path / "queries.npy", np.random.default_rng(9).standard_normal((3, 20)).astype(np.float32))
    data(tmp_path, "a", 0, ["cat", "dog"])
    return tmp_path


def check(folder, index, *stems, model="model"):
    """Every result of a search has the name, the title and the label that its item has in the data."""
    known = {}
    for held in (np.load(folder / f"{stem}.npz") for stem in stems):
        columns = held["names"], held["title"], held["class_names"][held["labels"]]
        known |= dict(zip(held["ids"].tolist(), zip(*columns, strict=True), strict=True))
    for query in gpq.search(folder / model, index, folder / "queries.npy", k=7).to_dict()["queries"]:
        assert len(query["ids"]) == 7
        texts = zip(query["names"], query["title"], (one for (one,) in query["labels"]), strict=True)
        assert list(texts) == [known[i] for i in query["ids"]]


@pytest.mark.parametrize(
    "how", [{}, {"kind": "fastscan"}, {"memory": "64MB"}, {"kind": "ivf", "memory": "64MB"}]
)
def test_every_index_gives_names(folder, how):
    """Of codes, of features, of the index itself; and of several sources, each with classes of its own."""
    second = data(folder, "b", 1, ["emu", "dog", "fox"])
    check(folder, gpq.index(folder / "model", folder / "a.codes.h5", folder / "i.faiss", **how), "a")
    check(folder, gpq.index(folder / "model", folder / "a.features.h5", folder / "f.faiss", **how), "a")
    check(folder, gpq.index(folder / "model", folder / "i.faiss", folder / "o.faiss", memory="64MB"), "a")
    merged = gpq.index(folder / "model", [folder / "a.codes.h5", second], folder / "m.faiss", **how)
    check(folder, merged, "a", "b")


def test_the_table_shows_names_and_an_index_may_go_without(folder):
    for names in (True, False):
        index = gpq.index(
            folder / "model", folder / "a.codes.h5", folder / "i.faiss", names=names, overwrite=True
        )
        assert items_path(index).exists() == names
        result = gpq.search(folder / "model", index, folder / "queries.npy", k=2)
        found = result.to_dict()["queries"][0]
        assert ("names" in found) == ("title" in found) == names
        assert not names or (found["names"][0] in str(result) and found["title"][0] in str(result))


def test_names_that_are_lost_or_of_another_index_are_told_and_not_shown(folder, caplog):
    caplog.set_level(logging.WARNING, logger="gpq_faiss")
    second = data(folder, "b", 1, ["emu", "dog"])
    index = gpq.index(folder / "model", folder / "a.codes.h5", folder / "i.faiss")
    other = gpq.index(folder / "model", second, folder / "o.faiss")
    bare = gpq.index(folder / "model", second, folder / "b.faiss", names=False)
    assert not caplog.messages
    gpq.index(folder / "model", [index, bare], folder / "m.faiss")
    assert "b.faiss has no names or labels" in caplog.text
    items_path(index).write_bytes(items_path(other).read_bytes())
    assert open_items(index) is None
    assert "belongs to another index" in caplog.text
    # Overwriting brings the right ones back.
    gpq.index(folder / "model", folder / "a.codes.h5", index, overwrite=True)
    check(folder, index, "a")
    items_path(index).unlink()
    assert open_items(index) is None
    assert "i.faiss.items.sqlite is missing" in caplog.text


def test_overwriting_builds_anew_whatever_is_there(folder):
    codes, out = folder / "a.codes.h5", folder / "i.faiss"
    fingerprint = read_model(make_model(folder / "other", width=20, M=4, seed=1)).model_fingerprint
    features = gpq.open_data(f"features:{folder / 'a'}.npz", keep="title")
    other = gpq.encode(folder / "other", features, folder / "other.h5")
    for spoil in (Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:1000])):
        gpq.index(folder / "model", codes, out, overwrite=True)
        spoil(items_path(out))
        with pytest.raises(GpqError, match="exists already"):
            gpq.index(folder / "model", codes, out)
        gpq.index(folder / "other", other, out, overwrite=True)
        assert gpq.open_index(out).model_fingerprint == fingerprint
        check(folder, out, "a", model="other")


def test_no_shard_is_built_for_a_manifest_that_is_missing(folder):
    with pytest.raises(GpqError, match=r"none\.json not found: a manifest of shards is expected"):
        gpq.index_shards(folder / "model", [folder / "a.codes.h5"], folder / "none.json", add=True)
    assert not (folder / "none.shards").exists()


def test_a_shard_whose_files_are_partly_lost_is_built_again(folder):
    build = folder / "model", [folder / "a.codes.h5"], folder / "m.json"
    gpq.index_shards(*build)
    (shard,) = (folder / "m.shards").glob("*.faiss")
    before = shard.read_bytes()
    for lost in (shard, items_path(shard)):
        lost.unlink()
        gpq.index_shards(*build, overwrite=True)
        assert shard.read_bytes() == before
        assert items_path(shard).exists()
