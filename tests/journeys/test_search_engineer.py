"""A search engineer: embeddings in Faiss, in shards, with ids and names; a smaller index in the same pipeline, and more items later."""

import json
from pathlib import Path

import faiss
import numpy as np
from commands import done, refused

import gpq_faiss

N, MORE, QUERIES, WIDTH, CLASSES = 10_000, 1_500, 100, 64, 12
TRAINING = "--preset paper --bits 48 --set training.steps=60 --seed 0"


def write_table(name, ids, classes):
    rows = [f"{i},class-{c}" for i, c in zip(ids, classes, strict=True)]
    Path(name).write_text("\n".join(["id,category", *rows]))


def found(line):
    """The answers of a search in the working folder."""
    return json.loads(done(f"search model {line} --format json"))["queries"]


def test_a_smaller_index_for_a_pipeline_of_faiss(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    total = N + MORE + QUERIES
    y = rng.integers(0, CLASSES, total)
    x = (0.7 * rng.normal(size=(CLASSES, WIDTH))[y] + rng.normal(size=(total, WIDTH))).astype(np.float32)
    ids = rng.choice(2**62, total, replace=False)
    for i, part in enumerate(np.split(x[:N], 4)):
        np.save(f"vectors-{i}.npy", part)
    for name, rows in (("", range(N)), ("more-", range(N, N + MORE))):
        np.save(f"{name}ids.npy", ids[rows])
        Path(f"{name}names.txt").write_text("".join(f"sku-{row:06d}\n" for row in rows))
    np.save("more.npy", x[N : N + MORE])
    np.save("queries.npy", queries := x[N + MORE :])
    write_table("items.csv", ids[:N:10], y[:N:10])  # one item in ten has a category
    write_table("queries.csv", np.arange(QUERIES), y[N + MORE :])

    # Codes of the items, by the categories that some of them have.
    items = "'features:vectors-*.npy' --read ids=ids.npy --labels items.csv"
    done(f"train {items} --labelled all {TRAINING} --out model")
    done(f"encode model {items} --read names=names.txt --out codes.h5")
    done("index model codes.h5 --out index.faiss")
    assert Path("index.faiss").stat().st_size < x[:N].nbytes / 10

    # The pipeline goes on with plain Faiss, and its queries come from the model.
    xq, _ = gpq_faiss.Encoder.load("model").embed(queries, queries=True)
    plain = faiss.read_index("index.faiss")
    assert (plain.ntotal, plain.d) == (N, xq.shape[1])
    scores, ids_found = plain.search(xq, 10)
    class_of = dict(zip(ids.tolist(), y.tolist(), strict=True))
    right = np.array([[class_of[i] for i in row] for row in ids_found.tolist()]) == y[N + MORE :, None]
    assert right.mean() > 0.75

    # The command gives the same scores, and says which items they are.
    answers = found("index.faiss queries.npy -k 10")
    np.testing.assert_allclose([one["scores"] for one in answers], scores, atol=1e-4)
    first = answers[0]
    assert first["names"][0] == f"sku-{ids.tolist().index(first['ids'][0]):06d}"

    # A second batch, with the same model, and no id twice.
    done("encode model features:more.npy --read ids=more-ids.npy --read names=more-names.txt --out more.h5")
    done("index model index.faiss more.h5 --out all.faiss")
    assert faiss.read_index("all.faiss").ntotal == N + MORE
    twice = refused("index model index.faiss codes.h5 --out twice.faiss")
    assert "more than once, in index.faiss and in codes.h5" in twice
    assert not Path("twice.faiss").exists()
    names = {name for one in found("all.faiss queries.npy -k 10") for name in one["names"]}
    assert any(int(name[4:]) >= N for name in names)

    # Filters: what is not to be shown, and what alone is.
    Path("sold.txt").write_text("".join(f"{i}\n" for i in first["ids"]))
    (left,) = found("all.faiss queries.npy --rows 0 --deny-ids sold.txt")
    (only,) = found("all.faiss queries.npy --rows 0 -k 5 --allow-ids sold.txt")
    assert not set(left["ids"]) & set(first["ids"])
    assert only["ids"] == first["ids"][:5]

    # How good are the codes on queries that no training has seen?
    measured = done("evaluate model features:queries.npy --labels queries.csv --codes codes.h5 --format json")
    assert json.loads(measured)["map"] > 0.5
