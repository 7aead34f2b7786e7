"""protocols: exact sizes, disjoint roles, the same split for the same seed, and nothing learnt from hidden labels."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpq_faiss.data.labels import Labels
from gpq_faiss.data.protocols import (
    Split,
    load_split,
    make_split,
    read_rows,
    split_of,
)
from gpq_faiss.data.standard import open_digits
from gpq_faiss.errors import DataError, UsageError


def protocol1(labels: Labels, seed: int = 0, labelled: str | None = None, queries: Any = None) -> Split:
    return split_of(labels, seed=seed, labelled=labelled, queries=queries)


def authors_split(labels: Labels, labelled: str | None = None) -> Split:
    return split_of(labels, "gpq-authors", labelled=labelled)


def protocol2(labels: Labels, seed: int = 0, labelled: str | None = None) -> Split:
    return split_of(labels, "2", seed=seed, labelled=labelled)


def transfer(labels: Labels, seed: int = 0, labelled: str | None = None, unseen: str = "") -> Split:
    return split_of(labels, f"transfer:{unseen}" if unseen else "transfer", seed=seed, labelled=labelled)


def no_queries(labels: Labels, seed: int = 0, labelled: str | None = None) -> Split:
    return split_of(labels, "none", seed=seed, labelled=labelled)


CIFAR = Labels.from_ids(np.random.default_rng(0).permutation(np.repeat(np.arange(10), 6000)))


def sizes(split: Split) -> tuple[int, ...]:
    return tuple(len(rows) for rows in (split.query, split.labelled, split.unlabelled, split.database))


def multi(n: int = 3000, c: int = 9, seed: int = 0) -> Labels:
    """Classes from rare to common; some items have no label."""
    rng = np.random.default_rng(seed)
    return Labels.from_multihot(rng.random((n, c)) < np.linspace(0.05, 0.4, c))


def test_cifar_sizes_are_the_papers() -> None:
    one = protocol1(CIFAR)
    assert sizes(one) == (1000, 5000, 54_000, 54_000)
    assert set(CIFAR.take(one.query).counts()) == {100}
    assert set(CIFAR.take(one.labelled).counts()) == {500}
    two = protocol2(CIFAR)
    assert sizes(two) == (9000, 21_000, 30_000, 30_000)
    assert sorted(CIFAR.take(two.query).counts()) == [0] * 7 + [3000] * 3
    assert sorted(CIFAR.take(two.labelled).counts()) == [0] * 3 + [3000] * 7
    assert set(CIFAR.take(two.database).counts()) == {3000}

    assert protocol1(CIFAR, 1).hash != protocol1(CIFAR, 0).hash
    small, large = protocol1(CIFAR, 3, "10-per-class"), protocol1(CIFAR, 3, "5%")
    np.testing.assert_array_equal(small.query, large.query)
    assert np.isin(small.labelled, large.labelled).all()
    assert len(large.labelled) == len(protocol1(CIFAR, 0, "0.05").labelled) == 3000


def test_the_authors_split_is_their_rule() -> None:
    split = authors_split(CIFAR)
    assert sizes(split) == (1000, 5000, 54_000, 54_000)
    of_item = CIFAR.class_ids()
    for c in range(10):
        rows = [i for i in range(60_000) if of_item[i] == c]
        queries = rows[::60]
        assert set(queries) <= set(split.query)
        rest = [i for i in rows if i not in set(queries)]
        assert set(rest[:500]) <= set(split.labelled)
    assert len(authors_split(CIFAR, "20-per-class").labelled) == 200
    with pytest.raises(UsageError, match="N-per-class"):
        authors_split(CIFAR, "0.1")
    with pytest.raises(DataError, match="class '0' has 1,000 items"):
        authors_split(Labels.from_ids(np.zeros(1000, int)), "1000-per-class")


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(30, 400),
    c=st.integers(2, 9),
    several=st.booleans(),
    seed=st.integers(0, 5),
    protocol=st.sampled_from(["1", "2", "none"]),
    spec=st.sampled_from([None, "all", "1-per-class", "0.1", "1.0"]),
)
def test_roles_are_disjoint_and_complete(
    n: int, c: int, several: bool, seed: int, protocol: str, spec: str | None
) -> None:
    single = Labels.from_ids(np.random.default_rng(seed).integers(-1, c, n), [str(k) for k in range(c)])
    labels = multi(n, c, seed) if several else single
    make = {"1": protocol1, "2": protocol2, "none": no_queries}[protocol]
    refusal = ""
    try:
        split = make(labels, seed, spec)
    except DataError as error:
        refusal = str(error)
    if refusal:
        assert re.search("too few|no labelled item|lower it|two classes", refusal)
        return
    has = set(np.flatnonzero(labels.has()))
    query, labelled, unlabelled, database = (
        set(rows.tolist()) for rows in (split.query, split.labelled, split.unlabelled, split.database)
    )
    assert not query & (labelled | unlabelled | database)
    assert not labelled & (unlabelled | database)
    assert database <= unlabelled
    assert query | labelled | unlabelled == set(range(n))
    assert (query | labelled | database) <= has
    if protocol != "2":
        assert database == unlabelled & has
    view = split.training_labels(labels)
    assert set(np.flatnonzero(view.has())) == labelled
    assert view.counts().min() > 0
    assert split.hash == make(labels, seed, spec).hash


@settings(max_examples=80, deadline=None)
@given(
    n=st.integers(4, 300),
    c=st.integers(2, 9),
    several=st.booleans(),
    seed=st.integers(0, 5),
    spec=st.sampled_from([None, "all", "1-per-class", "0.2"]),
    unseen=st.sampled_from(["", "0,1", "[2-9]", "1"]),
)
def test_transfer_trains_on_seen_classes_and_searches_the_others(
    n: int, c: int, several: bool, seed: int, spec: str | None, unseen: str
) -> None:
    """Item by item, from the labels as plain sets."""
    single = Labels.from_ids(np.random.default_rng(seed).integers(-1, c, n), [str(k) for k in range(c)])
    labels = multi(n, c, seed) if several else single
    refusal = ""
    try:
        split = transfer(labels, seed, spec, unseen)
    except (DataError, UsageError) as error:
        refusal = str(error)
    if refusal:
        assert re.search(
            "too few|no labelled item|lower it|lower --labelled|two classes|no class is called|of the classes",
            refusal,
        )
        return
    classes = [set(np.flatnonzero(row)) for row in labels.dense(np.arange(n), bool)]
    present = set().union(*classes)
    assert split.seen_classes is not None
    seen = set(split.seen_classes)
    hidden = present - seen
    assert seen
    assert hidden
    assert seen <= present
    if not unseen:
        assert len(hidden) == min(len(present) - 1, int(np.ceil(0.25 * len(present) - 1e-6)))
    else:
        assert hidden == {k for k in present if re.fullmatch(unseen.replace(",", "|"), str(k))}
    roles: dict[int, set[str]] = {i: set() for i in range(n)}
    for role in ("query", "labelled", "unlabelled", "database"):
        for i in getattr(split, role):
            roles[int(i)].add(role)
    for of_item, role_of_item in zip(classes, roles.values(), strict=True):
        if not of_item:
            assert role_of_item == set(), "it may be of an unseen class"
        elif of_item & hidden:
            assert role_of_item in ({"query"}, {"database"})
        else:
            assert role_of_item in ({"labelled"}, {"unlabelled"})
    assert abs(len(split.query) - len(split.database)) <= len(hidden), "halves"
    if spec in (None, "all"):
        assert not len(split.unlabelled)
    view = split.training_labels(labels)
    assert view.class_names == tuple(labels.class_names[k] for k in sorted(seen))
    assert view.counts().min() > 0
    assert split.hash == transfer(labels, seed, spec, unseen).hash


def test_transfer_and_protocol2_of_a_seed_have_the_same_queries() -> None:
    split = transfer(CIFAR, 3)
    assert sizes(split) == (9000, 42_000, 0, 9000)
    assert sizes(transfer(CIFAR, 3, "500-per-class")) == (9000, 3500, 38_500, 9000)
    for labels in (CIFAR, multi()):
        one, two = transfer(labels, 3), protocol2(labels, 3)
        assert one.seen_classes == two.seen_classes
        np.testing.assert_array_equal(one.query, two.query)
        assert np.isin(one.database, two.database).all()
        assert np.isin(two.labelled, one.labelled).all()
    assert transfer(CIFAR, 0).hash != transfer(CIFAR, 1).hash


def test_unseen_classes_by_name() -> None:
    names = ["Balinese-01", "Balinese-02", "Latin-01", "Latin-02", "N_Ko"]
    labels = Labels.from_ids(np.arange(100) % 5, names)
    for spec, seen in (("Balinese-*", (2, 3, 4)), ("Latin-?1, N_Ko,", (0, 1, 3)), ("[BL]*", (4,))):
        split = transfer(labels, 0, None, spec)
        assert split.seen_classes == seen
        assert split.name == f"transfer:{spec}"
    for spec, message in (
        ("balinese-*", r"no class is called 'balinese-\*': the 5 classes are Balinese-01, .*N_Ko$"),
        ("*", "some are not"),
        ("0.5", "no class is called '0.5'"),
    ):
        with pytest.raises(UsageError, match=message):
            transfer(labels, 0, None, spec)
    with pytest.raises(UsageError, match="some of the classes with items are named"):
        transfer(Labels.from_ids(np.arange(100) % 5, [*names, "Tifinagh-01"]), 0, None, "Tifinagh-01")
    with pytest.raises(DataError, match="two classes"):
        transfer(Labels.from_ids(np.zeros(10, int)))
    with pytest.raises(DataError, match="too few for protocol transfer"):
        transfer(Labels.from_ids([0, 1]))


def test_the_training_sees_no_hidden_label() -> None:
    """Scrambled labels of everything but the labelled items give the same view."""
    for labels, split in [
        (multi(), protocol1(multi(), 0, "20-per-class")),
        (multi(), protocol2(multi())),
        (multi(), transfer(multi(), 0, "5-per-class")),
    ]:
        packed = labels.packed.copy()
        others = np.setdiff1d(np.arange(len(labels)), split.labelled)
        packed[others] = np.random.default_rng(1).permutation(packed[others])
        scrambled = Labels(packed, labels.class_names)
        one, two = split.training_labels(labels), split.training_labels(scrambled)
        np.testing.assert_array_equal(one.packed, two.packed)


def test_files_of_ids_or_rows(tmp_path: Path) -> None:
    ids = np.array([100, 50, 7, 900, 3])
    (tmp_path / "ids.txt").write_text("900\n7  # a comment\n\n7\n")
    np.testing.assert_array_equal(read_rows(tmp_path / "ids.txt", ids), [2, 3])
    np.save(tmp_path / "rows.npy", np.array([4, 0], np.uint8))
    np.testing.assert_array_equal(read_rows(tmp_path / "rows.npy", ids), [0, 4])
    np.save(tmp_path / "float.npy", np.array([0.5]))
    np.save(tmp_path / "empty.npy", np.array([], np.int64))
    (tmp_path / "far.txt").write_text("3\n5000\n")
    (tmp_path / "words.txt").write_text("three\n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    for name, message in [
        ("far.txt", "5000 is neither an id of the data nor a row number below 5"),
        ("float.npy", "float64"),
        ("empty.npy", "no number"),
        ("words.txt", "not a list of ids"),
        ("binary.txt", "not a list of ids"),
        ("none.txt", "not found"),
    ]:
        with pytest.raises(DataError, match=message) as caught:
            read_rows(tmp_path / name, ids)
        assert "\n" not in str(caught.value)


def test_a_labelled_file_is_kept_and_is_never_a_query(tmp_path: Path) -> None:
    labels = Labels.from_ids(np.arange(600) % 3)
    chosen = np.arange(0, 600, 2)
    np.save(tmp_path / "l.npy", chosen)
    split = protocol1(labels, 0, str(tmp_path / "l.npy"))
    np.testing.assert_array_equal(split.labelled, chosen)
    assert len(split.query) == 30
    np.save(tmp_path / "q.npy", [1, 3, 5])
    np.testing.assert_array_equal(protocol1(labels, 0, "2-per-class", tmp_path / "q.npy").query, [1, 3, 5])
    np.save(tmp_path / "q.npy", [1, 2, 5])
    with pytest.raises(DataError, match=r"row 2 cannot be used \(queries\)"):
        protocol1(labels, 0, str(tmp_path / "l.npy"), tmp_path / "q.npy")
    np.save(tmp_path / "l.npy", np.arange(0, 600, 3))
    with pytest.raises(DataError, match="no labelled item for class '1'"):
        protocol1(labels, 0, str(tmp_path / "l.npy"))
    bare = labels.masked(np.arange(1, 600))
    with pytest.raises(DataError, match="row 0 has no label"):
        protocol1(bare, 0, str(tmp_path / "l.npy"))
    np.save(tmp_path / "q.npy", [0, 1])
    with pytest.raises(DataError, match="row 0 has no label"):
        protocol1(bare, 0, None, tmp_path / "q.npy")


@pytest.mark.parametrize("spec", ["500", "0", "-0.5", "0-per-class", "nan", "1.5", "200%"])
def test_labelled_numbers_that_cannot_be(spec: str) -> None:
    with pytest.raises(UsageError, match="write N-per-class"):
        protocol1(CIFAR, 0, spec)


def test_too_few_items_say_what_to_lower() -> None:
    labels = Labels.from_ids(np.repeat([0, 1], [1000, 12]), ["cat", "dog"])
    with pytest.raises(
        DataError, match=r"class 'dog' has 12 items.*500-per-class needs 500.*lower --labelled"
    ):
        protocol1(labels, 0, "500-per-class")
    with pytest.raises(DataError, match=r"class 'dog' has 12 items.*100 queries"):
        protocol1(labels, 0, None, 100)
    with pytest.raises(DataError, match="too few to set queries apart"):
        protocol1(Labels.from_ids([0, 1, 1]))
    with pytest.raises(DataError, match="no labelled item for class 'fox'"):
        protocol1(Labels.from_ids(np.repeat([0, 1], 100), ["cat", "dog", "fox"]))
    with pytest.raises(DataError, match="two classes"):
        protocol2(Labels.from_ids(np.zeros(10, int)))
    with pytest.raises(UsageError, match="at least 1"):
        protocol1(labels, 0, None, 0)


def test_make_split_by_name() -> None:
    digits = open_digits()
    assert sizes(make_split(digits))[0] == 100  # ten of each digit
    assert make_split(digits, "2").name == "2"
    by_name = make_split(digits, "transfer:8,9", labelled="5-per-class")
    assert (by_name.name, by_name.seen_classes, len(by_name.labelled)) == (
        "transfer:8,9",
        tuple(range(8)),
        40,
    )
    assert len(make_split(digits, "none", labelled="10-per-class").query) == 0
    for name in ("3", "transfer:", "transfer: ,", "1:0.5", "none:x"):
        with pytest.raises(UsageError, match=f"protocol '?{name}"):
            make_split(digits, name)
    with pytest.raises(UsageError, match="queries"):
        make_split(digits, "2", queries=5)
    with pytest.raises(DataError, match="digits: class"):
        make_split(digits, labelled="5000-per-class")
    with pytest.raises(UsageError, match="seed"):
        make_split(digits, seed=-1)


def test_a_split_travels_as_a_file(tmp_path: Path) -> None:
    path = tmp_path / "split.json"
    for split in (protocol1(CIFAR, 5), protocol2(multi(), 2)):
        split.save(path)
        again = load_split(path)
        assert again.hash == split.hash
        assert (again.name, again.seed, again.n, again.seen_classes, again.notes) == (
            split.name, split.seed, split.n, split.seen_classes, split.notes,
        )  # fmt: skip
        for role in ("query", "labelled", "unlabelled", "database"):
            np.testing.assert_array_equal(getattr(again, role), getattr(split, role))
    assert path.stat().st_size < 3000
    good = json.loads(path.read_text())
    damages = {"n": 99, "roles": "AAAA", "hash": "0" * 16, "seed": "x", "split_format": 9}
    bad = [{**good, key: value} for key, value in damages.items()] + [
        {**good, "roles": "eJxjYWFhAQAAPgAe"},
        {},
        [],
    ]
    for value in bad + [{k: v for k, v in good.items() if k != key} for key in good if key != "sizes"]:
        path.write_text(json.dumps(value))
        with pytest.raises(DataError, match=r"split\.json"):
            load_split(path)


def test_overlap_is_refused() -> None:
    one = np.array([1], np.int64)
    none = np.empty(0, np.int64)
    with pytest.raises(DataError, match="row 1 in query and labelled"):
        Split(3, one, one, none, none, "x", 0)
    with pytest.raises(DataError, match="row 1 in labelled and database"):
        Split(3, none, one, none, one, "x", 0)
    with pytest.raises(DataError, match="sorted"):
        Split(3, np.array([2, 1]), none, none, none, "x", 0)
    with pytest.raises(DataError, match="below 3"):
        Split(3, np.array([3]), none, none, none, "x", 0)
