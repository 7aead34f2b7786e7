"""The fast engine against the plain metrics on full relevance matrices, whatever the data and the options."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.evaluation.grouping import Relevance, distinct_rows, label_rows
from gpq_faiss.evaluation.metrics import (
    RECALL_LEVELS,
    average_precision,
    pr_curve,
    precision_at_k,
    recall_at_k,
)
from gpq_faiss.evaluation.ranking import measure_codes, rank_codes, rank_features, rank_scores

SETTINGS = settings(max_examples=40, deadline=None)
KS = [1, 3, 10, 500]


def problem(seed, *, n=70, q=9, m=3, size=4, classes=5, multi=False, whole=True):
    """Random codes, tables and labels with many ties; whole-number tables make all sums exact in any
    order."""
    r = np.random.default_rng(seed)
    codes = r.integers(0, size, (n, m)).astype(np.uint8)
    tables = r.integers(-3, 4, (q, m, size)) if whole else r.standard_normal((q, m, size))
    if multi:
        yq, yb = r.random((q, classes)) < 0.3, r.random((n, classes)) < 0.3
        relevant = (yq.astype(int) @ yb.T.astype(int)) > 0
    else:
        yq, yb = r.integers(-1, classes, q), r.integers(-1, classes, n)
        relevant = (yq[:, None] == yb[None, :]) & (yq >= 0)[:, None]
    return tables.astype(np.float32), codes, yq, yb, relevant


def brute_scores(tables, codes):
    return sum(tables[:, m, codes[:, m]].astype(np.float64) for m in range(codes.shape[1])).astype(np.float32)


def check(result, scores, relevant, *, ties="expected", k=None, denominator="relevant"):
    wanted = average_precision(scores, relevant, ties=ties, k=k, denominator=denominator)
    assert result.ap == pytest.approx(wanted.values, abs=1e-11)
    assert result.map == pytest.approx(wanted.mean, abs=1e-11)
    assert result.queries_without_relevant == wanted.without_relevant
    assert result.convention == wanted.convention
    p, r = precision_at_k(scores, relevant, KS, ties=ties), recall_at_k(scores, relevant, KS, ties=ties)
    assert list(result.precision.values()) == pytest.approx(p.values.mean(axis=0))
    assert list(result.recall.values()) == pytest.approx(r.values.mean(axis=0))
    curve = pr_curve(scores, relevant, ties=ties)
    assert result.pr_precision == pytest.approx(curve.precision.mean(axis=0))


@SETTINGS
@given(
    st.integers(0, 2**32),
    st.booleans(),
    st.sampled_from(["expected", "id", "best", "worst"]),
    st.sampled_from([2, 4]),  # few codes are sorted by code, many by item
    st.sampled_from([(None, "relevant"), (7, "min(k, relevant)"), (7, "relevant-in-top-k"), (7, "relevant")]),
)
def test_equals_the_plain_metrics(seed, multi, ties, size, cut):
    tables, codes, yq, yb, relevant = problem(seed, multi=multi, size=size)
    k, denominator = cut
    options = {"ties": ties, "k": k, "denominator": denominator, "ks": KS, "levels": RECALL_LEVELS}
    result = rank_codes(tables, codes, yq, yb, **options)
    scores = brute_scores(tables, codes)
    check(result, scores, relevant, ties=ties, k=k, denominator=denominator)
    assert result.n_distinct == len(np.unique(codes, axis=0))
    assert (result.n_queries, result.n_database) == (len(tables), len(codes))
    again = rank_scores(scores, yq, yb, **options)
    assert again.ap == pytest.approx(result.ap, abs=1e-12)


@SETTINGS
@given(st.integers(0, 2**32), st.sampled_from([2, 4]), st.sampled_from(["expected", "id"]))
def test_leave_one_out_and_a_part_of_the_database(seed, size, ties):
    tables, codes, yq, yb, relevant = problem(seed, size=size)
    r = np.random.default_rng(seed)
    rows = r.permutation(len(codes))[:40]
    exclude = r.integers(-1, len(codes), len(yq))
    result = rank_codes(tables, codes, yq, yb, ties=ties, rows=rows, exclude=exclude)
    scores = brute_scores(tables, codes)
    for i in range(len(yq)):
        keep = np.sort(rows[rows != exclude[i]])
        wanted = average_precision(scores[i, keep], relevant[i, keep], ties=ties).values[0]
        assert result.ap[i] == pytest.approx(wanted, abs=1e-12)
    floats = rank_scores(scores, yq, yb, ties=ties, rows=rows, exclude=exclude)
    assert floats.ap == pytest.approx(result.ap, abs=1e-12)


@pytest.mark.parametrize(
    ("m", "size"), [(3, 16), (12, 16), (5, 4), (2, 256), (7, 8), (1, 16), (3, 1), (1, 1)]
)
def test_real_valued_tables_of_every_shape(m, size):
    tables, codes, yq, yb, relevant = problem(1, n=900, q=40, m=m, size=size, whole=False)
    codes[100:200] = codes[:100]
    result = rank_codes(tables, codes, yq, yb, ks=KS, levels=RECALL_LEVELS)
    # the promised scores, spelled out: exact sums of the tables rounded to 2^-29 of what a score can reach
    unit = np.exp2(np.ceil(np.log2(np.abs(tables).max(axis=2).sum(axis=1))) - 29)[:, None]
    parts = [np.rint(tables[:, c, codes[:, c]].astype(np.float64) / unit) for c in range(m)]
    scores = np.sum(parts, axis=0)
    float32 = brute_scores(tables, codes)
    assert np.abs(scores * unit - float32).max() <= 1e-6 * np.abs(float32).max()
    check(result, scores, relevant)


def test_threads_and_memory_do_not_change_a_bit():
    tables, codes, yq, yb, _ = problem(2, n=3000, q=700, m=4, size=16, whole=False)
    one = rank_codes(tables, codes, yq, yb, ks=[5], levels=[0.5])
    for options in ({"threads": 3}, {"memory": 1}, {"threads": 2, "memory": 3 << 20}):
        other = rank_codes(tables, codes, yq, yb, ks=[5], levels=[0.5], **options)
        assert (other.ap == one.ap).all()
        assert other.as_dict() == one.as_dict()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    form=st.sampled_from([(2, 2), (2, 4), (3, 4), (4, 16)]),  # few codes are sorted by code, many by item
    spread=st.sampled_from([1, 3, 1000]),  # nearly all scores tie, some do, hardly any do
    share=st.sampled_from([0.0, 0.03, 0.3, 0.9]),
    leave_out=st.booleans(),
    itself=st.booleans(),
)
def test_average_precision_is_that_of_the_whole_relevance_matrix(
    seed, form, spread, share, leave_out, itself
):
    """Labels of several classes, unlabelled rows, the query itself left out, ties: the full ranking's expected value."""
    m, size = form
    r = np.random.default_rng(seed)
    n, classes = int(r.integers(1, 160)), int(r.integers(1, 70))  # more than 64 classes take two words
    codes = r.integers(0, size, (n, m)).astype(np.uint8)
    yb = r.random((n, classes)) < share
    yb[r.random(n) < 0.2] = False
    if itself:
        rows = r.integers(0, n, 11)
        yq = yb[rows]
    else:
        rows, yq = r.integers(-1, n, 11), r.random((11, classes)) < share
    tables = r.integers(-spread, spread + 1, (11, m, size)).astype(np.float32)
    options = {"exclude": rows} if leave_out else {}
    result = rank_codes(tables, codes, yq, yb, **options)
    scores, relevant = brute_scores(tables, codes), (yq.astype(int) @ yb.T.astype(int)) > 0
    for i, row in enumerate(rows):
        keep = np.arange(n) != row if leave_out else np.ones(n, dtype=bool)
        wanted = average_precision(scores[i, keep], relevant[i, keep]).values[0] if keep.any() else 0.0
        assert result.ap[i] == pytest.approx(wanted, abs=1e-13)
    two = rank_codes(tables, codes, yq, yb, threads=2, **options)
    assert (two.ap == result.ap).all()
    floats = rank_scores(scores, yq, yb, **options)
    assert floats.ap == pytest.approx(result.ap, abs=1e-13)
    # The tie groups, which the measures at k come from, tell the same.
    listed = rank_codes(tables, codes, yq, yb, k=n + 1, **options)
    assert listed.ap == pytest.approx(result.ap, abs=1e-13)
    assert listed.queries_without_relevant == result.queries_without_relevant


