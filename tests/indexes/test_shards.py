"""Shards of a manifest answer as one file with all their items; what is wrong with a shard is an error that names it."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_factory import Made, codebooks, make, same

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
def test_shards_answer_as_one_file(
    seed: int, n: int, shards: int, k: int, form: str, memory: str | None, share: float | None
) -> None:
    with TemporaryDirectory() as folder:
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
                same(merged.search(made.queries, k, where=where), single.search(made.queries, k, where=where))
                least = float(merged.search(made.queries, min(k, 3))[0].min())
                same(
                    merged.range_search(made.queries, least, where=where),
                    single.range_search(made.queries, least, where=where),
                )
            D, found = merged.search(made.queries, k, nprobe=1)
            exact, items = merged.search(made.queries, k)
            bound = merged.bound(made.queries, k, 1)
            sure = D[:, -1] > bound
            same((D[sure], found[sure]), (exact[sure], items[sure]))
            assert (exact >= D).all()
            item = int(made.ids[seed % n])
            np.testing.assert_array_equal(merged.code_of(item), single.code_of(item))
            assert merged.code_of(int(made.ids.max()) + 1) is None


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return make(tmp_path, 1, 200, 3)


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def of_another_model(file: Path) -> None:
    index = MemoryIndex.build(np.zeros((3, 2), np.uint8), codebooks(5), np.arange(3))
    index.save(file, overwrite=True)


def of_other_items(file: Path) -> None:
    index = MemoryIndex.build(np.zeros((3, 2), np.uint8), codebooks(), np.arange(3))
    index.save(file, overwrite=True)


@pytest.mark.parametrize(
    ("spoil", "error", "says"),
    [
        (Path.unlink, DataError, "missing"),
        (lambda file: sidecar_path(file).unlink(), DataError, "missing"),
        (damage, MismatchError, "damaged"),
        (cut, MismatchError, "damaged"),
        (of_another_model, MismatchError, "another model"),
        (of_other_items, MismatchError, "not the file that the manifest names"),
    ],
)
def test_what_is_wrong_with_a_shard_names_it(made: Made, spoil: object, error: type, says: str) -> None:
    spoil(made.manifest.parent / "shards" / "1.faiss")  # type: ignore[operator]
    for opening in (open_index, lambda path: verify_manifest(read_manifest(path))):
        with pytest.raises(error, match=says) as caught:
            opening(made.manifest)
        assert "shards/1.faiss" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_shards_are_added_replaced_and_removed_in_one_step(made: Made) -> None:
    folder = made.manifest.parent / "shards"
    Z = codebooks()
    more = MemoryIndex.build(np.ones((4, 2), np.uint8), Z, np.arange(10**6, 10**6 + 4)).save(
        folder / "more.faiss"
    )
    assert update_manifest(made.manifest, [more]).ntotal == 204
    with pytest.raises(DataError, match=r"id 1000000 is in two of the shards"):
        update_manifest(
            made.manifest,
            [MemoryIndex.build(np.ones((1, 2), np.uint8), Z, [10**6]).save(folder / "twice.faiss")],
        )
    assert read_manifest(made.manifest).ntotal == 204
    less = MemoryIndex.build(np.ones((2, 2), np.uint8), Z, [10**6, 10**6 + 9]).save(folder / "less.faiss")
    assert update_manifest(made.manifest, [less], ["shards/more.faiss"]).ntotal == 202
    assert [
        s.file for s in update_manifest(made.manifest, [], ["shards/0.faiss", "shards/1.faiss"]).shards
    ] == [
        "shards/2.faiss",
        "shards/less.faiss",
    ]
    with pytest.raises(UsageError, match="no shard would be left"):
        update_manifest(made.manifest, [], ["shards/2.faiss", "shards/less.faiss"])
    with pytest.raises(UsageError, match=r"has no shard 'shards/0.faiss'"):
        update_manifest(made.manifest, [], ["shards/0.faiss"])


def test_shards_that_do_not_belong_together_are_refused(made: Made, tmp_path: Path) -> None:
    folder = made.manifest.parent / "shards"
    other = MemoryIndex.build(np.zeros((3, 2), np.uint8), codebooks(5), np.arange(10**6, 10**6 + 3))
    with pytest.raises(MismatchError, match=r"other.faiss is of another model"):
        update_manifest(made.manifest, [other.save(folder / "other.faiss")])
    elsewhere = MemoryIndex.build(np.zeros((3, 2), np.uint8), codebooks(), np.arange(10**6, 10**6 + 3))
    elsewhere.save(tmp_path.parent / f"{tmp_path.name}-elsewhere.faiss")
    with pytest.raises(DataError, match="is not below"):
        update_manifest(made.manifest, [tmp_path.parent / f"{tmp_path.name}-elsewhere.faiss"])
    lists = MemoryIndex.build(np.zeros((9, 2), np.uint8), codebooks(), np.arange(10**6, 10**6 + 9))
    update_manifest(made.manifest, [lists.save(folder / "lists.faiss", "ivf")])
    for memory in (None, "1MB"):
        assert open_index(made.manifest, memory).ntotal == 209  # shards may be of different kinds


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
def test_a_damaged_manifest_is_an_error_that_names_it(made: Made, spoil: object) -> None:
    document = json.loads(made.manifest.read_text())
    spoil(document)  # type: ignore[operator]
    made.manifest.write_text(json.dumps(document))
    with pytest.raises(GpqError, match=r"manifest\.json"):
        read_manifest(made.manifest)


@pytest.mark.parametrize("other", ["./shards/0.faiss", "shards//0.faiss", "shards/./0.faiss"])
def test_one_shard_under_two_names_is_an_error(made: Made, other: str) -> None:
    """Else every one of its items would be found twice."""
    document = json.loads(made.manifest.read_text())
    del document["checksum"], document["ntotal"]  # as earlier versions wrote it
    document["shards"].append({**document["shards"][0], "file": other})
    made.manifest.write_text(json.dumps(document))
    with pytest.raises(DataError, match=r"shards/0.faiss and shards/0.faiss hold the same items"):
        open_index(made.manifest)


@pytest.mark.parametrize("how", ["link", "symlink", "copy"])
def test_a_shard_that_is_there_twice_is_an_error(made: Made, how: str) -> None:
    folder = made.manifest.parent / "shards"
    put = {
        "link": Path.hardlink_to,
        "symlink": Path.symlink_to,
        "copy": lambda to, path: shutil.copy(path, to),
    }[how]
    for name in ("0.faiss", "0.faiss.json"):
        put(folder / name.replace("0", "again", 1), folder / name)
    document = json.loads(made.manifest.read_text())
    del document["checksum"], document["ntotal"]
    beside = ["again.faiss.json"]
    document["shards"].append({**document["shards"][0], "file": "shards/again.faiss", "beside": beside})
    made.manifest.write_text(json.dumps(document))
    with pytest.raises(DataError, match="hold the same items"):
        read_manifest(made.manifest)


@pytest.mark.parametrize("key", ["first_id", "last_id"])
@pytest.mark.parametrize("old", [False, True])
def test_wrong_ranges_of_ids_are_an_error(made: Made, key: str, old: bool) -> None:
    """Else items of a shard that are beyond them would have no labels in results."""
    document = json.loads(made.manifest.read_text())
    document["shards"][1][key] += 1 if key == "last_id" else -1
    if old:
        del document["checksum"], document["ntotal"]
    made.manifest.write_text(json.dumps(document))
    for opening in (open_index, lambda path: verify_manifest(read_manifest(path))):
        with pytest.raises(GpqError, match="which the manifest states" if old else "checksum differs"):
            opening(made.manifest)


def test_a_manifest_of_an_earlier_version_opens(made: Made) -> None:
    document = json.loads(made.manifest.read_text())
    del document["checksum"], document["ntotal"]
    made.manifest.write_text(json.dumps(document))
    verify_manifest(read_manifest(made.manifest))
    assert open_index(made.manifest).ntotal == read_manifest(made.manifest).ntotal


def test_a_manifest_that_miscounts_a_shard_is_an_error(made: Made) -> None:
    document = json.loads(made.manifest.read_text())
    document["shards"][0]["ntotal"] += 1
    del document["checksum"], document["ntotal"]  # as earlier versions wrote it
    made.manifest.write_text(json.dumps(document))
    with pytest.raises(MismatchError, match="is not the file that the manifest names"):
        open_index(made.manifest)


def test_two_changes_at_once_are_refused(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the second would write a manifest without what the first added."""
    folder = made.manifest.parent / "shards"
    new = [
        MemoryIndex.build(np.zeros((3, 2), np.uint8), codebooks(), first + np.arange(3)).save(
            folder / f"{first}.faiss"
        )
        for first in (10**6, 10**7 + 1)
    ]
    write = manifest.write_json

    def meanwhile(path: Path, document: object) -> None:
        with pytest.raises(BusyError, match="written by another process"):
            update_manifest(made.manifest, new[1:])
        write(path, document)

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "write_json", meanwhile)
        update_manifest(made.manifest, new[:1])
    update_manifest(made.manifest, new[1:])
    assert {"shards/1000000.faiss", "shards/10000001.faiss"} <= {
        s.file for s in read_manifest(made.manifest).shards
    }
    assert not list(made.manifest.parent.glob(".manifest*"))
