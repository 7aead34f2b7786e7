"""Rankings and neighbour recall against brute force: all orders of ties, naive sums, fractions."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.evaluation import ranking as ranking_module
from gpq_faiss.evaluation.neighbour_recall import nearest, neighbour_recall
from gpq_faiss.evaluation.ranking import rank_codes, rank_scores
from gpq_faiss.evaluation.ties import RECALL_LEVELS, Convention

TIES = ("expected", "id", "best", "worst")
KS = [1, 3, 10, 500]
IN_TOP_K, AT_MOST_K = "relevant-in-top-k", "min(k, relevant)"
CUTS = [(None, "relevant"), (1, "relevant"), (3, AT_MOST_K), (2, IN_TOP_K), (9, IN_TOP_K)]
LARGEST = np.finfo(np.float32).max


def rank(scores, relevant, convention, **options):
    """Rank by scores [Q, N] and relevance bool [Q, N]."""
    hits = np.asarray(relevant, dtype=bool)
    return rank_scores(
        np.asarray(scores), np.eye(len(hits), dtype=bool), hits.T, convention, **options
    )


# Oracles ------------------------------------------------------------------------------------------


def orders(scores):
    """Every ranking that the scores allow, each as often as the others."""
    for order in itertools.permutations(range(len(scores))):
        if all(scores[a] >= scores[b] for a, b in itertools.pairwise(order)):
            yield list(order)


def plain_ap(relevant, k, denominator):
    """The definition of average precision, in exact fractions, for one order."""
    k = len(relevant) if k is None else k
    top, total = relevant[:k], sum(relevant)
    precisions = [Fraction(sum(top[: i + 1]), i + 1) for i, hit in enumerate(top) if hit]
    divisor = {"relevant": total, IN_TOP_K: sum(top), AT_MOST_K: min(k, total)}[denominator]
    return sum(precisions, Fraction(0)) / divisor if divisor else Fraction(0)


def naive(scores, relevant, convention):
    """AP and the expected relevant items among the first 1, 2, ... of one ranking, rank by rank.

    Not for expected ties with the denominator "relevant-in-top-k", an expectation of quotients.
    """
    n, ties = len(scores), convention.ties
    inside = {"best": ~relevant, "worst": relevant}.get(ties, np.arange(n))
    order = np.lexsort((inside, -scores))
    groups = [order[i : i + 1] for i in range(n)]
    if ties == "expected" and n:
        groups = np.split(order, np.flatnonzero(np.diff(scores[order])) + 1)
    sums, hits, before = [], [], 0.0
    for group in groups:
        size, r, start = len(group), int(relevant[group].sum()), len(hits)
        slope = (r - 1) / (size - 1) if size > 1 else 0.0
        sums += [r / size * (before + 1 + i * slope) / (start + i + 1) for i in range(size)]
        hits += [before + r * (i + 1) / size for i in range(size)]
        before += r
    k, total = convention.k or n, int(relevant.sum())
    top = hits[:k][-1] if hits else 0
    divisors = {"relevant": total, AT_MOST_K: min(total, k), IN_TOP_K: top}
    divisor = divisors[convention.denominator]
    return math.fsum(sums[:k]) / divisor if divisor else 0.0, np.array(hits)


def exact_scores(tables, codes):
    """The promised scores: exact sums of tables rounded to 2^-29 of what a score can reach."""
    largest = np.abs(tables).max(axis=2).sum(axis=1, dtype=np.float64)
    unit = np.exp2(np.ceil(np.log2(np.maximum(largest, 1e-30))) - 29)[:, None]
    entries = [tables[:, m, codes[:, m]] for m in range(codes.shape[1])]
    scores = sum(np.rint(entry.astype(np.float64) / unit) for entry in entries) * unit
    rounded = np.sum(entries, axis=0)
    assert np.abs(scores - rounded).max() <= 1e-6 * np.abs(rounded).max()
    return scores


def check(result, scores, relevant, convention, exclude):
    """Compare all measures with those of the whole relevance matrix."""
    keep = np.arange(scores.shape[1]) != exclude[:, None]
    rows = [naive(s[k], r[k], convention) for s, r, k in zip(scores, relevant, keep, strict=True)]
    assert result.ap == pytest.approx([ap for ap, _ in rows], abs=1e-13)
    assert result.map == pytest.approx(np.mean([ap for ap, _ in rows]), abs=1e-13)
    total = (relevant & keep).sum(axis=1)
    assert result.queries_without_relevant == (total == 0).sum()
    hits = [np.append(h, h[-1] if len(h) else 0.0) for _, h in rows]  # the last for later ranks
    at_k = np.array([[h[min(k, len(h)) - 1] for k in KS] for h in hits])
    recall = at_k / np.maximum(total, 1)[:, None]
    assert list(result.precision.values()) == pytest.approx((at_k / KS).mean(axis=0))
    assert list(result.recall.values()) == pytest.approx(recall.mean(axis=0))
    curve = np.zeros((len(rows), len(RECALL_LEVELS)))
    for q, t in enumerate(total):
        h = rows[q][1]
        for i, level in enumerate(RECALL_LEVELS if t else ()):
            precision = h / np.arange(1, len(h) + 1)
            curve[q, i] = max(precision[h / t >= level - 1e-9], default=0.0)
    assert result.pr_precision == pytest.approx(np.mean(curve, axis=0))


def problem(seed, *, n=70, q=9, m=3, size=4, classes=5, share=None, spread=3):
    """Random tables, codes, labels and relevance, with many ties.

    Items have several labels if ``share`` is given. With ``spread`` tables are whole numbers, whose
    sums are exact in any order.
    """
    r = np.random.default_rng(seed)
    codes = r.integers(0, size, (n, m)).astype(np.uint8)
    if m > 8:  # codes that only differ in their second word
        codes[:, :8] = 0
    integers = r.integers(-spread, spread + 1, (q, m, size))
    tables = (integers if spread else r.standard_normal((q, m, size))).astype(np.float32)
    if share is not None:
        yq, yb = r.random((q, classes)) < share, r.random((n, classes)) < share
        return tables, codes, yq, yb, (yq.astype(int) @ yb.T.astype(int)) > 0
    yq, yb = r.integers(-1, classes, q), r.integers(-1, classes, n)
    return tables, codes, yq, yb, (yq[:, None] == yb[None, :]) & (yq >= 0)[:, None]


# Measures -----------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=6))
def test_average_precision_is_the_mean_over_all_orders(pairs):
    scores, hits = [score for score, _ in pairs], [hit for _, hit in pairs]
    rankings = [[hits[i] for i in order] for order in orders(scores)]
    for k, denominator in CUTS:
        values = [plain_ap(ranking, k, denominator) for ranking in rankings]
        expected = {"expected": sum(values) / len(values)}
        if denominator != IN_TOP_K:  # there best and worst are no bounds
            expected |= {"best": max(values), "worst": min(values)}
        for ties, value in expected.items():
            result = rank([scores], [hits], Convention(ties, k, denominator))
            assert result.map == pytest.approx(float(value), abs=1e-12), (k, denominator, ties)


def test_long_rankings_keep_their_precision():
    n, size = 200_000, 4  # ties of 4 with one relevant item each, summed the slow way
    b = np.arange(n // size)
    terms = (math.fsum((b + 1) / (b * size + i)) / size for i in range(1, size + 1))
    result = rank([-(np.arange(n) // size)], [np.arange(n) % size == 0], Convention())
    assert result.map == pytest.approx(math.fsum(terms) / (n // size), rel=1e-12)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([(2, 2), (3, 4), (12, 16), (2, 256), (7, 8), (1, 16), (1, 1)]),
    st.sampled_from([0, 1, 3, 1000]),  # real values; nearly all scores tie, some do, hardly any do
    st.sampled_from([None, 0.0, 0.03, 0.3, 0.9]),
    st.booleans(),
    st.sampled_from(TIES),
    st.sampled_from([(None, "relevant"), (7, AT_MOST_K), (7, IN_TOP_K), (7, "relevant")]),
)
def test_a_ranking_is_that_of_the_relevance_matrix(seed, form, spread, share, leave_out, ties, cut):
    r = np.random.default_rng(seed)
    n, classes = (int(r.integers(1, limit)) for limit in (160, 70))  # over 64 classes: two words
    tables, codes, yq, yb, relevant = problem(
        seed, n=n, m=form[0], size=form[1], classes=classes, share=share, spread=spread
    )
    if (ties, cut[1]) == ("expected", IN_TOP_K):
        ties = "id"
    convention = Convention(ties, *cut)
    exclude = r.integers(-1, n, len(tables)) if leave_out else np.full(len(tables), -1)
    scores = exact_scores(tables, codes)
    result = rank_codes(tables, codes, yq, yb, convention, exclude=exclude, ks=KS)
    check(result, scores, relevant, convention, exclude)
    assert result.n_distinct == len(np.unique(codes, axis=0))
    if spread:  # fits float32

        def score(queries, distinct):
            return tables[queries][:, np.arange(form[0]), distinct].sum(axis=2)

        by_function = rank_codes(score, codes, yq, yb, convention, exclude=exclude)
        by_scores = rank_scores(scores, yq, yb, convention, exclude=exclude)
        assert by_function.ap == pytest.approx(result.ap, abs=1e-13)
        assert by_scores.ap == pytest.approx(result.ap, abs=1e-13)


@pytest.mark.parametrize("m", [3, 5, 12])
def test_threads_and_blocks_give_the_same_bits(m, monkeypatch):
    tables, codes, yq, yb, _ = problem(m, n=5000, q=260, m=m, size=16, share=0.2, spread=0)
    result = rank_codes(tables, codes, yq, yb, ks=[1, 10])
    threaded = rank_codes(tables, codes, yq, yb, ks=[1, 10], threads=2)
    monkeypatch.setattr(ranking_module, "_SCORES", 1)
    single = rank_codes(tables, codes, yq, yb, ks=[1, 10])
    assert threaded.as_dict() == single.as_dict() == result.as_dict()
    assert (threaded.ap == result.ap).all()


@pytest.mark.parametrize("ties", TIES)
def test_negative_and_zero_scores_tie_and_sort(ties):
    scores = np.array([[0.0, -0.0, -1.0, 1.0, -1e-40, 1e-40, -1.0, 3e38]], dtype=np.float32)
    relevant = np.array([[1, 0, 1, 0, 1, 0, 0, 1]], dtype=bool)
    expected, _ = naive(scores[0], relevant[0], Convention(ties))
    assert rank(scores, relevant, Convention(ties)).map == pytest.approx(expected, abs=1e-14)


def test_queries_without_relevant_items_are_reported():
    tables, codes, *_ = problem(5)
    result = rank_codes(tables[:2], codes[:6], [-1, 1], [-1, -1, -1, 0, 0, 0])
    assert (result.map, result.queries_without_relevant) == (0, 2)
    assert "2 of 2 queries" in str(result)


@pytest.mark.parametrize(
    ("convention", "text"),
    [
        (
            Convention(),
            "mAP, full ranking, divided by all relevant items, expected value over random order "
            "within ties",
        ),
        (
            Convention("id", 5, IN_TOP_K),
            "mAP@5, top 5 of the ranking, divided by the relevant items in the top k (usual in "
            "papers on hashing), ties by id",
        ),
    ],
)
def test_results_state_their_convention(convention, text):
    assert rank([[1.0]], [[True]], convention).convention == text


# Wrong arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ties": "any"}, "ties='any' is unknown"),
        ({"denominator": AT_MOST_K}, "belongs to mAP@k"),
        ({"k": 3, "denominator": "all"}, "denominator='all' is unknown"),
        ({"k": 0}, "k=0: it must be"),
    ],
)
def test_contradictory_conventions_are_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        Convention(**arguments)


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (UsageError, "k=0: it must be", {"ks": [1, 0]}),
        (DataError, "exclude must be 2 integers", {"exclude": [0, 3]}),
        (DataError, "exclude must be 2 integers", {"exclude": [0]}),
        (DataError, "float64 .*: give class numbers", {"query_labels": np.array([0.5, 1.0])}),
        (DataError, "give class numbers", {"database_labels": np.array([0, 1 << 40, 0])}),
        (DataError, "from 0 without", {"database_labels": [0, -2, 1]}),
        (DataError, "or multi-hot rows", {"database_labels": np.zeros((3, 2))}),
        (DataError, "for 2 items", {"query_labels": [0, 1, 2]}),
        (UsageError, "2 codewords each, the tables 1", {"codes": np.zeros((3, 2), np.uint8)}),
        (DataError, "codeword 4 is out of range", {"codes": np.full((3, 1), 4, np.uint8)}),
        (DataError, "codes must be uint8", {"codes": np.zeros((3, 1), int)}),
        (DataError, "1 to 2", {"database_labels": [], "codes": np.zeros((0, 1), np.uint8)}),
        (DataError, "NaN, infinity or", {"scorer": np.full((2, 1, 4), np.nan, np.float32)}),
        (DataError, "NaN, infinity or values too large", {"scorer": np.full((2, 1, 4), LARGEST)}),
        (DataError, "tables must be float32", {"scorer": np.zeros((2, 1, 4))}),
        (DataError, "expected \\(2, 1\\)", {"scorer": lambda q, c: np.zeros((len(q), 4))}),
    ],
)
def test_wrong_arguments_of_rank_codes_are_refused(error, message, options):
    arguments = {"query_labels": [0, 1], "database_labels": [0, 1, 0]}
    arguments |= {"scorer": np.zeros((2, 1, 4), np.float32), "codes": np.zeros((3, 1), np.uint8)}
    with pytest.raises(error, match=message):
        rank_codes(**arguments | options)


@pytest.mark.parametrize(
    ("error", "message", "scores"),
    [
        (DataError, r"labels are \(2,\) and \(3,\)", np.zeros((2, 4), np.float32)),
        (DataError, "must be finite", np.full((2, 3), np.inf, np.float32)),
        (DataError, "fit float32 exactly", np.full((2, 3), 0.1)),
    ],
)
def test_wrong_scores_are_refused(error, message, scores):
    with pytest.raises(error, match=message):
        rank_scores(scores, [0, 1], [0, 1, 0])


# Neighbour recall ---------------------------------------------------------------------------------


def cosine_order(query, items):
    """Positions by cosine in exact fractions (its square, with its sign), equal ones by
    position."""

    def key(i):
        dot, square = int(query @ items[i]), int(items[i] @ items[i])
        return (Fraction(0) if square == 0 else -Fraction(dot * abs(dot), square)), i

    return sorted(range(len(items)), key=key)


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 5]), st.sampled_from([1, 3, 14]))
def test_neighbours_equal_exact_arithmetic_in_any_blocks(seed, n, size):
    r = np.random.default_rng(seed)
    xq, xb = r.integers(-2, 3, (4, 3)), r.integers(-2, 3, (int(r.integers(1, 14)), 3))
    xq[~xq.any(axis=1)] = 1
    blocks = [xb[i : i + size].astype(np.float32) for i in range(0, len(xb), size)]
    rows = nearest(xq.astype(np.float32), blocks, n)
    assert rows.tolist() == [(cosine_order(query, xb) + [-1] * n)[:n] for query in xq]


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5))
def test_neighbour_recall_is_the_mean_over_all_orders(seed, n, neighbours, k):
    r = np.random.default_rng(seed)
    codes = r.integers(0, 3, (n, 2)).astype(np.uint8)
    tables = r.integers(-1, 2, (5, 2, 3)).astype(np.float32)
    xq, xb = (r.standard_normal((rows, 4)).astype(np.float32) for rows in (5, n))
    near = nearest(xq, [xb], neighbours)
    scores = tables[:, 0, codes[:, 0]] + tables[:, 1, codes[:, 1]]
    shares = []
    for q in range(5):
        items = {j for j in near[q].tolist() if j >= 0}
        shares += [np.mean([len(set(o[:k]) & items) / len(items) for o in orders(scores[q])])]
    result = neighbour_recall(tables, codes, near, n_queries=5, k=k)
    assert result.nn10_at_100 == pytest.approx(np.mean(shares), abs=1e-12)
    assert result.queries == 5

    def score(q, distinct):
        return tables[q][:, 0, distinct[:, 0]] + tables[q][:, 1, distinct[:, 1]]

    assert neighbour_recall(score, codes, near, n_queries=5, k=k) == result


def test_packed_labels_mean_the_same():
    tables, codes, yq, yb, _ = problem(5, share=0.3, classes=11)
    expected = rank_codes(tables, codes, yq, yb)
    packed = [np.packbits(y, axis=1) for y in (yq, yb)]
    assert (rank_codes(tables, codes, *packed).ap == expected.ap).all()