@pytest.mark.parametrize(("m", "size", "n"), [(3, 16, 30_000), (12, 16, 9000), (5, 16, 20_000)])
def test_many_codes_and_threads_give_the_same_bits(m, size, n):
    """Databases wide enough for every way of looking up, sorted by code and by item, in blocks of every size."""
    r = np.random.default_rng(m)
    codes = r.integers(0, size, (n, m)).astype(np.uint8)
    codes[: n // 10] = codes[n // 10 : 2 * (n // 10)]
    tables = r.standard_normal((300, m, size)).astype(np.float32)
    yq, yb = r.random((300, 9)) < 0.2, r.random((n, 9)) < 0.2
    one = rank_codes(tables, codes, yq, yb)
    for options in ({"threads": 2}, {"memory": 1}, {"threads": 2, "memory": 5 << 20}):
        assert (rank_codes(tables, codes, yq, yb, **options).ap == one.ap).all()
    some = slice(0, 300, 60)
    unit = np.exp2(np.ceil(np.log2(np.abs(tables[some]).max(axis=2).sum(axis=1))) - 29)[:, None]
    scores = np.sum(
        [np.rint(tables[some][:, c, codes[:, c]].astype(np.float64) / unit) for c in range(m)], axis=0
    )
    wanted = average_precision(scores, (yq[some].astype(int) @ yb.T.astype(int)) > 0)
    assert one.ap[some] == pytest.approx(wanted.values, abs=1e-13)
    assert (rank_codes(tables, codes, yq, yb, ks=[1, 10], levels=[0.5]).ap == one.ap).all()


def test_negative_and_zero_scores_tie_and_sort_as_they_should():
    scores = np.array([[0.0, -0.0, -1.0, 1.0, -1e-40, 1e-40, -1.0, 3e38]], dtype=np.float32)
    relevant = np.array([[1, 0, 1, 0, 1, 0, 0, 1]], dtype=bool)
    for ties in ("expected", "id", "best", "worst"):
        result = rank_scores(scores, np.array([0]), np.where(relevant[0], 0, 1), ties=ties)
        assert result.ap == pytest.approx(average_precision(scores, relevant, ties=ties).values, abs=1e-14)


def test_order_of_ids_is_that_of_the_ids_given():
    scores, labels = np.array([[1, -2, -2, -2]], dtype=np.float32), np.array([1, 0, 1, 1])
    for ids in ([1, 2, 3, 4], [4, 3, 2, 1], [9, -5, 70, 2]):
        result = rank_scores(scores, np.array([0]), labels, ties="id", ids=ids)
        wanted = average_precision(scores, (labels == 0)[None], ties="id", ids=ids)
        assert result.ap == pytest.approx(wanted.values)


def test_a_score_function_sees_distinct_codes_and_blocks_of_queries():
    r = np.random.default_rng(3)
    codes, queries = (
        r.integers(0, 256, (300, 2)).astype(np.uint8),
        r.integers(0, 256, (50, 2)).astype(np.uint8),
    )
    codes[150:] = codes[:150]
    yq, yb = r.integers(0, 4, 50), r.integers(0, 4, 300)
    widths = set()

    def hamming(rows, distinct):
        widths.add(len(distinct))
        return -np.bitwise_count(queries[rows][:, None] ^ distinct[None]).sum(axis=2, dtype=np.int64)

    result = rank_codes(hamming, codes, yq, yb)
    full = -np.bitwise_count(queries[:, None] ^ codes[None]).sum(axis=2, dtype=np.int64)
    assert result.ap == pytest.approx(average_precision(full, yq[:, None] == yb[None]).values)
    assert widths == {len(np.unique(codes, axis=0))}


def test_exact_features_rank_by_inner_product():
    r = np.random.default_rng(4)
    xq, xb = r.standard_normal((20, 8)).astype(np.float32), r.standard_normal((200, 8)).astype(np.float32)
    yq, yb = r.integers(0, 3, 20), r.integers(0, 3, 200)
    result = rank_features(xq, xb, yq, yb)
    assert result.map == pytest.approx(average_precision(xq @ xb.T, yq[:, None] == yb[None]).mean)


def test_labels_in_every_form_mean_the_same():
    tables, codes, yq, yb, _ = problem(5, multi=True, classes=11)
    wanted = rank_codes(tables, codes, yq, yb)

    class Packed:
        def __init__(self, dense):
            self.packed = np.packbits(dense, axis=1)

    assert (rank_codes(tables, codes, Packed(yq), Packed(yb)).ap == wanted.ap).all()
    assert (rank_codes(tables, codes, np.packbits(yq, axis=1), yb).ap == wanted.ap).all()


def test_unlabelled_queries_and_items_are_relevant_to_nothing():
    tables, codes, _, _, _ = problem(6, n=6, q=2)
    result = rank_codes(tables, codes, np.array([-1, 1]), np.array([-1, -1, -1, 0, 0, 0]))
    assert result.map == 0
    assert result.queries_without_relevant == 2
    assert "2 of 2 queries" in result.notes[0]


@SETTINGS
@given(st.integers(0, 2**32), st.integers(1, 19), st.integers(0, 60))
def test_distinct_rows_are_those_of_numpy(seed, width, n):
    rows = np.random.default_rng(seed).integers(0, 2, (n, width)).astype(np.uint8)
    distinct, inverse = distinct_rows(rows)
    wanted = np.unique(rows, axis=0)
    assert (distinct == wanted).all()
    assert (distinct[inverse] == rows).all()


@SETTINGS
@given(st.integers(0, 2**32))
def test_relevance_counts_items_that_share_a_label(seed):
    r = np.random.default_rng(seed)
    dense, code_of = r.random((50, 9)) < 0.2, r.integers(0, 6, 50)
    relevance = Relevance.count(label_rows(dense, "labels", 50), code_of, 6)
    query = r.random(9) < 0.3
    wanted = np.bincount(code_of[(dense & query).any(axis=1)], minlength=6)
    assert (relevance.hits(np.packbits(query)) == wanted).all()


def test_bad_input_is_refused_in_one_line():
    tables, codes, yq, yb, _ = problem(7)
    broken = tables.copy()
    broken[1, 2, 3] = np.nan
    huge = np.full_like(tables, 3e38)
    cases = [
        (UsageError, lambda: rank_codes(tables, codes[:, :2], yq, yb)),
        (UsageError, lambda: rank_codes(tables, codes, yq, yb, ties="any")),
        (UsageError, lambda: rank_codes(tables, codes, yq, yb, ks=[0])),
        (UsageError, lambda: rank_codes(tables, codes, yq, yb, threads=0)),
        (UsageError, lambda: rank_scores(np.full((9, 70), 0.1), yq, yb)),
        (DataError, lambda: rank_codes(broken, codes, yq, yb)),
        (DataError, lambda: rank_codes(huge, codes, yq, yb)),
        (DataError, lambda: rank_codes(tables, codes + 4, yq, yb)),
        (DataError, lambda: rank_codes(tables, codes.astype(int), yq, yb)),
        (DataError, lambda: rank_codes(tables, codes, yq[:-1], yb)),
        (DataError, lambda: rank_codes(tables, codes, yq, yb[:-1])),
        (DataError, lambda: rank_codes(tables, codes, yq, yb - 5)),
        (DataError, lambda: rank_codes(tables, codes, yq, yb, rows=[70])),
        (DataError, lambda: rank_codes(tables, codes, yq, yb, rows=[1, 1])),
        (DataError, lambda: rank_codes(tables, codes, yq, yb, rows=[])),
        (DataError, lambda: rank_codes(tables, codes, yq, yb, exclude=[0])),
        (DataError, lambda: rank_codes(tables, codes, yq, yb, ties="id", ids=np.zeros(70, dtype=int))),
        (DataError, lambda: rank_codes(lambda q, c: np.zeros((1, 1)), codes, yq, yb)),
        (DataError, lambda: rank_scores(np.full((9, 70), np.inf, dtype=np.float32), yq, yb)),
        (DataError, lambda: rank_features(np.zeros((9, 3)), np.zeros((70, 4)), yq, yb)),
    ]
    for error, call in cases:
        with pytest.raises(error) as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scores": np.zeros((2, 4), np.float32)}, "must be \\[queries, 3 database items\\]"),
        ({"scores": lambda q: np.zeros((len(q), 4), np.float32)}, "expected \\(2, 3\\)"),
        ({"ids": [1, 2]}, "ids must be 3 integers"),
        ({"exclude": [0, 3]}, "exclude names rows outside"),
        ({"exclude": [0]}, "exclude must be 2 database rows"),
        ({"query_labels": np.array([0.5, 1.0])}, "1-D labels must be class numbers"),
        ({"database_labels": np.array([0, 1 << 40, 0])}, "too many to pack"),
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(arguments: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "scores": np.zeros((2, 3), np.float32),
        "query_labels": [0, 1],
        "database_labels": [0, 1, 0],
        "ties": "id",
    }
    with pytest.raises(DataError, match=message):
        rank_scores(**{**given, **arguments})


def test_a_mask_of_rows_counts_as_their_numbers() -> None:
    scores = np.array([[3.0, 2.0, 1.0, 0.0]], np.float32)
    by_mask = rank_scores(scores, [1], [0, 1, 0, 1], rows=np.array([False, True, True, True]))
    assert by_mask.map == rank_scores(scores, [1], [0, 1, 0, 1], rows=[1, 2, 3]).map == (1 + 2 / 3) / 2


@pytest.mark.parametrize("ties", ["expected", "id"])
@pytest.mark.parametrize("k", [None, 20])
def test_tasks_that_are_measured_apart_give_the_same_bits(ties, k):
    rng = np.random.default_rng(5)
    tables = rng.normal(size=(300, 3, 16)).astype(np.float32)
    codes = rng.integers(0, 16, (500, 3), np.uint8)
    query_labels, labels = rng.integers(0, 4, 300), rng.integers(0, 4, 500)
    options = {"ties": ties, "k": k, "denominator": "relevant", "ks": (1, 50), "levels": RECALL_LEVELS}
    whole = rank_codes(tables, codes, query_labels, labels, **options)
    asked = []

    def spread(tasks):
        asked.extend(tasks)
        apart = {
            t: measure_codes(tables, codes, query_labels, labels, options, [t])[0] for t in reversed(tasks)
        }
        return [apart[t] for t in tasks]

    parts = rank_codes(tables, codes, query_labels, labels, **options, spread=spread)
    assert len(asked) > 2
    assert parts.as_dict() == whole.as_dict()
    np.testing.assert_array_equal(parts.ap, whole.ap)
