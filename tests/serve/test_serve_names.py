"""Names beside the index: the service keeps them through compactions, and never shows them for another item."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from model_factory import make_model

import gpq_faiss as gpq
from gpq_faiss.build.item_files import ItemSources
from gpq_faiss.indexes.opening import open_in_memory
from gpq_faiss.serve import live as module
from gpq_faiss.serve.changes import ChangeFile, changes_path
from gpq_faiss.serve.live import LiveIndex
from gpq_faiss.store import Item, items_path


def codes(folder: Path, stem: str) -> Path:
    """Codes of 30 items that are called ``stem 0`` and so on."""
    x = np.random.default_rng(len(stem)).standard_normal((30, 20)).astype(np.float32)
    np.savez(folder / f"{stem}.npz", features=x, names=np.array([f"{stem} {i}" for i in range(30)]))
    np.save(folder / "queries.npy", x[3:4])
    return gpq.encode(folder / "model", f"features:{folder / stem}.npz", folder / f"{stem}.h5")


@pytest.fixture
def index(tmp_path: Path) -> Path:
    model = make_model(tmp_path / "model", width=20, M=4)
    return gpq.index(model, codes(tmp_path, "n"), tmp_path / "i.faiss")


def served(index: Path) -> LiveIndex:
    return LiveIndex(index, open_in_memory(index).codebooks, writable=True)


def names(live: LiveIndex, *ids: int) -> list[str | None]:
    return [item and item.name for item in live.snapshot.about(np.array(ids))]


@pytest.mark.parametrize("writing", ["write_items", "save_index", "drop"])
def test_a_compaction_that_ends_anywhere_loses_no_name(
    index: Path, monkeypatch: pytest.MonkeyPatch, writing: str
) -> None:
    live = served(index)
    code = live.snapshot.code(3).tobytes()
    # The id of an item that went is given to another, which is not called as the old one was.
    live.commit([(40, code, Item({"name": "added"}, ("dog", "cat"))), (5, None, None), (5, code, None)])

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ChangeFile if writing == "drop" else module, writing, killed)
        with pytest.raises(KeyboardInterrupt):
            live.compact()
    live.close(compact=False)
    again = served(index)
    for _ in range(2):
        assert names(again, 3, 40, 5, 77) == ["n 3", "added", None, None]
        again.compact()
    again.close()
    found = gpq.search(index.parent / "model", index, index.parent / "queries.npy", k=31).items
    assert found is not None
    assert found[40] == Item({"name": "added"}, ("cat", "dog"))
    assert 5 not in found
    assert not changes_path(index).exists()


def test_a_new_index_appears_together_with_its_names(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, live, write = codes(tmp_path, "new"), served(index), ItemSources.write
    live.commit([(40, live.snapshot.code(3).tobytes(), Item({"name": "added"}))])

    def compacting(self: ItemSources, path: Path) -> None:
        """A service that watches the file reloads, takes changes and compacts while the names are written."""
        write(self, path)
        assert not live.stale, "the index is there before its names"
        live.commit([(41, live.snapshot.code(3).tobytes(), None)])
        assert live.compact()

    monkeypatch.setattr(ItemSources, "write", compacting)
    gpq.index(tmp_path / "model", new, index, overwrite=True)
    assert live.stale
    live.reload()
    assert names(live, *range(30)) == [f"new {i}" for i in range(30)]
    live.close()
    monkeypatch.undo()
    gpq.index(tmp_path / "model", new, index, names=False, overwrite=True)
    assert not items_path(index).exists()
