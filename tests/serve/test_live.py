"""An index that changes: its answers are those of brute force, whatever is published over it."""

import json
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from fastapi import HTTPException
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from served import open_live

from gpq_faiss.codes.bits import pack_codes
from gpq_faiss.errors import MismatchError
from gpq_faiss.faissio.files import write_index
from gpq_faiss.indexes.index import Index
from gpq_faiss.indexes.opening import open_index
from gpq_faiss.serve.live import LiveIndex
from gpq_faiss.store.changes import changes_path
from gpq_faiss.store.items import IndexDescription, items_path, write_items

M, K, D = 4, 16, 5
Z = np.random.default_rng(0).standard_normal((M, K, D)).astype(np.float32)


def random_codes(seed, n=1):
    """Return codes, many of them equal."""
    return pack_codes(np.random.default_rng(seed).integers(0, 3, (n, M)), K)


def publish(path, items, contained=("", 0)):
    """Write an index of items: id -> code, name and labels."""
    codes = np.frombuffer(b"".join(code for code, _, _ in items.values()), np.uint8)
    index = Index.build(codes.reshape(len(items), -1), Z, np.array([*items]))
    rows = [
        (id_, name, None if labels is None else json.dumps(labels), None)
        for id_, (_, name, labels) in items.items()
    ]
    items_path(path).unlink(missing_ok=True)
    write_items(
        items_path(path),
        rows,
        IndexDescription(len(items), index.segments[0].crc(), "", *contained),
    )
    write_index(index.to_faiss(), path)


def items_of(ids, seed=1):
    codes = random_codes(seed, len(ids))
    return {
        id_: (code.tobytes(), f"{seed} {id_}", (f"label {id_ % 2}",))
        for id_, code in zip(ids, codes, strict=True)
    }


@pytest.fixture
def path(tmp_path):
    publish(tmp_path / "index.faiss", items_of(range(10)))
    return tmp_path / "index.faiss"


def check(live, items):
    """Compare an index with brute force over its items."""
    index = live.index
    ids = np.array(sorted(items), np.int64)
    assert index.ids.tolist() == ids.tolist()
    named = [live.items.item(number) for number in ids.tolist()]
    assert [(item.name, item.labels) for item in named] == [items[id_][1:] for id_ in ids.tolist()]
    if items:
        codes = np.array([np.frombuffer(items[id_][0], np.uint8) for id_ in ids.tolist()])
        xq = np.random.default_rng(0).standard_normal((3, M * D)).astype(np.float32)
        expected = Index.build(codes, Z, ids).search(xq, len(ids))
        for result, array in zip(index.search(xq, len(ids)), expected, strict=True):
            np.testing.assert_array_equal(result, array)


ids = st.integers(-3, 40).filter(lambda id_: id_ != -1)
id_sets = st.sets(ids, min_size=1, max_size=20).map(sorted)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=5)
labels = st.none() | st.tuples(names)


class Life(RuleBasedStateMachine):
    """An index that is changed, opened again and replaced, and a dictionary of the same items."""

    @initialize(ids=id_sets)
    def begin(self, ids):
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "index.faiss"
        self.published, self.changed, self.largest = items_of(ids), {}, max(ids)
        publish(self.path, self.published)
        self.live, self.reader = open_live(self.path, writable=True), open_live(self.path)

    @property
    def items(self):
        items = {**self.published, **self.changed}
        return {id_: item for id_, item in items.items() if item is not None}

    @rule(id_=st.none() | ids, seed=st.integers(0, 9), name=st.none() | names, labels=labels)
    def add(self, id_, seed, name, labels):
        item = random_codes(seed)[0].tobytes(), name, labels
        if id_ in self.items:
            with pytest.raises(HTTPException, match="in use"):
                self.live.change(id_, *item)
            return
        number = self.live.change(id_, *item)
        assert number == id_ or (id_ is None and number > self.largest)
        self.largest = max(self.largest, number)
        self.changed[number] = item

    @rule(id_=ids)
    def remove(self, id_):
        if id_ in self.items:
            assert self.live.change(id_, None) == id_
            self.changed[id_] = None
        else:
            with pytest.raises(HTTPException, match="no item has the id"):
                self.live.change(id_, None)

    @rule()
    def open_again(self):
        self.largest = max(-1, *self.published, *self.changed)
        self.live.close()
        self.live = open_live(self.path, writable=True)

    @rule(ids=id_sets, seed=st.integers(2, 9))
    def publish_a_rebuild(self, ids, seed):
        self.published = items_of(ids, seed)
        self.largest = max(self.largest, *ids)
        publish(self.path, self.published)
        self.live.watch()

    @rule(id_=ids)
    def publish_with_the_changes_before_the_last(self, id_):
        if self.items:
            items, contained = self.items, open_index(self.path).contained or ("", 0)
            self.remove(id_)
            publish(self.path, items, contained)
            self.live.watch()

    @rule()
    def read(self):
        self.reader.watch()
        check(self.reader, self.items)

    @invariant()
    def agrees(self):
        if hasattr(self, "live"):
            check(self.live, self.items)

    def teardown(self):
        if hasattr(self, "live"):
            self.live.close()
            self.folder.cleanup()


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=12, stateful_step_count=14, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_an_unfit_file_is_refused_once(path, caplog):
    with open_live(path, writable=True) as live:
        path.write_bytes(b"no index")
        for _ in range(2):
            live.watch()
        check(live, items_of(range(10)))
    assert caplog.text.count("the index stays as it is") == 1


def test_changes_are_not_written_beside_the_index_of_another_model(path):
    with pytest.raises(MismatchError, match="other codebooks"):
        LiveIndex(path, "f" * 16, writable=True)
    assert not changes_path(path).exists()


def test_after_the_changes_were_deleted_none_is_accepted_or_lost(path, caplog):
    with open_live(path, writable=True) as live:
        live.change(3, None)
        changes_path(path).unlink()
        with pytest.raises(HTTPException, match="deleted or replaced") as refusal:
            live.change(None, b"\0\0")
        assert refusal.value.status_code == 507
        assert refusal.value.detail in caplog.text
        live.reload()
        assert live.index.code_of(3) is None


def test_a_new_index_is_opened_without_a_request(path):
    opened = threading.Event()
    with open_live(path) as live:
        reload = live.reload
        live.reload = lambda: (reload(), opened.set())
        threading.Thread(target=live.follow, daemon=True).start()
        publish(path, items_of(range(11)))
        assert opened.wait(30)
        assert live.index.ntotal == 11
