"""Shards of a manifest answer as one file with all their items; what is wrong with a shard is an error that names it."""

import json
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from index_factory import same
from shard_factory import codebooks, make

from gpq_faiss import files
from gpq_faiss.errors import BusyError, DataError, GpqError, MismatchError, UsageError
from gpq_faiss.faissio.io import sidecar_path
from gpq_faiss.indexes import manifest
from gpq_faiss.indexes.filters import Allow, Deny
from gpq_faiss.indexes.manifest import read_manifest, update_manifest
from gpq_faiss.indexes.memory import MemoryIndex
from gpq_faiss.indexes.opening import open_index, verify_manifest
from gpq_faiss.indexes.sharded import ShardedIndex


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(8, 300),
    shards=st.integers(1, 5),
    k=st.integers(1, 60),
    form=st.sampled_from(["flat", "fastscan", "ivf"]),
    memory=st.sampled_from([None, "2MB"]),
    share=st.sampled_from([None, 0.1, 0.7]),
)
def test_shards_answer_as_one_file(seed, n, shards, k, form, memory, share):
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "fsync", lambda path: None)
        made = make(Path(folder), seed, n, shards, form=form)
        k = min(k, n)
        rng = np.random.default_rng(seed)
        chosen = None if share is None else made.ids[rng.random(n) < share]
        with (
            open_index(made.manifest, memory) as merged,
            closing(open_index(made.single, memory)) as single,
        ):
            assert isinstance(merged, ShardedIndex)
            assert (merged.ntotal, merged.width) == (single.ntotal, single.width)
            for where in (
                (None,) if chosen is None else (Allow(chosen), Deny(chosen), lambda ids: ids % 3 == 0)
            ):
                expected = single.search(made.queries, k, where=where)
                assert same(merged.search(made.queries, k, where=where), expected)
                least = float(merged.search(made.queries, min(k, 3))[0].min())
                expected = single.range_search(made.queries, least, where=where)
                assert same(merged.range_search(made.queries, least, where=where), expected)
            D, found = merged.search(made.queries, k, nprobe=1)
            exact, items = merged.search(made.queries, k)
            bound = merged.bound(made.queries, k, 1)
            sure = D[:, -1] > bound
            assert same((D[sure], found[sure]), (exact[sure], items[sure]))
            assert (exact >= D).all()
            item = int(made.ids[seed % n])
            np.testing.assert_array_equal(merged.code_of(item), single.code_of(item))
            assert merged.code_of(int(made.ids.max()) + 1) is None


@pytest.fixture(scope="module")
def master(tmp_path_factory):
    return make(tmp_path_factory.mktemp("shards"), 1, 200, 3)


@pytest.fixture
def made(master, tmp_path):
    """A copy, to spoil."""
    folder = shutil.copytree(master.manifest.parent, tmp_path / "copy")
    return replace(master, single=folder / master.single.name, manifest=folder / master.manifest.name)


def new(path, ids, Z=None, form="flat"):
    """An index file of items with these ids."""
    index = MemoryIndex.build(np.zeros((len(ids), 2), np.uint8), codebooks() if Z is None else Z, ids)
    return index.save(path, form, overwrite=True)


def edit(made, change, *, old=False):
    """Change the manifest; ``old``: as an earlier version wrote it, without checksum."""
    document = json.loads(made.manifest.read_text())
    change(document)
    if old:
        del document["checksum"], document["ntotal"]
    made.manifest.write_text(json.dumps(document))


def damage(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("spoil", "error", "says"),
    [
        (Path.unlink, DataError, "missing"),
        (lambda file: sidecar_path(file).unlink(), DataError, "missing"),
        (damage, MismatchError, "damaged"),
        (cut, MismatchError, "damaged"),
        (lambda file: new(file, np.arange(3), codebooks(5)), MismatchError, "another model"),
        (lambda file: new(file, np.arange(3)), MismatchError, "not the file that the manifest names"),
    ],
)
def test_what_is_wrong_with_a_shard_names_it(made, spoil, error, says):
    spoil(made.manifest.parent / "shards" / "1.faiss")
    for opening in (open_index, lambda path: verify_manifest(read_manifest(path))):
        with pytest.raises(error, match=says) as caught:
            opening(made.manifest)
        assert "shards/1.faiss" in str(caught.value)


def test_shards_are_added_replaced_and_removed_in_one_step(made):
    folder = made.manifest.parent / "shards"
    assert update_manifest(made.manifest, [new(folder / "more.faiss", 10**6 + np.arange(4))]).ntotal == 204
    with pytest.raises(DataError, match=r"id 1000000 is in two of the shards"):
        update_manifest(made.manifest, [new(folder / "twice.faiss", np.array([10**6]))])
    assert read_manifest(made.manifest).ntotal == 204
    less = new(folder / "less.faiss", np.array([10**6, 10**6 + 9]))
    assert update_manifest(made.manifest, [less], ["shards/more.faiss"]).ntotal == 202
    left = update_manifest(made.manifest, [], ["shards/0.faiss", "shards/1.faiss"])
    assert [shard.file for shard in left.shards] == ["shards/2.faiss", "shards/less.faiss"]
    with pytest.raises(UsageError, match="no shard would be left"):
        update_manifest(made.manifest, [], ["shards/2.faiss", "shards/less.faiss"])
    with pytest.raises(UsageError, match=r"has no shard 'shards/0.faiss'"):
        update_manifest(made.manifest, [], ["shards/0.faiss"])


