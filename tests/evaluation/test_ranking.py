"""Rankings and likeness against the mean over all orders of their ties; rankings against naive sums, scikit-learn, and their own other
forms; neighbours against exact fractions."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.evaluation.likeness import likeness, nearest, spaced_queries
from gpq_faiss.evaluation.ranking import rank_codes, rank_scores
from gpq_faiss.evaluation.ties import RECALL_LEVELS, harmonic_numbers
from gpq_faiss.methods.registry import make_method

TIES = ("expected", "id", "best", "worst")
KS = [1, 3, 10, 500]
MOST = np.finfo(np.float32).max
CUTS = [(None, "relevant"), (1, "relevant"), (3, "min(k, relevant)")]
CUTS += [(k, "relevant-in-top-k") for k in (2, 4, 9)]


def average_precision(scores, relevant, **options):
    """Of scores [Q, N] and relevance bool [Q, N]."""
    hits = np.asarray(relevant, dtype=bool)
    return rank_scores(np.asarray(scores), np.eye(len(hits), dtype=bool), hits.T, **options).ap


# Oracles -------------------------------------------------------------------------------------------------------------


def orders(scores):
    """Every ranking that the scores allow, each as often as the others."""
    for order in itertools.permutations(range(len(scores))):
        if all(scores[a] >= scores[b] for a, b in itertools.pairwise(order)):
            yield list(order)


def plain_ap(relevant, k=None, denominator="relevant"):
    """The definition, in exact fractions, for one order."""
    k = len(relevant) if k is None else k
    top = relevant[:k]
    total = sum((Fraction(sum(top[: i + 1]), i + 1) for i, hit in enumerate(top) if hit), Fraction(0))
    n, inside = sum(relevant), sum(top)
    below = {"relevant": n, "relevant-in-top-k": inside, "min(k, relevant)": min(k, n)}[denominator]
    return total / below if below else Fraction(0)


def naive(scores, relevant, ties="expected", k=None, denominator="relevant", ids=None):
    """Average precision, and the expected relevant items among the first 1, 2, ... of one ranking, rank by rank; not for
    expected ties with the denominator "relevant-in-top-k", an expectation of quotients."""
    n = len(scores)
    inside = {"id": np.arange(n) if ids is None else ids, "best": ~relevant, "worst": relevant}
    order = np.lexsort((inside.get(ties, np.arange(n)), -scores))
    sums, found, before = [], [], 0.0
    groups = [order[i : i + 1] for i in range(n)]
    if ties == "expected":
        groups = np.split(order, np.flatnonzero(np.diff(scores[order])) + 1) if n else []
    for group in groups:
        size, hits, start = len(group), int(relevant[group].sum()), len(found)
        slope = (hits - 1) / (size - 1) if size > 1 else 0.0
        sums += [hits / size * (before + 1 + i * slope) / (start + i + 1) for i in range(size)]
        found += [before + hits * (i + 1) / size for i in range(size)]
        before += hits
    top, total = len(found) if k is None else k, int(relevant.sum())
    inside = found[:top][-1] if found else 0
    below = {"relevant": total, "min(k, relevant)": min(total, top), "relevant-in-top-k": inside}[denominator]
    return math.fsum(sums[:top]) / below if below else 0.0, np.array(found)


def exact_scores(tables, codes):
    """The promised scores, spelled out: exact sums of the tables rounded to 2^-29 of what a score can reach."""
    reach = np.abs(tables).max(axis=2).sum(axis=1, dtype=np.float64)
    unit = np.exp2(np.ceil(np.log2(np.maximum(reach, 1e-30))) - 29)[:, None]
    books = range(codes.shape[1])
    scores = sum(np.rint(tables[:, m, codes[:, m]].astype(np.float64) / unit) for m in books) * unit
    float32 = np.sum([tables[:, m, codes[:, m]] for m in books], axis=0)
    assert np.abs(scores - float32).max() <= 1e-6 * np.abs(float32).max()
    return scores


def check(result, scores, relevant, *, exclude=None, ids=None, **options):
    """A result is that of the whole relevance matrix."""
    n = scores.shape[1]
    keep = np.arange(n) != (np.full(len(scores), -1) if exclude is None else exclude)[:, None]
    ids = np.arange(n) if ids is None else ids
    rows = [naive(s[k], r[k], ids=ids[k], **options) for s, r, k in zip(scores, relevant, keep, strict=True)]
    assert result.ap == pytest.approx([ap for ap, _ in rows], abs=1e-13)
    assert result.map == pytest.approx(np.mean([ap for ap, _ in rows]), abs=1e-13)
    total = (relevant & keep).sum(axis=1)
    assert result.queries_without_relevant == (total == 0).sum()
    found = [np.append(f, f[-1] if len(f) else 0.0) for _, f in rows]  # the last stands for all later ranks
    at = np.array([[f[min(k, len(f)) - 1] for k in KS] for f in found])
    some = np.maximum(total, 1)[:, None]
    assert list(result.precision.values()) == pytest.approx((at / KS).mean(axis=0))
    assert list(result.recall.values()) == pytest.approx((at / some).mean(axis=0))
    curve = np.zeros((len(rows), len(RECALL_LEVELS)))
    for q, t in enumerate(total):
        f = rows[q][1]
        for i, level in enumerate(RECALL_LEVELS if t else ()):
            curve[q, i] = max((f / np.arange(1, len(f) + 1))[f / t >= level - 1e-9], default=0.0)
    assert result.pr_precision == pytest.approx(np.mean(curve, axis=0))


def problem(seed, *, n=70, q=9, m=3, size=4, classes=5, share=None, spread=3):
    """Random codes, tables and labels (several an item, where ``share`` is given) with many ties; with ``spread`` tables of whole numbers,
    whose sums are exact in any order."""
    r = np.random.default_rng(seed)
    codes = r.integers(0, size, (n, m)).astype(np.uint8)
    if m > 8:  # which one word does not hold: the next one tells them apart
        codes[:, :8] = 0
    tables = r.integers(-spread, spread + 1, (q, m, size)) if spread else r.standard_normal((q, m, size))
    if share is not None:
        yq, yb = r.random((q, classes)) < share, r.random((n, classes)) < share
        relevant = (yq.astype(int) @ yb.T.astype(int)) > 0
    else:
        yq, yb = r.integers(-1, classes, q), r.integers(-1, classes, n)
        relevant = (yq[:, None] == yb[None, :]) & (yq >= 0)[:, None]
    return tables.astype(np.float32), codes, yq, yb, relevant


# Measures ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=6))
def test_measures_are_the_mean_over_all_orders_of_ties(pairs):
    scores, hits = np.array([[s for s, _ in pairs]]), [r for _, r in pairs]
    relevant = np.array([hits])
    rankings = [[hits[i] for i in order] for order in orders(scores[0])]
    labels = relevant.T
    for k, denominator in CUTS:
        every = [plain_ap(ranking, k, denominator) for ranking in rankings]
        mean = sum(every) / len(every)
        for ties, value in (("expected", mean), ("best", max(every)), ("worst", min(every))):
            if ties == "expected" or denominator != "relevant-in-top-k":  # there best and worst are no bounds
                found = average_precision(scores, relevant, k=k, denominator=denominator, ties=ties)
                assert found == pytest.approx([float(value)], abs=1e-12), (k, denominator, ties)
    ks, total = list(range(1, len(pairs) + 3)), max(1, sum(hits))
    for ties, of in (("expected", np.mean), ("best", max), ("worst", min)):
        counts = np.array([of([sum(ranking[:k]) for ranking in rankings]) for k in ks])
        found = rank_scores(scores, [[True]], labels, ties=ties, ks=ks)
        assert list(found.precision.values()) == pytest.approx(counts / ks)
        assert list(found.recall.values()) == pytest.approx(counts / total)
    n, levels = len(pairs), [0.0, 0.1, 0.25, 1 / 3, 0.5, 0.75, 1.0]
    counts = np.array([np.mean([sum(ranking[:k]) for ranking in rankings]) for k in range(1, n + 1)])
    precision, recall = counts / np.arange(1, n + 1), counts / total
    wanted = [max(precision[recall >= level - 1e-9], default=0.0) if any(hits) else 0.0 for level in levels]
    assert rank_scores(scores, [[True]], labels, levels=levels).pr_precision == pytest.approx(wanted)


def test_long_rankings_keep_their_precision():
    # 200,000 items in ties of 4 with one relevant each, summed the slow way
    n, size = 200_000, 4
    b = np.arange(n // size)
    terms = (math.fsum((b + 1) / (b * size + i)) / size for i in range(1, size + 1))
    wanted = math.fsum(terms) / (n // size)
    found = average_precision([-(np.arange(n) // size)], [np.arange(n) % size == 0])
    assert found == pytest.approx([wanted], rel=1e-12)
    h = harmonic_numbers(n)
    assert h[:4].tolist() == [0, 1, 1.5, pytest.approx(11 / 6)]
    assert h[n] == pytest.approx(math.log(n) + np.euler_gamma + 1 / (2 * n) - 1 / (12 * n * n), rel=4e-16)


# Rankings of codes -----------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32),
    # few codes are sorted by code, many by item
    st.sampled_from([(2, 2), (3, 4), (12, 16), (5, 4), (2, 256), (7, 8), (1, 16), (3, 1), (1, 1)]),
    st.sampled_from([0, 1, 3, 1000]),  # real values; nearly all scores tie, some do, hardly any do
    st.sampled_from([None, 0.0, 0.03, 0.3, 0.9]),
    st.booleans(),
    st.sampled_from(TIES),
    st.sampled_from([(None, "relevant"), (7, "min(k, relevant)"), (7, "relevant-in-top-k"), (7, "relevant")]),
)
def test_a_ranking_is_that_of_the_whole_relevance_matrix(seed, form, spread, share, leave_out, ties, cut):
    r = np.random.default_rng(seed)
    n, classes = (int(r.integers(1, most)) for most in (160, 70))  # over 64 classes: two words
    tables, codes, yq, yb, relevant = problem(
        seed, n=n, m=form[0], size=form[1], classes=classes, share=share, spread=spread
    )
    k, denominator = cut
    if (ties, denominator) == ("expected", "relevant-in-top-k"):
        ties = "id"
    options = {"ties": ties, "k": k, "denominator": denominator, "ids": r.permutation(n)}
    if leave_out:
        options["exclude"] = r.integers(-1, n, len(tables))
    scores = exact_scores(tables, codes)
    result = rank_codes(tables, codes, yq, yb, **options, ks=KS, levels=RECALL_LEVELS)
    check(result, scores, relevant, **options)
    assert result.n_distinct == len(np.unique(codes, axis=0))
    assert (result.n_queries, result.n_database) == (len(tables), n)
    if spread:  # fits float32

        def score(queries, distinct):
            assert len(distinct) == result.n_distinct
            return tables[queries][:, np.arange(form[0]), distinct].sum(axis=2)

        for other in (rank_scores(scores, yq, yb, **options), rank_codes(score, codes, yq, yb, **options)):
            assert other.ap == pytest.approx(result.ap, abs=1e-13)


@pytest.mark.parametrize(("m", "n"), [(3, 6000), (4, 3000), (5, 5000), (12, 5000)])
def test_many_codes_and_threads_give_the_same_bits(m, n):
    """Databases wide enough for several blocks of look-ups, sorted by code and by item, in blocks of every size; and three tasks."""
    r = np.random.default_rng(m)
    codes = r.integers(0, 16, (n, m)).astype(np.uint8)
    codes[: n // 10] = codes[n // 10 : 2 * (n // 10)]
    tables = r.standard_normal((260, m, 16)).astype(np.float32)
    yq, yb = r.random((260, 9)) < 0.2, r.random((n, 9)) < 0.2
    for measures in ({"ties": "id", "k": 20}, {"ks": [1, 10], "levels": [0.5]}):
        one = rank_codes(tables, codes, yq, yb, **measures)
        for options in ({"memory": 1}, {"threads": 2, "memory": 5 << 20}):
            other = rank_codes(tables, codes, yq, yb, **measures, **options)
            assert (other.ap == one.ap).all()
            assert other.as_dict() == one.as_dict()
    some = slice(0, 260, 60)
    relevant = (yq[some].astype(int) @ yb.T.astype(int)) > 0
    wanted = [naive(s, r)[0] for s, r in zip(exact_scores(tables[some], codes), relevant, strict=True)]
    assert one.ap[some] == pytest.approx(wanted, abs=1e-13)


def test_negative_and_zero_scores_tie_and_sort_as_they_should():
    scores = np.array([[0.0, -0.0, -1.0, 1.0, -1e-40, 1e-40, -1.0, 3e38]], dtype=np.float32)
    relevant = np.array([[1, 0, 1, 0, 1, 0, 0, 1]], dtype=bool)
    for ties in TIES:
        wanted = naive(scores[0], relevant[0], ties)[0]
        assert average_precision(scores, relevant, ties=ties) == pytest.approx([wanted], abs=1e-14)


def test_labels_in_every_form_mean_the_same_and_none_are_relevant_to_nothing():
    tables, codes, yq, yb, _ = problem(5, share=0.3, classes=11)
    wanted, (q, b) = rank_codes(tables, codes, yq, yb), (np.packbits(y, axis=1) for y in (yq, yb))
    for query, items in ((q, b), (q, yb)):
        assert (rank_codes(tables, codes, query, items).ap == wanted.ap).all()
    result = rank_codes(tables[:2], codes[:6], np.array([-1, 1]), np.array([-1, -1, -1, 0, 0, 0]))
    assert (result.map, result.queries_without_relevant) == (0, 2)
    assert "2 of 2 queries" in result.notes[0]
    assert result.convention == (
        "mAP, full ranking, divided by all relevant items, expected value over random order within ties"
    )


# Bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (UsageError, "ties='any' is unknown", {"ties": "any"}),
        (UsageError, "belongs to mAP@k", {"denominator": "min(k, relevant)"}),
        (UsageError, "denominator='all' is unknown", {"k": 3, "denominator": "all"}),
        (UsageError, "k=0: it must be", {"ks": [1, 0]}),
        (UsageError, "must rise", {"levels": [0.5, 0.1]}),
        (UsageError, "must rise", {"levels": [0.5, 1.1]}),
        (UsageError, "at least 1", {"threads": 0}),
        (DataError, "ids must be 3 integers", {"ties": "id", "ids": [1, 2]}),
        (DataError, "ids must differ", {"ties": "id", "ids": [1, 2, 1]}),
        (DataError, "exclude names rows outside", {"exclude": [0, 3]}),
        (DataError, "exclude must be 2 integers", {"exclude": [0]}),
        (DataError, "float64 .*: give class numbers", {"query_labels": np.array([0.5, 1.0])}),
        (DataError, "too many to pack", {"database_labels": np.array([0, 1 << 40, 0])}),
        (DataError, "from 0 .-1: unlabelled", {"database_labels": [0, -2, 1]}),
        (DataError, "or multi-hot rows, bool or packed", {"database_labels": np.zeros((3, 2))}),
        (DataError, "does not fit 2 items", {"query_labels": [0, 1, 2]}),
        (DataError, r"shape \(\) does not fit", {"scorer": lambda q, c: q, "query_labels": object()}),
        (UsageError, "2 codewords each, the tables 1", {"codes": np.zeros((3, 2), np.uint8)}),
        (DataError, "codeword 4 is out of range", {"codes": np.full((3, 1), 4, np.uint8)}),
        (DataError, "codes must be uint8", {"codes": np.zeros((3, 1), int)}),
        (DataError, "0 database items", {"database_labels": [], "codes": np.zeros((0, 1), np.uint8)}),
        (DataError, "NaN, infinity or values too large", {"scorer": np.full((2, 1, 4), np.nan, np.float32)}),
        (DataError, "NaN, infinity or values too large", {"scorer": np.full((2, 1, 4), MOST)}),
        (DataError, "tables must be float32", {"scorer": np.zeros((2, 1, 4))}),
        (DataError, "expected \\(2, 1\\)", {"scorer": lambda q, c: np.zeros((len(q), 4), np.float32)}),
        (DataError, r"labels are \(2,\) and \(3,\)", {"scores": np.zeros((2, 4), np.float32)}),
        (DataError, r"labels are \(\) and", {"scores": np.zeros((2, 3)), "query_labels": object()}),
        (DataError, "NaN or infinity", {"scores": np.full((2, 3), np.inf, np.float32)}),
        (UsageError, "do not fit float32", {"scores": np.full((2, 3), 0.1)}),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(error, message, options):
    given = {"query_labels": [0, 1], "database_labels": [0, 1, 0]}
    if "scores" not in options:
        given |= {"scorer": np.zeros((2, 1, 4), np.float32), "codes": np.zeros((3, 1), np.uint8)}
    with pytest.raises(error, match=message):
        (rank_scores if "scores" in options else rank_codes)(**given | options)


# Likeness -------------------------------------------------------------------------------------------------------------


def expected_share(scores, wanted, k):
    """Mean over every order of the items that is one of descending scores."""
    return float(np.mean([len(set(order[:k]) & set(wanted)) / len(wanted) for order in orders(scores)]))


def cosine_order(query, items):
    """Positions by cosine in exact fractions (its square, with its sign), equal ones by position."""

    def key(i):
        dot, square = int(query @ items[i]), int(items[i] @ items[i])
        return (Fraction(0) if square == 0 else -Fraction(dot * abs(dot), square)), i

    return sorted(range(len(items)), key=key)


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 5]))
def test_neighbours_are_those_of_exact_arithmetic_whatever_the_blocks(seed, n):
    r = np.random.default_rng(seed)
    xq, xb = r.integers(-2, 3, (4, 3)), r.integers(-2, 3, (int(r.integers(1, 14)), 3))
    xq[~xq.any(axis=1)] = 1
    for size in (1, 3, len(xb)):
        blocks = [xb[i : i + size].astype(np.float32) for i in range(0, len(xb), size)]
        found = nearest(xq.astype(np.float32), blocks, n)
        assert found.tolist() == [(cosine_order(query, xb) + [-1] * n)[:n] for query in xq]


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.booleans())
def test_shares_are_the_mean_over_every_order_of_ties(seed, n, neighbours, k, function):
    r = np.random.default_rng(seed)
    codes = r.integers(0, 3, (n, 2)).astype(np.uint8)
    tables = r.integers(-1, 2, (5, 2, 3)).astype(np.float32)
    xq, xb = r.standard_normal((5, 4)).astype(np.float32), r.standard_normal((n, 4)).astype(np.float32)
    near = nearest(xq, [xb], neighbours)

    def score(q, distinct):
        return np.asarray(sum(tables[q][:, m, distinct[:, m]] for m in range(2)))

    scores = score(np.arange(5), codes)
    found = likeness(score if function else tables, codes, near, n_queries=5, k=k, memory=1)
    shares = [expected_share(scores[q], [j for j in near[q].tolist() if j >= 0], k) for q in range(5)]
    assert found.nn10_at_100 == pytest.approx(np.mean(shares), abs=1e-12)
    assert found.queries == 5
    assert f"@{k}:" in found.definition
    assert found == likeness(tables, codes, near, n_queries=5, k=k)


def test_floats_keep_all_likeness_and_a_class_code_none_of_evenly_spaced_queries():
    r = np.random.default_rng(0)
    centres = 3 * r.standard_normal((5, 16))
    yq, yb = np.arange(40) % 5, np.arange(1000) % 5
    xq, xb = ((centres[y] + r.standard_normal((len(y), 16))).astype(np.float32) for y in (yq, yb))
    near = nearest(xq, [xb[:300], xb[300:]])
    exact = make_method("float", 32).fit(xb)
    codes = exact.encode(xb)
    assert likeness(lambda q, c: exact.score(xq[q], c), codes, near, n_queries=40, k=10).nn10_at_100 == 1
    # The code is the class: a perfect ranking by label, that gives every query of a class the same results.
    tables = (yq[:, None, None] == np.arange(5)).astype(np.float32)
    codes = yb[:, None].astype(np.uint8)
    assert rank_codes(tables, codes, yq, yb).map == pytest.approx(1)
    assert likeness(tables, codes, near, n_queries=40).nn10_at_100 <= 0.5
    with pytest.raises(DataError, match="do not fit"):
        likeness(tables, codes[:5], near, n_queries=40)
    assert spaced_queries(7).tolist() == list(range(7))
    rows = spaced_queries(1001)
    assert len(rows) == 400
    assert (rows[0], rows[-1]) == (0, 1000)
    assert set(np.diff(rows)) <= {2, 3}
