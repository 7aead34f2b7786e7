"""An index that changes: its answers are those of brute force over what is there, through compactions, reloads and kills."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from index_factory import best, books
from kills import run_killed
from model_factory import make_model
from served import open_live

import gpq_faiss as gpq
from gpq_faiss import Allow, Deny, MemoryIndex
from gpq_faiss.build import item_files
from gpq_faiss.codes.bits import pack_codes
from gpq_faiss.errors import DataError, MismatchError
from gpq_faiss.faissio import io
from gpq_faiss.faissio.io import read_sidecar
from gpq_faiss.faissio.storage import FORMS
from gpq_faiss.files import write_json
from gpq_faiss.indexes.opening import open_in_memory
from gpq_faiss.serve.live import ChangeError
from gpq_faiss.store.items import Item

M, K, D = 4, 16, 5


Z, OTHER = books(M, K, D), books(M, K, D, 1)


def draw(rng, n):
    """Codes, many of them equal."""
    return pack_codes(rng.integers(0, 3, (n, M)), K)


CODE = draw(np.random.default_rng(0), 1)[0]
NEW = CODE.tobytes()


def make_index(path, ids, seed=1, Z=Z, form="flat"):
    numbers = list(ids)
    codes = draw(np.random.default_rng(seed), len(numbers))
    MemoryIndex.build(codes, Z, np.array(numbers)).save(path, form, overwrite=True)
    return dict(zip(numbers, codes, strict=True))


def brute_force(items, xq, k, where):
    ids = np.array(sorted(items), np.int64)
    if where is not None:
        ids = ids[np.isin(ids, np.array(where.ids, np.int64), invert=isinstance(where, Deny))]
    return best(xq, np.array([items[int(i)] for i in ids], np.uint8).reshape(len(ids), 2), Z, k, ids)


def check(live, items, seed=0):
    """Compare searches of several kinds with brute force."""
    snapshot, rng = live.snapshot, np.random.default_rng(seed)
    assert snapshot.ntotal == len(items)
    xq = rng.standard_normal((3, M * D)).astype(np.float32)
    some = rng.choice(60, 20, replace=False)
    filters = [None, Allow(some), Deny(some), Allow([]), Deny([])]
    for where in filters:
        for k in (7, 1000):
            D_, found = snapshot.search(xq, k, where)
            expected = brute_force(items, xq, min(k, len(items)), where)
            n = expected[1].shape[1]
            np.testing.assert_array_equal(found[:, :n], expected[1])
            np.testing.assert_array_equal(D_[:, :n], expected[0])
            assert (found[:, n:] == -1).all()
            assert np.isneginf(D_[:, n:]).all()
    for number in range(-3, 64):
        if number in items:
            np.testing.assert_array_equal(snapshot.code(number), items[number])
        else:
            with pytest.raises(ChangeError, match=f"no item has the id {number}"):
                snapshot.code(number)


codes = st.integers(0, 2**30).map(lambda seed: draw(np.random.default_rng(seed), 1)[0].tobytes())
ids = st.integers(-3, 60).filter(lambda number: number != -1)
texts = st.text(min_size=1, max_size=5)
about = st.none() | st.builds(
    lambda name, labels: Item({"name": name}, tuple(labels) or None), texts, st.lists(texts, max_size=2)
)


class Life(RuleBasedStateMachine):
    """An index that is changed, compacted, opened again and replaced, and a plain dictionary of the same items."""

    @initialize(
        numbers=st.sets(ids, min_size=1, max_size=40) | st.just({*range(30)}), form=st.sampled_from(FORMS)
    )
    def begin(self, numbers, form):
        self.folder = tempfile.TemporaryDirectory()
        self.path, self.form = Path(self.folder.name) / "index.faiss", form
        self.put(sorted(numbers), 1)
        self.changed = {}
        self.live = open_live(self.path, Z, writable=True)

    def put(self, numbers, seed):
        made = make_index(self.path, numbers, seed, form=self.form)
        self.filed = {number: (code.tobytes(), None) for number, code in made.items()}

    @property
    def items(self):
        """Code, name and labels by id."""
        return {number: one for number, one in {**self.filed, **self.changed}.items() if one is not None}

    @rule(asked=st.lists(st.tuples(st.none() | ids, st.none() | codes, about), min_size=1, max_size=6))
    def commit(self, asked):
        asked = [(number, code, (code is not None and item) or None) for number, code, item in asked]
        asked = [one for one in asked if one[0] is not None or one[1] is not None]
        largest = max([-1, *self.filed, *self.changed])
        for (number, code, item), answer in zip(asked, self.live.commit(asked), strict=True):
            expected = largest + 1 if number is None else number
            if number is not None and (code is None) == (number not in self.items):
                assert isinstance(answer, ChangeError)
                assert answer.status == (404 if code is None else 409)
                continue
            assert answer == expected
            self.changed[expected] = None if code is None else (code, item)
            largest = max(largest, expected)

    @rule()
    def compact(self):
        if self.live.compact():
            self.filed, self.changed = self.items, {}
            assert self.live.snapshot.index.ntotal == len(self.filed)
            assert read_sidecar(self.path)["kind"] == self.form
        else:
            assert not self.changed or not self.items

    @rule(compact=st.booleans())
    def open_again(self, compact):
        self.live.close(compact=compact)
        if compact and self.items:
            self.filed, self.changed = self.items, {}
            left = {path.name.removeprefix("index.faiss") for path in self.path.parent.iterdir()}
            assert left <= {"", ".json", ".items.sqlite"}
        self.live = open_live(self.path, Z, writable=True)

    @rule(seed=st.integers(0, 99))
    def publish(self, seed):
        reader, old = open_live(self.path, Z), self.live.snapshot.ntotal
        assert not self.live.stale
        self.put(range(seed, seed + 20), seed)
        assert self.live.stale
        assert self.live.snapshot.ntotal == old
        assert not self.live.compact(), "what somebody else wrote is not replaced"
        self.live.maintain()
        assert not self.live.stale
        reader.reload()
        self.check(reader)

    @invariant()
    def found(self):
        if hasattr(self, "live"):
            self.check(self.live)

    @rule()
    def read(self):
        self.check(open_live(self.path, Z))
        with pytest.raises(DataError, match="by another process"):
            open_live(self.path, Z, writable=True)

    def check(self, live):
        items = self.items
        check(live, {n: np.frombuffer(code, np.uint8) for n, (code, _) in items.items()})
        asked = np.array([*items, 77], np.int64)
        found = dict(zip(asked.tolist(), live.snapshot.about(asked), strict=True))
        assert {number: found[number] for number in items} == {
            number: item for number, (_, item) in items.items()
        }

    def teardown(self):
        if hasattr(self, "live"):
            self.live.close()
            self.folder.cleanup()


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=12, stateful_step_count=14, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_changes_during_a_compaction_are_kept(tmp_path, monkeypatch):
    path = tmp_path / "index.faiss"
    items = make_index(path, range(20))
    live = open_live(path, Z, writable=True)
    live.commit([(3, None, None), (30, NEW, None)])
    save = live._save

    def slow(made, changes):
        live.commit([(30, None, None), (31, NEW, None), (4, None, None)])
        written = save(made, changes)
        live.commit([(3, NEW, None)])
        return written

    monkeypatch.setattr(live, "_save", slow)
    assert live.compact()
    del items[4]
    items |= {3: CODE, 31: CODE}
    assert len(live.snapshot.changes) == 4
    check(live, items)
    check(open_live(path, Z), items)  # as after a kill
    monkeypatch.undo()
    live.close()
    check(open_live(path, Z), items)


def test_a_kill_anywhere_in_a_compaction_loses_nothing(tmp_path):
    before, work = tmp_path / "before", tmp_path / "work"
    before.mkdir()
    items = make_index(before / "index.faiss", range(20))
    live = open_live(before / "index.faiss", Z, writable=True)
    live.commit([(number, NEW, Item({"name": f"filed {number}"})) for number in (20, 21)])
    assert live.compact()
    # The id of an item that went is given to another, which is not called as the old one was.
    live.commit(
        [(20, None, None), (20, NEW, None), (3, None, None), (30, NEW, Item({"name": "added"}, ("b", "a")))]
    )
    live.close(compact=False)
    del items[3]
    items |= dict.fromkeys((20, 21, 30), CODE)

    def compact():
        found = open_live(work / "index.faiss", Z, writable=True)
        found.commit([(5, None, None)])
        found.close()

    for at in range(0, 500, 5):  # a fifth of the places: the next start is as good after the others
        shutil.copytree(before, work)
        if not run_killed(compact, work, at):
            assert at > 30
            break
        left = open_live(work / "index.faiss", Z)  # perhaps before its names are there
        there = left.snapshot.code_of(5) is not None
        expected = items if there else {n: c for n, c in items.items() if n != 5}
        check(left, expected, at)
        open_live(work / "index.faiss", Z, writable=True).close()
        found = open_live(work / "index.faiss", Z)
        check(found, expected, at)
        known = [None, Item({"name": "filed 21"}), Item({"name": "added"}, ("a", "b")), None]
        assert found.snapshot.about(np.array([20, 21, 30, 77])) == known
        assert {p.name.removeprefix("index.faiss") for p in work.iterdir()} == {"", ".json", ".items.sqlite"}
        shutil.rmtree(work)


@pytest.mark.parametrize("names", [False, True])
def test_a_compaction_leaves_an_index_that_was_published_meanwhile(tmp_path, monkeypatch, caplog, names):
    path = tmp_path / "index.faiss"
    make_index(path, range(20))
    live = open_live(path, Z, writable=True)
    live.commit([(3, None, None), (30, NEW, Item({"name": "new"}, ("b", "a")) if names else None)])

    def late(*args):
        """The sidecar, the last of the compaction's files."""
        monkeypatch.undo()
        write_json(*args)
        make_index(path, range(100, 130), seed=2)

    monkeypatch.setattr(io, "write_json", late)
    assert not live.stale
    if not names:
        assert not live.compact()
        assert live.stale
    live.close()
    assert "was replaced meanwhile" in caplog.text
    assert open_in_memory(path).ids.tolist() == [*range(100, 130)]
    kept = open_live(path, Z)  # with the changes beside it
    assert set(kept.snapshot.search(np.zeros((1, M * D)), 99)[1][0].tolist()) == {30, *range(100, 130)}