def test_shards_that_do_not_belong_together_are_refused(made):
    folder, ids = made.manifest.parent / "shards", np.arange(10**6, 10**6 + 9)
    with pytest.raises(MismatchError, match=r"other.faiss is of another model"):
        update_manifest(made.manifest, [new(folder / "other.faiss", ids, codebooks(5))])
    with pytest.raises(DataError, match="is not below"):
        update_manifest(made.manifest, [new(folder.parents[1] / "elsewhere.faiss", ids)])
    update_manifest(made.manifest, [new(folder / "lists.faiss", ids, form="ivf")])
    for memory in (None, "1MB"):
        with open_index(made.manifest, memory) as opened:
            assert opened.ntotal == 209  # shards may be of different kinds


@pytest.mark.parametrize(
    "spoil",
    [
        lambda m: m.update(kind="other"),
        lambda m: m.update(format_version=2),
        lambda m: m.update(shards=[]),
        lambda m: m.update(shards=m["shards"][:1] * 2),
        lambda m: m.pop("codebooks_fingerprint"),
        lambda m: m.update(model_fingerprint=3),
        lambda m: m["shards"][0].update(file="../x.faiss"),
        lambda m: m["shards"][0].update(file="/x.faiss"),
        lambda m: m["shards"][0].update(ntotal="5"),
        lambda m: m["shards"][0].update(file="x" * 256),
        lambda m: m["shards"][0].update(file="é" * 200),
        lambda m: m["shards"][0].update(file="\ud800"),
        lambda m: m["shards"][0].update(file="."),
        lambda m: m["shards"][0].update(beside=None),
        lambda m: m["shards"][0].update(beside=["folder/x"]),
        lambda m: m["shards"][0].update(beside=["."]),
        lambda m: m["shards"][0].pop("sha256"),
        lambda m: m.update(shards=7),
    ],
)
def test_a_damaged_manifest_is_an_error_that_names_it(made, spoil):
    edit(made, spoil)
    with pytest.raises(GpqError, match=r"manifest\.json"):
        read_manifest(made.manifest)


def again(document, file, **changes):
    document["shards"].append({**document["shards"][0], "file": file, **changes})


@pytest.mark.parametrize("other", ["./shards/0.faiss", "shards//0.faiss", "shards/./0.faiss"])
def test_one_shard_under_two_names_is_an_error(made, other):
    """Else every one of its items would be found twice."""
    edit(made, lambda document: again(document, other), old=True)
    with pytest.raises(DataError, match=r"shards/0.faiss and shards/0.faiss hold the same items"):
        open_index(made.manifest)


@pytest.mark.parametrize("put", [Path.hardlink_to, Path.symlink_to, lambda to, path: shutil.copy(path, to)])
def test_a_shard_that_is_there_twice_is_an_error(made, put):
    folder = made.manifest.parent / "shards"
    for name in ("0.faiss", "0.faiss.json"):
        put(folder / name.replace("0", "again", 1), folder / name)
    edit(made, lambda document: again(document, "shards/again.faiss", beside=["again.faiss.json"]), old=True)
    with pytest.raises(DataError, match="hold the same items"):
        read_manifest(made.manifest)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("key", ["first_id", "last_id", "ntotal"])
def test_wrong_numbers_of_a_shard_are_an_error(made, key, old):
    """Else items of a shard that are beyond its range would have no labels in results."""

    def change(document):
        document["shards"][1][key] += -1 if key == "first_id" else 1

    edit(made, change, old=old)
    stated = "not the file that the manifest names" if key == "ntotal" else "which the manifest states"
    for opening in (open_index, lambda path: verify_manifest(read_manifest(path))):
        with pytest.raises(GpqError, match=stated if old else "checksum differs"):
            opening(made.manifest)


def test_a_manifest_of_an_earlier_version_opens(made):
    edit(made, lambda document: None, old=True)
    verify_manifest(read_manifest(made.manifest))
    assert open_index(made.manifest).ntotal == read_manifest(made.manifest).ntotal


def test_two_changes_at_once_are_refused(made, monkeypatch):
    """Else the second would write a manifest without what the first added."""
    folder = made.manifest.parent / "shards"
    made_now = [new(folder / f"{first}.faiss", first + np.arange(3)) for first in (10**6, 10**7 + 1)]
    write = manifest.write_json

    def meanwhile(path, document):
        with pytest.raises(BusyError, match="written by another process"):
            update_manifest(made.manifest, made_now[1:])
        write(path, document)

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "write_json", meanwhile)
        update_manifest(made.manifest, made_now[:1])
    update_manifest(made.manifest, made_now[1:])
    assert {"shards/1000000.faiss", "shards/10000001.faiss"} <= {
        s.file for s in read_manifest(made.manifest).shards
    }
    assert not list(made.manifest.parent.glob(".manifest*"))
