"""Names beside the index: the service shows them without the data, and never for another item."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from model_factory import make_model

import gpq_faiss as gpq
from gpq_faiss.build.item_files import ItemSources
from gpq_faiss.encoder import Encoder
from gpq_faiss.serve import live as module
from gpq_faiss.serve.changes import ChangeFile, changes_path
from gpq_faiss.serve.live import LiveIndex
from gpq_faiss.serve.service import Service
from gpq_faiss.store import Item, items_path


def test_names_come_from_beside_the_index(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", width=20, M=4)
    x = np.random.default_rng(0).standard_normal((30, 20)).astype(np.float32)
    np.savez(tmp_path / "x.npz", features=x, names=np.array([f"n{i}" for i in range(30)]))
    codes = gpq.encode(model, f"features:{tmp_path / 'x.npz'}", tmp_path / "codes.h5")
    index = gpq.index(model, codes, tmp_path / "i.faiss")
    encoder = Encoder.load(model)
    live = LiveIndex(index, encoder.model.codebooks, writable=True)
    code = live.snapshot.code(3)

    async def names(*ids: int) -> list[object]:
        service = Service(encoder, live)
        return [entry.get("name") for entry in await service.known(np.array(ids))]

    assert asyncio.run(names(3, 29, 77)) == ["n3", "n29", None]
    live.commit([(5, None, None), (40, code, None)])
    assert live.compact()
    assert asyncio.run(names(3, 40)) == ["n3", None]
    # The id of an item that went is given to another, which is not called as the old one was.
    live.commit([(5, code, None)])
    assert asyncio.run(names(3, 5)) == ["n3", None]
    assert live.compact()
    assert asyncio.run(names(3, 5)) == ["n3", None]
    live.close()


def about(name: str | None, *labels: str) -> Item:
    return Item({} if name is None else {"name": name}, labels or None)


@pytest.mark.parametrize("named", [True, False], ids=["an index with names", "an index without"])
def test_names_and_labels_of_added_items_are_in_the_log_and_then_beside_the_index(
    tmp_path: Path, named: bool
) -> None:
    model = make_model(tmp_path / "model", width=20, M=4)
    x = np.random.default_rng(0).standard_normal((30, 20)).astype(np.float32)
    np.savez(tmp_path / "x.npz", features=x, names=np.array([f"n{i}" for i in range(30)]))
    codes = gpq.encode(model, f"features:{tmp_path / 'x.npz'}", tmp_path / "codes.h5")
    index = gpq.index(model, codes, tmp_path / "i.faiss", names=named)
    Z = Encoder.load(model).model.codebooks
    live = LiveIndex(index, Z, writable=True)
    code = live.snapshot.code(3)
    live.commit([(40, code, about("a \u00e9 b", "dog", "cat")), (41, code, None), (7, None, None)])
    live.commit(
        [(42, code, about(None, "bird")), (43, code, about("c")), (7, code, about("new seven", "cat"))]
    )
    live.commit([(43, None, None)])

    def check(found: LiveIndex) -> None:
        wanted = {
            40: about("a \u00e9 b", "dog", "cat"), 41: None, 42: about(None, "bird"), 43: None,
            7: about("new seven", "cat"), 3: about("n3") if named else None, 99: None,
        }  # fmt: skip
        items = found.snapshot.about(np.array(list(wanted)))
        seen = [(None, ()) if item is None else (item.name, item.labels or ()) for item in items]
        assert all(item is None or item.texts.get("name") != "" for item in items)
        assert seen == [
            (None, ()) if item is None else (item.name, item.labels or ()) for item in wanted.values()
        ]

    check(live)
    live.close(compact=False)  # as a kill leaves it
    reader = LiveIndex(index, Z)
    check(reader)
    live = LiveIndex(index, Z, writable=True)
    check(live)
    assert live.compact()
    check(live)
    assert reader.reload()
    check(reader)
    live.commit([(50, code, about("later"))])
    assert live.compact()
    check(live)
    live.close()
    found = gpq.search(model, index, np_queries(tmp_path, x[3:4]), k=34)
    assert found.items is not None
    assert found.items[40].labels == ("cat", "dog")
    assert found.items[50].name == "later"
    assert not changes_path(index).exists()


def np_queries(folder: Path, values: np.ndarray) -> str:  # type: ignore[type-arg]
    np.save(folder / "q.npy", values)
    return str(folder / "q.npy")


@pytest.mark.parametrize("writing", ["write_items", "save_index", "drop"])
def test_a_compaction_that_ends_anywhere_loses_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writing: str
) -> None:
    model = make_model(tmp_path / "model", width=20, M=4)
    x = np.random.default_rng(0).standard_normal((30, 20)).astype(np.float32)
    np.savez(tmp_path / "x.npz", features=x, names=np.array([f"n{i}" for i in range(30)]))
    codes = gpq.encode(model, f"features:{tmp_path / 'x.npz'}", tmp_path / "codes.h5")
    index = gpq.index(model, codes, tmp_path / "i.faiss")
    Z = Encoder.load(model).model.codebooks
    live = LiveIndex(index, Z, writable=True)
    code = live.snapshot.code(3)
    live.commit([(40, code, about("added", "cat")), (5, None, None)])

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ChangeFile if writing == "drop" else module, writing, killed)
        with pytest.raises(KeyboardInterrupt):
            live.compact()
    live.close(compact=False)
    again = LiveIndex(index, Z, writable=True)
    for _ in range(2):
        items = again.snapshot.about(np.array([3, 40]))
        assert [item and item.name for item in items] == ["n3", "added"]
        again.compact()
    again.close()


def test_a_new_index_appears_together_with_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(tmp_path / "model", width=20, M=4)
    x = np.random.default_rng(0).standard_normal((30, 20)).astype(np.float32)
    np.savez(tmp_path / "old.npz", features=x, names=np.array([f"old {i}" for i in range(30)]))
    np.savez(tmp_path / "new.npz", features=x[::-1], names=np.array([f"new {i}" for i in range(30)]))
    old, new = (
        gpq.encode(model, f"features:{tmp_path / name}.npz", tmp_path / f"{name}.h5")
        for name in ("old", "new")
    )
    index = gpq.index(model, old, tmp_path / "i.faiss")
    live = LiveIndex(index, Encoder.load(model).model.codebooks, writable=True)
    live.commit([(40, live.snapshot.code(3), about("added"))])
    write = ItemSources.write

    def compacting(self: ItemSources, path: Path) -> None:
        """A service that watches the file reloads, takes changes and compacts while the names are written."""
        write(self, path)
        assert not live.stale, "the index is there before its names"
        live.commit([(41, live.snapshot.code(3), None)])
        assert live.compact()

    monkeypatch.setattr(ItemSources, "write", compacting)
    gpq.index(model, new, index, overwrite=True)
    assert live.stale
    assert live.reload()
    named = live.snapshot.about(np.arange(30))
    assert [item and item.name for item in named] == [f"new {i}" for i in range(30)]
    live.close()
    monkeypatch.undo()
    gpq.index(model, new, index, names=False, overwrite=True)
    assert not items_path(index).exists()