def test_it_is_maintained_and_an_unfit_file_is_refused_once(tmp_path, caplog):
    path = tmp_path / "index.faiss"
    items = make_index(path, range(10))
    live = open_live(path, Z, writable=True, compact_after=2)
    for n in (1, 2):
        live.commit([(n, None, None)])
        del items[n]
        live.maintain()
        assert len(live.snapshot.changes) == n % 2
    for content in (None, b"nothing"):
        make_index(path, range(10), Z=OTHER) if content is None else path.write_bytes(content)
        assert live.stale
        live.maintain()
        assert ("other codebooks" if content is None else "is not the file that") in caplog.text
        assert not live.stale
    path.unlink()
    assert not live.stale
    check(live, items)
    make_index(path, [1], Z=OTHER)
    with pytest.raises(MismatchError, match="other codebooks"):
        open_live(path, Z)


def test_changes_that_the_disk_refuses_are_not_made(tmp_path):
    path = tmp_path / "index.faiss"
    items = make_index(path, range(10))
    live = open_live(path, Z, writable=True)
    live._file._db.execute("PRAGMA max_page_count = 4")
    asked = [(n, NEW, Item({"name": "x" * 999})) for n in range(20, 40)]
    *refused, missing = live.commit([*asked, (77, None, None)])
    assert {getattr(answer, "status", None) for answer in refused} == {507}
    assert "the disk is full" in str(refused[0])
    assert getattr(missing, "status", None) == 404
    check(live, items)
    check(open_live(path, Z), items)
    assert live.commit([(1, None, None)]) == [1]
    live.close()


def test_a_new_index_appears_together_with_its_names(tmp_path, monkeypatch):
    model, path = make_model(tmp_path / "model", width=20, M=4), tmp_path / "i.faiss"
    write = item_files.write_items
    x = np.random.default_rng(0).standard_normal((30, 20)).astype(np.float32)
    for stem in ("old", "new"):
        np.savez(tmp_path / f"{stem}.npz", features=x, names=np.array([f"{stem} {i}" for i in range(30)]))
        gpq.encode(model, f"features:{tmp_path / stem}.npz", tmp_path / f"{stem}.h5")
    gpq.index(model, tmp_path / "old.h5", path)
    live = open_live(path, writable=True)

    def compacting(*rows):
        """A service that watches the file takes changes and compacts while the names are written."""
        write(*rows)
        assert not live.stale, "the index is there before its names"
        live.commit([(41, live.snapshot.code(3).tobytes(), None)])
        assert live.compact()

    monkeypatch.setattr(item_files, "write_items", compacting)
    gpq.index(model, tmp_path / "new.h5", path, overwrite=True)
    assert live.stale
    live.reload()
    assert live.snapshot.about(np.arange(30)) == [Item({"name": f"new {i}"}) for i in range(30)]
    live.close()
