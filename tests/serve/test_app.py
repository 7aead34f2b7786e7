"""The service over HTTP, in this process: answers, limits, and one clear line for whatever is wrong."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image
from served import BEARER, TOKEN, Served

from gpq_faiss.codes.encode import decode
from gpq_faiss.data.folder import open_folder
from gpq_faiss.data.labels import Labels
from gpq_faiss.data.standard import open_digits
from gpq_faiss.encoder import Encoder, open_encoder
from gpq_faiss.errors import UsageError
from gpq_faiss.indexes.items import IdMap
from gpq_faiss.indexes.opening import open_in_memory
from gpq_faiss.serve.app import create_app
from gpq_faiss.serve.browse import Beginning
from gpq_faiss.serve.catalogue import Catalogue
from gpq_faiss.serve.guard import Settings
from gpq_faiss.serve.live import LiveIndex
from gpq_faiss.serve.run import serve
from gpq_faiss.serve.service import Service
from gpq_faiss.stages.export_encoder import export_encoder

DIGITS = open_digits()
assert DIGITS.labels is not None
CLASSES = DIGITS.labels.class_ids()


def png(row: int) -> bytes:
    written = io.BytesIO()
    Image.fromarray(DIGITS.images[row]).save(written, "PNG")
    return written.getvalue()


def planes(row: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return DIGITS.planes(np.array([row]))


def pairs(found: dict[str, Any]) -> list[tuple[int, float]]:
    return [(one["id"], one["score"]) for one in found["results"]]


def expected(served: Served, vector: Any, k: int, **options: Any) -> list[tuple[int, float]]:
    D, ids = open_in_memory(served.index_file).search(vector, k, **options)
    return [(int(i), float(np.float32(s))) for i, s in zip(ids[0], D[0], strict=True) if i != -1]


def alike(one: list[tuple[int, float]], other: list[tuple[int, float]]) -> None:
    assert [i for i, _ in one] == [i for i, _ in other]
    np.testing.assert_array_equal(np.float32([s for _, s in one]), np.float32([s for _, s in other]))


# Searching --------------------------------------------------------------------------------------------------------------


def test_an_image_an_item_and_a_vector_find_what_the_index_finds(served: Served, encoder: Encoder) -> None:
    for row in (0, 7, 100):
        vector, _ = encoder.embed(planes(row), queries=True)
        wanted = expected(served, vector, 20)
        answer = served.client.post("/search", files={"image": ("a.png", png(row))}, data={"k": "20"})
        assert answer.status_code == 200
        alike(pairs(answer.json()), wanted)
        alike(pairs(served.search(id=row, k=20)), wanted)
        alike(pairs(served.search(vector=vector[0].tolist(), k=20)), wanted)
        first = answer.json()["results"][0]
        assert first["labels"] == [str(CLASSES[first["id"]])]
        assert answer.json()["ntotal"] == len(DIGITS)
        assert answer.json()["took_ms"] > 0


def test_filters_by_ids_and_labels_are_those_of_the_index(served: Served, encoder: Encoder) -> None:
    vector, _ = encoder.embed(planes(3), queries=True)
    for given, where in [
        ({"allow_ids": [5, 9, 10**15, 4]}, lambda ids: np.isin(ids, [4, 5, 9])),
        ({"deny_ids": [3, 5]}, lambda ids: ~np.isin(ids, [3, 5])),
        ({"allow_labels": ["3", "8"]}, lambda ids: np.isin(CLASSES[ids], [3, 8])),
        ({"deny_labels": ["3"]}, lambda ids: CLASSES[ids] != 3),
        ({"deny_labels": ["3"], "deny_ids": [1]}, lambda ids: (CLASSES[ids] != 3) & (ids != 1)),
        ({"allow_labels": ["3"], "allow_ids": list(range(50))}, lambda ids: (CLASSES[ids] == 3) & (ids < 50)),
        ({"allow_ids": []}, lambda ids: np.zeros(len(ids), np.bool_)),
        ({"allow_labels": []}, lambda ids: np.zeros(len(ids), np.bool_)),
        ({"deny_labels": []}, lambda ids: np.ones(len(ids), np.bool_)),
    ]:
        alike(pairs(served.search(id=3, k=12, **given)), expected(served, vector, 12, where=where))
    form = {"k": "5", "allow_labels": ["3", "8"], "deny_ids": ["3", "5"]}
    answer = served.client.post("/search", files={"image": png(3)}, data=form)
    alike(
        pairs(answer.json()),
        expected(served, vector, 5, where=lambda ids: np.isin(CLASSES[ids], [3, 8]) & ~np.isin(ids, [3, 5])),
    )


def test_queries_of_many_clients_are_searched_together_and_get_their_own_answers(served: Served) -> None:
    rng = np.random.default_rng(0)
    asked: list[dict[str, Any]] = [
        {
            **({"id": row} if row % 2 else {"vector": rng.standard_normal(72).tolist()}),
            **({"deny_ids": [5]} if row % 3 else {}),
            "k": 1 + row % 7,
        }
        for row in range(40)
    ]
    alone = [served.search(**one)["results"] for one in asked]
    sizes = served.service.metrics.batch
    begin = threading.Barrier(16)

    def ask(row: int) -> Any:
        begin.wait()
        return served.search(**asked[row % 40])["results"]

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(160))) == alone * 4
    counts = {
        s.labels["le"]: s.value for m in sizes.collect() for s in m.samples if s.name.endswith("_bucket")
    }
    assert counts["1.0"] < counts["+Inf"], "no two queries were searched together"


def test_an_item_without_an_original_is_searched_by_its_code(encoder: Encoder, index_file: Path) -> None:
    live = LiveIndex(index_file, encoder.model.codebooks)
    with TestClient(create_app(Service(encoder, live), Settings()), base_url="http://127.0.0.1") as client:
        served = Served(client, None, index_file)  # type: ignore[arg-type]
        vector = decode(live.snapshot.code(4)[None], encoder.model.codebooks)
        found = served.search(id=4, k=10)
        alike(pairs(found), expected(served, vector, 10))
        assert all(set(one) == {"id", "score"} for one in found["results"])
        assert client.get("/items/4").json() == {"id": 4}
        assert client.get("/items/4/thumbnail").status_code == 404
        assert client.post("/search", json={"id": 4, "allow_labels": ["1"]}).status_code == 422
        assert client.get("/info").json()["thumbnails"] is False


def test_every_search_says_what_the_best_code_would_score(served: Served, encoder: Encoder) -> None:
    Z = encoder.model.codebooks
    rng = np.random.default_rng(3)
    for row in (1, 2, 3):
        vector, _ = encoder.embed(planes(row), queries=True)
        found = served.search(id=row, k=30)
        wanted = sum(
            max(float(z @ part) for z in one) for one, part in zip(Z, vector.reshape(len(Z), -1), strict=True)
        )
        assert found["best"] == pytest.approx(wanted, rel=1e-5)
        assert found["results"][0]["score"] <= found["best"] * (1 + 1e-6)
    codes = rng.integers(0, Z.shape[1], len(Z))
    vector = np.concatenate([z[c] for z, c in zip(Z, codes, strict=True)])
    if all(int((z @ z[c]).argmax()) == c for z, c in zip(Z, codes, strict=True)):
        assert served.search(vector=vector.tolist())["best"] == pytest.approx(
            float(vector @ vector), rel=1e-5
        )


# Browsing ---------------------------------------------------------------------------------------------------------------


def listed(served: Served, **options: Any) -> list[dict[str, Any]]:
    answer = served.client.get("/items", params=options)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["items"]
    return found


def test_the_items_to_begin_with_are_of_every_label_and_always_the_same(served: Served) -> None:
    first = listed(served, k=10)
    assert sorted(one["labels"] for one in first) == [[str(c)] for c in range(10)]
    thirty = listed(served, k=30)
    assert thirty[:10] == first
    for c in range(10):
        assert [one["labels"] for one in thirty].count([str(c)]) == 3
    assert len(listed(served)) == 24
    assert all(CLASSES[one["id"]] == int(one["labels"][0]) for one in thirty)
    everything = listed(served, k=1000)
    assert len({one["id"] for one in everything}) == 1000
    some = listed(served, k=1000, label=["3", "8"])
    assert {one["id"] for one in some} == set(np.flatnonzero(np.isin(CLASSES, [3, 8])).tolist())
    for one in first[:3]:
        served.remove(one["id"])
    assert listed(served, k=7) == thirty[3:10]
    assert served.client.get("/items").json()["ntotal"] == len(DIGITS) - 3


def test_the_counts_of_labels_are_those_of_the_present_items(served: Served) -> None:
    def counts() -> list[int]:
        found: list[int] = served.client.get("/info").json()["label_counts"]
        return found

    def filtered() -> list[int]:
        return [len(served.search(id=20, k=1000, allow_labels=[str(c)])["results"]) for c in range(10)]

    assert counts() == np.bincount(CLASSES).tolist() == filtered()
    vector = [1.0] * 72
    for number in (0, 1, 2, 3, 10):
        served.remove(number)
    served.add(vector=vector, id=3)
    served.add(vector=vector, id=5000, labels=["3"])
    expected = np.bincount(np.delete(CLASSES, [0, 1, 2, 10])).tolist()
    assert counts() == expected == filtered()
    served.service.live.compact()
    assert counts() == expected == filtered()
    served.add(vector=vector, id=10)
    assert counts() == filtered() != expected


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("k=0", "k: "),
        ("k=1001", "k: 1001 is more than 1000"),
        ("k=x", "k: "),
        ("k=" + "9" * 5000, "k: "),
        ("label=none", "label: no item has the label 'none'"),
        ("label=" + "a" * 1001, "at most 1000 characters"),
        ("&".join(["label=1"] * 51), "label: "),
    ],
    ids=range(7),
)
def test_items_that_cannot_be_listed(served: Served, query: str, why: str) -> None:
    answer = served.client.get(f"/items?{query}")
    assert answer.status_code == 422
    assert list(answer.json()) == ["error"]
    assert why in answer.json()["error"]
    assert len(answer.json()["error"]) < 400


def test_without_data_some_items_are_listed_and_labels_have_no_counts(
    encoder: Encoder, index_file: Path
) -> None:
    with client_of(encoder, index_file, Settings()) as client:
        items = client.get("/items?k=30").json()["items"]
        assert len({one["id"] for one in items}) == 30
        assert client.get("/items?k=10").json()["items"] == items[:10]
        assert client.get("/items?label=1").status_code == 422
        assert client.get("/info").json()["label_counts"] is None


@pytest.mark.parametrize("seed", range(20))
def test_as_many_items_as_labels_have_every_label(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, C = len(DIGITS), 8
    dense = np.zeros((n, C), np.bool_)
    for c in range(1, 6):
        dense[30 * c : 30 * c + 30, c] = True
    dense[30 + rng.permutation(150)[:31], 0] = True  # each of its items has a rarer label, too
    dense[200:, 6] = rng.random(n - 200) < 0.5
    ids = rng.permutation(10**6)[:n]
    data = replace(DIGITS, ids=ids, labels=Labels.from_multihot(dense))
    held = np.sort(ids[(np.arange(n) < 200) | (rng.random(n) < 0.9)])
    beginning = Beginning(Catalogue(data), IdMap(len(held), held))
    order = beginning.ids()
    assert sorted(order) == held.tolist()
    rows = Catalogue(data).rows(order)
    assert (dense[rows[:C]].any(axis=0) == dense[rows].any(axis=0)).all()
    np.testing.assert_array_equal(beginning.counts, dense[rows].sum(axis=0))
    np.testing.assert_array_equal(beginning.counts_of(order[:9]), dense[rows[:9]].sum(axis=0))
    one = beginning.ids(["3"])
    np.testing.assert_array_equal(one, order[dense[rows, 3]])


# Changing ---------------------------------------------------------------------------------------------------------------


def test_items_are_added_and_removed_and_found_at_once(served: Served, encoder: Encoder) -> None:
    answer = served.client.post("/items", files={"image": png(7)}, headers=BEARER)
    assert answer.status_code == 201
    new = answer.json()["id"]
    assert new == len(DIGITS)
    assert new in [i for i, _ in pairs(served.search(id=7, k=40))]
    served.remove(7)
    assert 7 not in [i for i, _ in pairs(served.search(id=new, k=40))]
    assert served.client.get("/items/7").status_code == 404
    assert served.client.get("/items/7/thumbnail").status_code == 404
    assert served.client.post("/search", json={"id": 7}).status_code == 404
    assert served.client.delete("/items/7", headers=BEARER).status_code == 404
    vector, _ = encoder.embed(planes(9))
    big = 2**62 + 1
    assert served.add(vector=vector[0].tolist(), id=big) == big
    assert served.add(vector=vector[0].tolist(), id=7) == 7
    assert (
        served.client.post("/items", json={"vector": vector[0].tolist(), "id": 7}, headers=BEARER).status_code
        == 409
    )
    found = [i for i, _ in pairs(served.search(vector=vector[0].tolist(), k=200))]
    assert big in found
    assert found.index(7) < found.index(big)
    assert served.client.get("/healthz").json() == {"status": "ok", "ntotal": len(DIGITS) + 2}
    # the log is on disk, and the index file as it was
    reader = LiveIndex(served.index_file, encoder.model.codebooks)
    assert len(reader.snapshot.changes) == 3
    assert reader.snapshot.index.ntotal == len(DIGITS)
    assert reader.snapshot.has(big)


def test_added_items_have_the_name_and_labels_that_came_with_them(served: Served) -> None:
    code = served.service.live.snapshot.code(7)
    vector = decode(code[None], served.service.live.snapshot.index.codebooks)[0].tolist()
    served.add(vector=vector, id=5000, name="a new seven, \u00e9", labels=["7", "new", "7"])
    sent = served.client.post(
        "/items", files={"image": png(3)}, data={"name": "from a form", "labels": ["a", "b"]}, headers=BEARER
    )
    assert sent.status_code == 201, sent.text
    served.add(vector=vector, id=6001)

    def item(number: int) -> dict[str, Any]:
        found: dict[str, Any] = served.client.get(f"/items/{number}").json()
        return found

    for _ in range(2):
        assert item(5000) == {"id": 5000, "name": "a new seven, \u00e9", "labels": ["7", "new"]}
        assert item(sent.json()["id"]) == {
            "id": sent.json()["id"],
            "name": "from a form",
            "labels": ["a", "b"],
        }
        assert item(6001) == {"id": 6001}
        results = {one["id"]: one for one in served.search(vector=vector, k=1000)["results"]}
        assert results[5000]["name"] == "a new seven, \u00e9"
        assert served.service.live.compact()
        served.remove(6001)
        served.add(vector=vector, id=6001)
    for wrong in (
        {"name": ""},
        {"name": "a\nb"},
        {"name": "\ud800"},
        {"labels": [""]},
        {"labels": ["a"] * 101},
        {"name": None},
    ):
        body = json.dumps({"vector": vector, **wrong})
        answer = served.client.post(
            "/items", content=body, headers={**BEARER, "content-type": "application/json"}
        )
        assert answer.status_code == 422, (wrong, answer.text)


def test_a_network_in_onnx_answers_searches(made: Path, served: Served, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="the extra 'onnx' is not installed")
    file = export_encoder(made / "model", tmp_path / "encoder.onnx")
    encoder = open_encoder(file)
    live = LiveIndex(made / "index.faiss", served.service.encoder.model.codebooks)  # type: ignore[union-attr]
    service = Service(encoder, live, Catalogue(open_digits()))
    with TestClient(create_app(service, Settings()), base_url="http://127.0.0.1") as client:
        for query in ({"files": {"image": png(5)}}, {"json": {"id": 12}}):
            found, expected = (c.post("/search", **query).json()["results"] for c in (client, served.client))  # type: ignore[arg-type]
            assert [one["score"] for one in found] == pytest.approx(
                [one["score"] for one in expected], abs=1e-4
            )
        assert client.get("/info").json()["input"] == "images"
    with pytest.raises(UsageError, match="needs the model folder"):
        serve(made / "index.faiss", file, settings=Settings(token=TOKEN, port=0), writable=True)


def test_changes_are_compacted_in_the_background(encoder: Encoder, index_file: Path) -> None:
    live = LiveIndex(index_file, encoder.model.codebooks, writable=True, compact_after=5)
    service = Service(encoder, live)
    with TestClient(
        create_app(service, Settings(token=TOKEN, rate=0)), base_url="http://127.0.0.1"
    ) as client:
        served = Served(client, service, index_file)
        for number in range(12):
            served.remove(number)
        done = threading.Event()
        service._maintenance.submit(done.set)
        assert done.wait(30)
        assert len(live.snapshot.changes) < 12
        assert live.snapshot.ntotal == len(DIGITS) - 12
        assert "gpq_compactions_total 0.0" not in client.get("/metrics", headers=BEARER).text
    plain = open_in_memory(index_file)
    assert plain.ids.tolist() == list(range(12, len(DIGITS)))


def test_a_new_index_is_served_without_a_restart(served: Served) -> None:
    plain = open_in_memory(served.index_file)
    plain.remove(np.arange(100))
    plain.save(served.index_file, overwrite=True)
    assert served.client.post("/reload").status_code == 401
    assert served.client.post("/reload", headers=BEARER).json() == {"ntotal": len(DIGITS) - 100}
    assert served.client.get("/items/5").status_code == 404
    served.index_file.write_bytes(b"nothing")
    answer = served.client.post("/reload", headers=BEARER)
    assert answer.status_code == 422
    assert "index.faiss" in answer.json()["error"]
    assert served.search(id=100, k=1)["ntotal"] == len(DIGITS) - 100


# What is wrong ----------------------------------------------------------------------------------------------------------

JSON = {"content-type": "application/json"}
WRONG: list[tuple[str, dict[str, Any], int, str]] = [
    ("no body", {}, 415, "content-type"),
    ("text", {"content": b"hello", "headers": {"content-type": "text/plain"}}, 415, "content-type"),
    ("no JSON", {"content": b"{", "headers": JSON}, 400, "not JSON"),
    ("not UTF-8", {"content": b'{"id": "\xff"}', "headers": JSON}, 400, "not JSON"),
    ("brackets", {"content": b"[" * 100_000, "headers": JSON}, 400, "nested"),
    ("a list", {"json": [1]}, 422, "body"),
    ("nothing", {"json": {}}, 422, "give one of"),
    ("two queries", {"json": {"id": 1, "vector": [0.0] * 72}}, 422, "not vector and id"),
    ("an unknown field", {"json": {"id": 1, "limit": 3}}, 422, "limit"),
    ("null", {"json": {"id": None}}, 422, "id"),
    ("a text id", {"json": {"id": "1"}}, 422, "id"),
    ("a fraction", {"json": {"id": 1.5}}, 422, "id"),
    ("65 bits", {"json": {"id": 2**63}}, 422, "id"),
    ("endless digits", {"content": b'{"id": ' + b"9" * 5000 + b"}", "headers": JSON}, 400, "64 bits"),
    ("k 0", {"json": {"id": 1, "k": 0}}, 422, "k"),
    ("k too large", {"json": {"id": 1, "k": 1001}}, 422, "1000"),
    ("a boolean", {"json": {"id": 1, "k": True}}, 422, "k"),
    ("a short vector", {"json": {"vector": [1.0]}}, 422, "expected 72"),
    ("NaN", {"content": b'{"vector": [NaN]}', "headers": JSON}, 422, "vector.0"),
    ("huge", {"json": {"vector": [1e38] * 72}}, 422, "vector.0"),
    ("features", {"json": {"features": [1.0]}}, 422, "takes images"),
    ("an unknown label", {"json": {"id": 1, "allow_labels": ["10"]}}, 422, "no item has the label '10'"),
    ("too many ids", {"json": {"id": 1, "deny_ids": list(range(10_001))}}, 422, "deny_ids"),
    ("an unknown id", {"json": {"id": -1}}, 404, "no item has the id -1"),
    ("no image", {"files": {"image": b"hello"}}, 422, "not an image"),
    ("an empty image", {"files": {"image": b""}}, 422, "not an image"),
    ("a cut image", {"files": {"image": png(1)[:60]}}, 422, "image"),
    ("another file", {"files": {"picture": png(1)}}, 422, "image"),
    ("image as text", {"data": {"image": "x"}, "files": {"image": png(1)}}, 422, "image"),
    ("k as text", {"data": {"k": "ten"}, "files": {"image": png(1)}}, 422, "k"),
    ("k twice", {"data": {"k": ["1", "2"]}, "files": {"image": png(1)}}, 422, "twice"),
    ("an id and an image", {"data": {"id": "1"}, "files": {"image": png(1)}}, 422, "id"),
    ("no boundary", {"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400, "boundary"),
    (
        "no parts",
        {"content": b"x", "headers": {"content-type": "multipart/form-data; boundary=a"}},
        400,
        "form",
    ),
    ("large JSON", {"content": b" " * (1 << 20) + b"1", "headers": JSON}, 413, "bytes"),
]


@pytest.mark.parametrize(("request_", "status", "why"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_a_bad_search_is_one_clear_line(
    served: Served, request_: dict[str, Any], status: int, why: str
) -> None:
    answer = served.client.post("/search", **request_)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    (error,) = answer.json().values()
    assert why in error
    assert "\n" not in error
    assert len(error) < 400


def test_bad_additions_change_nothing(served: Served) -> None:
    vector = [1.0] * 72
    for body, status in [
        ({"vector": vector, "id": -1}, 422),
        ({"vector": vector, "id": 5}, 409),
        ({"vector": vector, "k": 5}, 422),
        ({"vector": [0.0] * 72}, 422),
        ({"id": 5}, 422),
        ({"vector": vector[1:]}, 422),
    ]:
        assert served.client.post("/items", json=body, headers=BEARER).status_code == status
    assert served.client.post("/items", files={"image": b"x"}, headers=BEARER).status_code == 422
    assert len(served.service.live.snapshot.changes) == 0


def test_paths_and_methods_that_are_not_there(served: Served) -> None:
    for method, path, status in [
        ("GET", "/items/x", 422),
        ("GET", f"/items/{2**63}", 422),
        ("GET", "/items/..%2f..%2fetc%2fpasswd", 404),
        ("GET", "/page/..%2fapp.py", 404),
        ("GET", "/page/../app.py", 404),
        ("GET", "/nothing", 404),
        ("GET", "/search", 405),
        ("PUT", "/items/1", 405),
    ]:
        answer = served.client.request(method, path)
        assert answer.status_code == status, path
        assert list(answer.json()) == ["error"]


# Limits -----------------------------------------------------------------------------------------------------------------


def client_of(encoder: Encoder, index_file: Path, settings: Settings, **options: Any) -> TestClient:
    live = LiveIndex(index_file, encoder.model.codebooks, **options)
    return TestClient(create_app(Service(encoder, live), settings), base_url="http://127.0.0.1")


def test_a_read_only_service_takes_no_changes(encoder: Encoder, index_file: Path) -> None:
    with client_of(encoder, index_file, Settings(token=TOKEN)) as client:
        for answer in (
            client.delete("/items/1", headers=BEARER),
            client.post("/items", json={}, headers=BEARER),
        ):
            assert answer.status_code == 403
            assert "read-only" in answer.json()["error"]
    assert sorted(p.name for p in index_file.parent.iterdir()) == ["index.faiss", "index.faiss.json"]


def test_writing_needs_the_token(served: Served) -> None:
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Bearer {TOKEN[:-1]}"},
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": "Bearer ÿ".encode("latin-1").decode("latin-1")},
    ):
        raw = {name: value.encode("latin-1") for name, value in headers.items()}
        for answer in (
            served.client.delete("/items/1", headers=raw),
            served.client.post("/items", json={}, headers=raw),
            served.client.post("/reload", headers=raw),
        ):
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
    assert served.client.get("/items/1").status_code == 200


def test_others_need_the_token_to_read(encoder: Encoder, index_file: Path) -> None:
    with pytest.raises(UsageError, match="token"):
        Settings(host="0.0.0.0")  # noqa: S104
    with client_of(encoder, index_file, Settings(host="192.0.2.7", token=TOKEN)) as client:
        for path in ("/info", "/items", "/items?k=x", "/items/1", "/items/1/thumbnail", "/metrics"):
            assert client.get(path).status_code == 401
        assert client.post("/search", json={"id": 1}).status_code == 401
        assert client.post("/search", json={"id": 1}, headers=BEARER).status_code == 200
        for path in ("/", "/healthz", "/page/page.js"):
            assert client.get(path).status_code == 200


@pytest.mark.parametrize("token", ["short", "with a space in between", "é" * 20])
def test_tokens_that_cannot_be_sent_or_are_guessed_are_refused(token: str) -> None:
    with pytest.raises(UsageError, match="token"):
        Settings(token=token)


def test_other_host_names_are_refused(encoder: Encoder, index_file: Path) -> None:
    with client_of(encoder, index_file, Settings(allowed_hosts=("Search.example",))) as client:
        for host, status in [
            ("127.0.0.1:8000", 200),
            ("localhost", 200),
            ("[::1]:80", 200),
            ("[::1]", 200),
            ("search.example:443", 200),
            ("SEARCH.example", 200),
            ("LocalHost:8000", 200),
            ("127.0.0.1:", 200),
            ("[[127.0.0.1]]", 400),
            ("[127.0.0.1]", 400),
            ("[localhost]", 400),
            ("[::1", 400),
            ("::1", 400),
            ("[::1]evil.example", 400),
            ("127.0.0.1:evil.com", 400),
            ("127.0.0.1:80:80", 400),
            ("evil.example@127.0.0.1", 400),
            ("127.0.0.1 evil.example", 400),
            ("127.0.0.1/evil.example", 400),
            ("localhost.evil.example", 400),
            ("evil.example", 400),
            ("127.0.0.1.evil.example", 400),
            ("", 400),
        ]:
            assert client.get("/info", headers={"host": host}).status_code == status, host


def test_requests_beyond_the_rate_are_refused(encoder: Encoder, index_file: Path) -> None:
    with client_of(encoder, index_file, Settings(rate=0.5)) as client:
        statuses = [client.get("/healthz").status_code for _ in range(5)]
        assert statuses[0] == 200
        assert set(statuses[1:]) == {429}
        assert client.get("/healthz").headers["retry-after"] == "1"


def test_uploads_are_limited_by_bytes_and_pixels(
    encoder: Encoder, index_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Settings().max_pixels == 25_000_000
    written = io.BytesIO()
    Image.new("L", (200, 200)).save(written, "PNG")
    bomb = written.getvalue()
    decoded: list[object] = []

    def endless() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 1000

    with client_of(encoder, index_file, Settings(max_upload=5000, max_pixels=10_000)) as client:
        with monkeypatch.context() as patched:
            patched.setattr(Image.Image, "load", decoded.append)
            answer = client.post("/search", files={"image": bomb})
        assert answer.status_code == 422
        assert decoded == []
        assert "200 x 200 pixels" in answer.json()["error"]
        for body in (b" " * 6001, endless()):
            answer = client.post("/search", content=body, headers=JSON)
            assert answer.status_code == 413
            assert answer.json() == {"error": "more than 5,000 bytes"}
        assert client.post("/search", files={"image": png(1)}).status_code == 200


def test_a_slow_request_is_ended(
    served: Served, encoder: Encoder, index_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    live = LiveIndex(index_file, encoder.model.codebooks)
    service = Service(encoder, live)
    inner = service._searches.run

    def slow(batch: Any) -> Any:
        release.wait(20)
        return inner(batch)

    with TestClient(create_app(service, Settings(timeout=0.2)), base_url="http://127.0.0.1") as client:
        monkeypatch.setattr(service._searches, "run", slow)
        answer = client.post("/search", json={"id": 1})
        release.set()
        assert answer.status_code == 503
        assert "0.2 seconds" in answer.json()["error"]
        assert client.get("/healthz").status_code == 200


def test_a_full_queue_is_refused(encoder: Encoder, index_file: Path) -> None:
    live = LiveIndex(index_file, encoder.model.codebooks)
    service = Service(encoder, live)
    with TestClient(create_app(service, Settings()), base_url="http://127.0.0.1") as client:
        service._searches.pending = 0
        answer = client.post("/search", json={"id": 1})
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"


# What is beside ---------------------------------------------------------------------------------------------------------


def test_every_answer_forbids_what_the_page_does_not_need(served: Served) -> None:
    for path in ("/", "/docs", "/page/page.js", "/info", "/nothing", "/items/1/thumbnail"):
        headers = served.client.get(path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"


def test_the_page_loads_nothing_from_elsewhere(served: Served) -> None:
    folder = Path(__file__).parents[2] / "gpq_faiss" / "serve" / "page"
    files = sorted(folder.iterdir())
    assert len(files) > 4
    for file in files:
        text = file.read_text()
        links = text.replace("http://www.w3.org/2000/svg", "").replace("http://127.0.0.1:8000", "")
        assert "http://" not in links
        assert "https://" not in links
        assert "innerHTML" not in text
        if file.suffix == ".html":
            assert "style=" not in text
            assert "<style" not in text
            assert " on" not in text.replace(" one ", " ")
    page = served.client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.text == (folder / "index.html").read_text()


def test_thumbnails_are_the_pictures_of_the_items(served: Served) -> None:
    answer = served.client.get("/items/11/thumbnail")
    assert answer.headers["content-type"] == "image/png"
    shown = np.asarray(Image.open(io.BytesIO(answer.content)).convert("L"))
    np.testing.assert_array_equal(shown, DIGITS.images[11])
    assert served.client.get("/items/11/thumbnail").content == answer.content


def test_names_are_paths_below_the_folder_that_all_are_in(tmp_path: Path) -> None:
    for name in ("cats/a.png", "cats/b.png", "dogs/c.png"):
        (tmp_path / "secret" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (300, 200)).save(tmp_path / "secret" / name)
    catalogue = Catalogue(open_folder(tmp_path / "secret"))
    assert [catalogue.name(row) for row in range(3)] == ["cats/a.png", "cats/b.png", "dogs/c.png"]
    assert catalogue.labels(2) == ["dogs"]
    small, kind = catalogue.thumbnail(0) or (b"", "")
    assert kind == "image/jpeg"
    assert Image.open(io.BytesIO(small)).size == (192, 128)
    (tmp_path / "secret" / "dogs" / "c.png").unlink()
    assert catalogue.thumbnail(2) is None


def test_metrics_count_requests_by_route(served: Served) -> None:
    served.search(id=1)
    served.client.get("/items/3")
    served.client.get("/nothing/at/all")
    served.client.get("/nothing/else")
    text = served.client.get("/metrics").text
    assert 'gpq_requests_total{route="/search",status="200"} 1.0' in text
    assert 'gpq_requests_total{route="/items/{id}",status="200"} 1.0' in text
    assert 'gpq_requests_total{route="other",status="404"} 2.0' in text
    assert f"gpq_items {float(len(DIGITS))}" in text


def test_the_description_for_programs_has_the_limits(served: Served) -> None:
    api = served.client.get("/openapi.json").json()
    content = api["paths"]["/search"]["post"]["requestBody"]["content"]
    fields = content["application/json"]["schema"]["properties"]
    assert fields["k"]["maximum"] == 1000
    assert fields["vector"]["minItems"] == fields["vector"]["maxItems"] == 72
    assert fields["allow_labels"]["items"]["enum"] == list("0123456789")
    assert content["multipart/form-data"]["schema"]["required"] == ["image"]
    assert "features" not in json.dumps(fields)
