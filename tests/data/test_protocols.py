"""protocols: exact sizes, disjoint roles, the same split for the same seed, and nothing learnt from
hidden labels.
"""

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import save

from gpq_faiss.data.labels import Labels
from gpq_faiss.data.open import open_data
from gpq_faiss.data.protocols import load_split, make_split
from gpq_faiss.errors import DataError, GpqError
from gpq_faiss.ids import read_rows

CIFAR = Labels.from_ids(np.random.default_rng(0).permutation(np.repeat(np.arange(10), 6000)))
FEW = Labels.from_ids(np.repeat([0, 1], [1000, 12]), ["cat", "dog"])
NO_FOX = Labels.from_ids(np.repeat([0, 1], 100), ["cat", "dog", "fox"])
TYPES = Labels.from_ids(np.arange(100) % 5)
ONE = Labels.from_ids(np.zeros(1000, int))
ROLES = ("query", "labelled", "unlabelled", "database")


def sizes(split):
    return tuple(len(getattr(split, role)) for role in ROLES)


def random_labels(n=3000, c=9, seed=0, several=True):
    """Classes from rare to common; some items have no label."""
    rng = np.random.default_rng(seed)
    if several:
        return Labels.from_multihot(rng.random((n, c)) < np.linspace(0.05, 0.4, c))
    return Labels.from_ids(rng.integers(-1, c, n), [str(k) for k in range(c)])


def test_cifar_sizes_are_the_papers():
    protocol1, protocol2 = make_split(CIFAR), make_split(CIFAR, "2")
    assert sizes(protocol1) == (1000, 5000, 54_000, 54_000)
    assert set(CIFAR.take(protocol1.query).counts()) == {100}
    assert set(CIFAR.take(protocol1.labelled).counts()) == {500}
    assert sizes(protocol2) == (9000, 21_000, 30_000, 30_000)
    assert sorted(CIFAR.take(protocol2.query).counts()) == [0] * 7 + [3000] * 3
    assert sorted(CIFAR.take(protocol2.labelled).counts()) == [0] * 3 + [3000] * 7


REFUSALS = "too few|no labelled item|lower it"


@settings(max_examples=150, deadline=None)
@given(
    n=st.integers(4, 400),
    c=st.integers(2, 9),
    several=st.booleans(),
    seed=st.integers(0, 5),
    protocol=st.sampled_from(["1", "2", "transfer", "none"]),
    spec=st.sampled_from([None, "all", "1-per-class", "0.1", "1.0"]),
)
def test_roles(n, c, several, seed, protocol, spec):
    """Disjoint and complete; transfer item by item, from the labels as plain sets."""
    labels = random_labels(n, c, seed, several)
    try:
        split = make_split(labels, protocol, seed=seed, labelled=spec)
    except GpqError as error:
        assert re.search(REFUSALS, str(error))  # noqa: PT017
        return
    with_labels = set(np.flatnonzero(labels.has()))
    query, labelled, unlabelled, database = (set(getattr(split, role).tolist()) for role in ROLES)
    assert not query & (labelled | unlabelled | database) | labelled & (unlabelled | database)
    assert (query | labelled | database) <= with_labels
    view = split.training_labels(labels)
    assert set(np.flatnonzero(view.has())) == labelled
    assert view.counts().min() > 0
    assert split.hash == make_split(labels, protocol, seed=seed, labelled=spec).hash
    packed, hidden_rows = labels.packed.copy(), sorted(set(range(n)) - labelled)
    packed[hidden_rows] = np.random.default_rng(1).permutation(packed[hidden_rows])
    scrambled = split.training_labels(Labels(packed, labels.class_names))
    np.testing.assert_array_equal(
        scrambled.packed, view.packed, "the training sees no hidden label"
    )
    if protocol != "transfer":
        assert database <= unlabelled
        assert query | labelled | unlabelled == set(range(n))
        assert protocol == "2" or database == unlabelled & with_labels
        return
    classes = [set(np.flatnonzero(row)) for row in labels.dense(dtype=bool)]
    present, seen_classes = set().union(*classes), set(split.seen_classes or ())
    hidden = present - seen_classes
    assert set() < seen_classes < present
    assert view.class_names == tuple(labels.class_names[k] for k in sorted(seen_classes))
    assert len(hidden) == min(len(present) - 1, int(np.ceil(0.25 * len(present) - 1e-6)))
    for i, of_item in enumerate(classes):
        if not of_item:
            assert i not in query | database | labelled | unlabelled, "it may be of an unseen class"
        else:  # the roles are disjoint
            assert i in (query | database if of_item & hidden else labelled | unlabelled)
    assert abs(len(query) - len(database)) <= len(hidden), "halves"
    assert spec not in (None, "all") or not unlabelled


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("ids.txt", b"900\n7  # a comment\n\n7\n"),
        ("ids.npy", np.array([7, 900], np.uint16)),
    ],
)
def test_files_of_ids(tmp_path, name, content):
    file = save(tmp_path / name, content)
    ids = np.array([100, 50, 7, 900, 3])
    assert read_rows(file, ids, "--labelled", ids > 0).tolist() == [2, 3]


def test_files_of_labelled_items_and_of_queries(tmp_path):
    labels = Labels.from_ids(np.arange(600) % 3)
    labelled = save(tmp_path / "l.npy", np.arange(0, 600, 2))
    queries = save(tmp_path / "q.npy", np.array([1, 3, 5]))
    split = make_split(labels, labelled=str(labelled), queries=queries)
    np.testing.assert_array_equal(split.labelled, np.arange(0, 600, 2))
    np.testing.assert_array_equal(split.query, [1, 3, 5])
    save(queries, np.array([1, 2, 5]))
    with pytest.raises(DataError, match=r"the ids \[2\] .* have another role"):
        make_split(labels, labelled=str(labelled), queries=queries)
    with pytest.raises(DataError, match=r"the ids \[5\] .* unlabelled"):
        make_split(labels.masked(np.arange(4)), queries=queries)


@pytest.mark.parametrize(
    ("data", "protocol", "options", "message"),
    [
        *[
            (ONE, "1", {"labelled": x}, "write N-per-class")
            for x in ("500", "0-per-class", "200%", 0.0)
        ],
        (ONE, "3", {}, "protocol 3, .*: the protocols are 1, 2, transfer, none"),
        (ONE, "1", {"seed": -1}, "seed -1: .* not negative"),
        (
            FEW,
            "1",
            {"labelled": "500-per-class"},
            r"class 'dog' has 12 items, 11 can be drawn: --labelled 500-per-class needs more",
        ),
        (
            FEW,
            "1",
            {"queries": 100},
            r"class 'dog' has 12 items, 12 can be drawn: --queries 100-per-class needs more",
        ),
        (FEW, "1", {"queries": 0}, "--queries 0-per-class: write N-per-class"),
        (open_data("digits"), "1", {"labelled": "5000-per-class"}, "digits: class"),
        (
            Labels.from_ids([0, 1, 1]),
            "1",
            {},
            "3 labelled items of 2 classes are too few for queries",
        ),
        (open_data(np.ones((9, 2))), "1", {}, "^array: no item has a label"),
        (NO_FOX, "1", {}, "no labelled item for class 'fox'"),
        (
            Labels.from_ids(np.arange(1, 6).repeat(20)),
            "1",
            {},
            "for class '0' of 0 items: .*number classes 0, 1, 2",
        ),
        (ONE, "2", {}, "1,000 labelled items of 1 classes are too few for queries of protocol 2"),
        (Labels.from_ids([0, 1]), "transfer", {}, "too few for queries of protocol transfer"),
    ],
)
def test_what_cannot_be_split(data, protocol, options, message):
    with pytest.raises(GpqError, match=message):
        make_split(data, protocol, **options)


@pytest.mark.parametrize(
    "split", [make_split(CIFAR, seed=5), make_split(random_labels(), "2", seed=2)]
)
def test_a_split_travels_as_a_file(tmp_path, split):
    split.save(tmp_path / "split.json")
    loaded = load_split(tmp_path / "split.json")
    for name in ("hash", "name", "seed", "n", "seen_classes"):
        assert getattr(loaded, name) == getattr(split, name)
    for role in ROLES:
        np.testing.assert_array_equal(getattr(loaded, role), getattr(split, role))


@pytest.mark.parametrize("change", [{"query": "x"}, {"labelled": 3}, {"seen_classes": 3}])
def test_a_damaged_split_is_refused(tmp_path, change):
    path = tmp_path / "split.json"
    make_split(TYPES).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match=r"split\.json"):
        load_split(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("far.txt", b"3\n5000\n", r"the ids \[5000\] .1 of 2. are unknown"),
        ("float.npy", np.array([0.5]), "float64"),
        ("empty.npy", np.array([], np.int64), "0 of 0"),
        ("words.txt", b"three\n", "expected ids"),
    ],
)
def test_wrong_files_of_ids_are_refused(tmp_path, name, content, message):
    file = save(tmp_path / name, content)
    with pytest.raises(DataError, match=message):
        read_rows(file, np.arange(4), "--labelled", np.ones(4, dtype=bool))


def test_transfer_and_protocol2_share_queries():
    assert sizes(make_split(CIFAR, "transfer", seed=3)) == (9000, 42_000, 0, 9000)
    for labels in (CIFAR, random_labels()):
        transfer, protocol2 = (
            make_split(labels, protocol, seed=3) for protocol in ("transfer", "2")
        )
        np.testing.assert_array_equal(transfer.query, protocol2.query)
        assert np.isin(transfer.database, protocol2.database).all()


def test_more_labels_keep_queries_and_earlier_labels():
    small, large = (make_split(CIFAR, seed=3, labelled=spec) for spec in ("10-per-class", "5%"))
    np.testing.assert_array_equal(small.query, large.query)
    assert np.isin(small.labelled, large.labelled).all()
