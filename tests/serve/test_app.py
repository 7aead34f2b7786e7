"""The service over HTTP, in this process: answers, limits, and one clear line for whatever is wrong."""

import io
import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from fastapi.testclient import TestClient
from model_factory import make_model
from PIL import Image
from served import BEARER, TOKEN, Served, open_live

import gpq_faiss as gpq
from gpq_faiss import Encoder, export_encoder, open_data, open_encoder
from gpq_faiss.codes.encode import decode
from gpq_faiss.data.standard import open_digits
from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.indexes.opening import open_in_memory
from gpq_faiss.serve import guard
from gpq_faiss.serve.app import create_app
from gpq_faiss.serve.catalogue import Catalogue
from gpq_faiss.serve.guard import Settings
from gpq_faiss.serve.live import Snapshot
from gpq_faiss.serve.run import serve
from gpq_faiss.serve.service import Service

DIGITS = open_digits()
CLASSES = DIGITS.labels.class_ids()
VECTOR = [1.0] * 72


def png(row):
    written = io.BytesIO()
    Image.fromarray(DIGITS.pixels[row]).save(written, "PNG")
    return written.getvalue()


def planes(row):
    return DIGITS.read(slice(row, row + 1))


def expected(served, vector, k, **options):
    D, ids = open_in_memory(served.index_file).search(vector, k, **options)
    return [(int(i), float(np.float32(s))) for i, s in zip(ids[0], D[0], strict=True) if i != -1]


def found(answer):
    assert answer.status_code == 200, answer.text
    return [(one["id"], float(np.float32(one["score"]))) for one in answer.json()["results"]]


def client_of(encoder, index_file, settings, **options):
    live = open_live(index_file, **options)
    return TestClient(create_app(Service(encoder, live), settings), base_url="http://127.0.0.1")


# Searching --------------------------------------------------------------------------------------------------------------


def test_an_image_an_item_and_a_vector_find_what_the_index_finds(served, encoder):
    Z = encoder.model.codebooks
    for row in (0, 7, 100):
        vector, _ = encoder.embed(planes(row), queries=True)
        wanted = expected(served, vector, 20)
        answer = served.client.post("/search", files={"image": ("a.png", png(row))}, data={"k": "20"})
        assert found(answer) == wanted
        for query in ({"id": row}, {"vector": vector[0].tolist()}):
            assert found(served.client.post("/search", json={**query, "k": 20})) == wanted
        said = answer.json()
        assert said["results"][0]["labels"] == [str(CLASSES[said["results"][0]["id"]])]
        assert said["ntotal"] == len(DIGITS)
        assert said["took_ms"] > 0
        parts = zip(Z, vector.reshape(len(Z), -1), strict=True)
        assert said["best"] == pytest.approx(sum(float((z @ part).max()) for z, part in parts), rel=1e-5)


def test_filters_by_ids_and_labels_are_those_of_the_index(served, encoder):
    filters = [
        ({"allow_ids": [5, 9, 10**15, 4]}, lambda ids: np.isin(ids, [4, 5, 9])),
        ({"deny_ids": [3, 5]}, lambda ids: ~np.isin(ids, [3, 5])),
        ({"allow_labels": ["3", "8"]}, lambda ids: np.isin(CLASSES[ids], [3, 8])),
        ({"deny_labels": ["3"], "deny_ids": [1]}, lambda ids: (CLASSES[ids] != 3) & (ids != 1)),
        (
            {"allow_labels": ["3"], "allow_ids": list(range(50)), "deny_ids": [3]},
            lambda ids: (CLASSES[ids] == 3) & (ids < 50) & (ids != 3),
        ),
        ({"allow_ids": []}, lambda ids: np.zeros(len(ids), np.bool_)),
        ({"allow_labels": []}, lambda ids: np.zeros(len(ids), np.bool_)),
        ({"deny_labels": []}, lambda ids: np.ones(len(ids), np.bool_)),
    ]
    vector = encoder.embed(planes(3), queries=True)[0]
    for given, where in filters:
        wanted = expected(served, vector, 12, where=where)
        assert found(served.client.post("/search", json={"id": 3, "k": 12, **given})) == wanted
        if all(given.values()):  # a form has no empty lists
            form = {name: list(map(str, values)) for name, values in given.items()} | {"k": "12"}
            assert found(served.client.post("/search", files={"image": png(3)}, data=form)) == wanted


def test_queries_of_many_clients_are_searched_together_and_get_their_own_answers(served):
    rng = np.random.default_rng(0)
    asked = [
        {
            **({"id": row} if row % 2 else {"vector": rng.standard_normal(72).tolist()}),
            **({"deny_ids": [5]} if row % 3 else {}),
            "k": 1 + row % 7,
        }
        for row in range(40)
    ]
    alone = [served.search(**one)["results"] for one in asked]
    sizes = []
    run = served.service._searches.run

    def seen(batch):
        sizes.append(len(batch))
        return run(batch)

    served.service._searches.run = seen
    begin = threading.Barrier(16)

    def ask(row):
        begin.wait()
        return served.search(**asked[row % 40])["results"]

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(160))) == alone * 4
    assert sum(sizes) == 160
    assert len(sizes) < 160, "no two queries were searched together"


def test_an_item_without_an_original_is_searched_by_its_code(encoder, index_file):
    with client_of(encoder, index_file, Settings()) as client:
        index = open_in_memory(index_file)
        code = index.code_of(4)
        D, ids = index.search(decode(code[None], index.codebooks), 10)
        answer = client.post("/search", json={"id": 4, "k": 10})
        assert found(answer) == list(zip(ids[0].tolist(), D[0].tolist(), strict=True))
        assert all(set(one) == {"id", "score"} for one in answer.json()["results"])
        assert client.get("/items/4").json() == {"id": 4}
        assert client.get("/items/4/thumbnail").status_code == 404
        assert client.post("/search", json={"id": 4, "allow_labels": ["1"]}).status_code == 422
        assert client.get("/info").json()["thumbnails"] is False
        items = client.get("/items?k=30").json()["items"]
        assert len({one["id"] for one in items}) == 30
        assert client.get("/items?k=10").json()["items"] == items[:10]


def listed(served, **options):
    answer = served.client.get("/items", params=options)
    assert answer.status_code == 200, answer.text
    items = answer.json()["items"]
    return items


def test_the_items_to_begin_with_are_of_every_label_and_always_the_same(served):
    thirty = listed(served, k=30)
    assert [one["labels"] for one in thirty] == [[str(c)] for c in range(10)] * 3
    info = served.client.get("/info").json()
    assert dict(zip(info["labels"], info["label_counts"], strict=True)) == Counter(map(str, CLASSES.tolist()))
    assert all(CLASSES[one["id"]] == int(one["labels"][0]) for one in thirty)
    assert listed(served) == thirty[:24]
    assert len({one["id"] for one in listed(served, k=1000)}) == 1000
    some = listed(served, k=1000, label=["3", "8"])
    assert {one["id"] for one in some} == set(np.flatnonzero(np.isin(CLASSES, [3, 8])).tolist())
    for one in thirty[:3]:
        served.remove(one["id"])
    assert listed(served, k=7) == thirty[3:10]


# Changing ---------------------------------------------------------------------------------------------------------------


def test_items_are_added_and_removed_and_found_at_once(served, encoder):
    def ids(**query):
        return [one["id"] for one in served.search(**query)["results"]]

    answer = served.client.post("/items", files={"image": png(7)}, headers=BEARER)
    assert answer.status_code == 201
    new = answer.json()["id"]
    assert new == len(DIGITS)
    assert new in ids(id=7, k=40)
    served.remove(7)
    assert 7 not in ids(id=new, k=40)
    assert served.client.get("/items/7").status_code == 404
    assert served.client.get("/items/7/thumbnail").status_code == 404
    assert served.client.post("/search", json={"id": 7}).status_code == 404
    assert served.client.delete("/items/7", headers=BEARER).status_code == 404
    vector, big = encoder.embed(planes(9))[0][0].tolist(), 2**63 - 1
    assert served.add(vector=vector, id=big) == big
    assert served.add(vector=vector, id=7) == 7
    everything = ids(vector=vector, k=200)
    assert everything.index(7) < everything.index(big)
    assert served.client.get("/healthz").json() == {"status": "ok", "ntotal": len(DIGITS) + 2}
    answer = served.client.post("/items", json={"vector": vector}, headers=BEARER)
    assert (answer.status_code, "no larger id" in answer.text) == (409, True)
    # The changes are on disk, and the index file is as it was.
    reader = open_live(served.index_file)
    assert set(reader.snapshot.changes) == {7, new, big}
    assert reader.snapshot.index.ntotal == len(DIGITS)


def test_added_items_have_the_name_and_labels_that_came_with_them(served):
    served.add(vector=VECTOR, id=5000, name="a new seven, \u00e9", labels=["7", "new", "7"])
    form = {"name": "from a form", "labels": ["a", "b"], "id": "5001"}
    sent = served.client.post("/items", files={"image": png(3)}, data=form, headers=BEARER)
    assert sent.status_code == 201, sent.text
    served.add(vector=VECTOR, id=6001)

    def item(number):
        return served.client.get(f"/items/{number}").json()

    for _ in range(2):
        assert item(5000) == {"id": 5000, "name": "a new seven, \u00e9", "labels": ["7", "new"]}
        assert item(5001) == {"id": 5001, "name": "from a form", "labels": ["a", "b"]}
        assert item(6001) == {"id": 6001}
        results = {one["id"]: one for one in served.search(vector=VECTOR, k=1000)["results"]}
        assert results[5000]["name"] == "a new seven, \u00e9"
        assert served.service.live.compact()
        served.remove(6001)
        served.add(vector=VECTOR, id=6001)


def test_a_network_in_onnx_answers_searches(made, served, tmp_path):
    pytest.importorskip("onnxscript", reason="the extra 'onnx' is not installed")
    file = export_encoder(made / "model", tmp_path / "encoder.onnx")
    with client_of(open_encoder(file), made / "index.faiss", Settings()) as client:
        query = {"files": {"image": png(5)}}
        answers = [c.post("/search", **query).json()["results"] for c in (client, served.client)]
        scores = [[one["score"] for one in results] for results in answers]
        assert scores[0] == pytest.approx(scores[1], abs=1e-4)
        assert client.get("/info").json()["input"] == "images"
    with pytest.raises(UsageError, match="needs the model folder"):
        serve(made / "index.faiss", file, settings=Settings(token=TOKEN, port=0), writable=True)


def test_a_model_of_features_is_asked_by_features(tmp_path):
    x = np.random.default_rng(0).standard_normal((30, 20)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    model, data = make_model(tmp_path / "model"), f"features:{tmp_path / 'x.npy'}"
    file = gpq.index(model, gpq.encode(model, data, tmp_path / "c.h5"), tmp_path / "i.faiss")
    encoder = Encoder.load(model)
    service = Service(encoder, open_live(file, writable=True), open_data(data))
    with TestClient(create_app(service, Settings(token=TOKEN)), base_url="http://127.0.0.1") as client:
        served = Served(client, service, file)
        wanted = expected(served, encoder.embed(x[3:4], queries=True)[0], 30)
        for query in ({"id": 3}, {"features": x[3].tolist()}):
            assert found(client.post("/search", json={**query, "k": 30})) == wanted
        assert served.add(features=x[3].tolist()) == 30
        np.testing.assert_array_equal(*(service.live.snapshot.code(number) for number in (3, 30)))
        for path, sent, why in (
            ("/search", {"files": {"image": png(1)}}, "image: the model takes features, not images"),
            ("/search", {"json": {"features": [1.0]}}, "features: 1 numbers, expected 20"),
            *(
                (path, {"json": {"features": numbers}}, "and so no code")
                for path in ("/search", "/items")
                for numbers in ([1e30, -1e30] * 10, [0.0] * 20)
            ),
        ):
            answer = client.post(path, headers=BEARER, **sent)
            assert answer.status_code == 422, why
            assert why in answer.json()["error"]


# What is wrong ----------------------------------------------------------------------------------------------------------

JSON = {"content-type": "application/json"}
SEARCHES = [
    ({"content": b"hello", "headers": {"content-type": "text/plain"}}, 415, "content-type"),
    ({"content": b'{"id": "\xff"}', "headers": JSON}, 400, "the body is not application/json"),
    ({"content": b"[" * 100_000, "headers": JSON}, 400, "nested"),
    ({"content": b" " * (1 << 20) + b"1", "headers": JSON}, 413, "bytes"),
    ({"content": b'{"id": ' + b"9" * 5000 + b"}", "headers": JSON}, 400, "64 bits"),
    ({"content": b'{"vector": [NaN]}', "headers": JSON}, 422, "vector.0"),
    ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400, "boundary"),
    ({"json": [1]}, 422, "body"),
    ({"json": {}}, 422, "give one of vector, features, id"),
    ({"json": {"id": 1, "vector": [0.0] * 72}}, 422, "give one of"),
    ({"json": {"id": 1, "limit": 3}}, 422, "limit"),
    ({"json": {"id": "1"}}, 422, "id"),
    ({"json": {"id": 2**63}}, 422, "id"),
    ({"json": {"id": 1, "k": 0}}, 422, "k"),
    ({"json": {"id": 1, "k": 1001}}, 422, "1000"),
    ({"json": {"vector": [1.0]}}, 422, "expected 72"),
    ({"json": {"vector": [1e38] * 72}}, 422, "vector.0"),
    ({"json": {"features": [1.0]}}, 422, "takes images"),
    ({"json": {"id": 1, "allow_labels": ["10"]}}, 422, "no item has the label '10'"),
    ({"json": {"id": 1, "deny_ids": list(range(10_001))}}, 422, "deny_ids"),
    ({"json": {"id": -1}}, 404, "no item has the id -1"),
    ({"files": {"image": png(1)[:60]}}, 422, "image"),
    ({"files": {"picture": png(1)}}, 422, "image"),
    ({"files": [("image", png(1)), ("image", png(1))]}, 400, "Too many files"),
    ({"data": {"k": "ten"}, "files": {"image": png(1)}}, 422, "k"),
    ({"data": {"id": "1"}, "files": {"image": png(1)}}, 422, "give one of"),
]
ADDITIONS = [
    ({"id": -1}, 422, "-1 marks"),
    ({"id": 5}, 409, "in use"),
    ({"k": 5}, 422, "k"),
    ({"vector": [0.0] * 72}, 422, "vector"),
    ({"vector": VECTOR[1:]}, 422, "expected 72"),
    ({"vector": None, "id": 5}, 422, "give one of"),
    ({"name": ""}, 422, "name"),
    ({"name": "a\nb"}, 422, "name"),
    ({"name": "\ud800"}, 422, "name"),
    ({"labels": [""]}, 422, "labels.0"),
    ({"labels": ["a"] * 101}, 422, "labels"),
]
PATHS = [
    ("GET", "/items/x", 422, "id: "),
    ("GET", f"/items/{2**63}", 422, "id: "),
    ("GET", "/items/..%2f..%2fetc%2fpasswd", 404, ""),
    ("GET", "/page/..%2fapp.py", 404, ""),
    ("GET", "/page/../app.py", 404, ""),
    ("GET", "/search", 405, ""),
    ("PUT", "/items/1", 405, ""),
    ("GET", "/items?k=0", 422, "k: "),
    ("GET", "/items?k=1001", 422, "k: 1001 is more than 1000"),
    ("GET", "/items?k=" + "9" * 5000, 422, "k: "),
    ("GET", "/items?label=none", 422, "label: no item has the label 'none'"),
    ("GET", "/items?label=" + "a" * 1001, 422, "at most 1000 characters"),
    ("GET", "/items?" + "&".join(["label=1"] * 51), 422, "label: "),
]


def test_whatever_is_wrong_is_one_clear_line_and_changes_nothing(served):
    calls = [
        *(("POST", "/search", *one) for one in SEARCHES),
        *((method, path, {}, status, why) for method, path, status, why in PATHS),
    ]
    for body, status, why in ADDITIONS:
        sent = {"content": json.dumps({"vector": VECTOR, **body}), "headers": {**BEARER, **JSON}}
        calls.append(("POST", "/items", sent, status, why))
    for method, path, options, status, why in calls:
        answer = served.client.request(method, path, **options)
        assert answer.status_code == status, (path, options, answer.text)
        (error,) = answer.json().values()
        assert list(answer.json()) == ["error"]
        assert why in error, (path, options)
        assert "\n" not in error
        assert len(error) < 400
        if status == 405:
            assert answer.headers["allow"] == ("POST" if path == "/search" else "DELETE, GET")
    assert len(served.service.live.snapshot.changes) == 0


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [(DataError("no node answers"), 422, "no node answers"), (ValueError("secret"), 500, "internal error")],
)
def test_a_search_that_fails_is_an_error_of_its_requests_alone(
    encoder, index_file, monkeypatch, error, status, message
):
    app = create_app(Service(encoder, open_live(index_file)), Settings())
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        with monkeypatch.context() as patched:
            patched.setattr(Snapshot, "search", mock.Mock(side_effect=error))
            answer = client.post("/search", json={"id": 1})
        assert (answer.status_code, answer.json()) == (status, {"error": message})
        assert client.post("/search", json={"id": 1}).status_code == 200


# Limits -----------------------------------------------------------------------------------------------------------------


CHANGES = (("DELETE", "/items/1"), ("POST", "/items"))
READS = ("/info", "/items", "/items?k=x", "/items/1", "/items/1/thumbnail", "/metrics")


def test_writing_needs_the_token_and_reading_by_others_too(encoder, served):
    for given in (None, "Bearer wrong", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", "Bearer ÿ"):
        headers = {} if given is None else {"authorization": given.encode("latin-1")}
        for method, path in CHANGES:
            answer = served.client.request(method, path, headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
    assert served.client.get("/items/1").status_code == 200
    with client_of(encoder, served.index_file, Settings(host="192.0.2.7", token=TOKEN)) as client:
        assert [client.get(path).status_code for path in READS] == [401] * len(READS)
        assert client.post("/search", json={"id": 1}).status_code == 401
        assert client.post("/search", json={"id": 1}, headers=BEARER).status_code == 200
        for path in ("/", "/healthz", "/page/page.js"):
            assert client.get(path).status_code == 200
        for method, path in CHANGES:  # it is not writable
            answer = client.request(method, path, headers=BEARER)
            assert answer.status_code == 403
            assert "read-only" in answer.json()["error"]


HERE = (
    *("127.0.0.1:8000", "127.0.0.1:", "LocalHost:8000", "[::1]:80", "[::1]"),
    *("search.example:443", "SEARCH.example"),
)
ELSEWHERE = (
    *("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "[::1]evil.example"),
    *("[::1", "::1", "", "127.0.0.1:evil.com", "127.0.0.1:80:80", "evil.example@127.0.0.1"),
    *("127.0.0.1 evil.example", "127.0.0.1/evil.example", "[[127.0.0.1]]", "[localhost]"),
)


def test_other_host_names_are_refused(encoder, index_file):
    with client_of(encoder, index_file, Settings(allowed_hosts=("Search.example",))) as client:
        for host in HERE + ELSEWHERE:
            status = client.get("/info", headers={"host": host}).status_code
            assert status == (200 if host in HERE else 400), host


def test_requests_beyond_the_rate_are_refused(encoder, index_file, monkeypatch):
    with client_of(encoder, index_file, Settings(rate=0.5)) as client:
        assert [client.get("/healthz").status_code for _ in range(4)] == [200, 429, 429, 429]
        assert client.get("/healthz").headers["retry-after"] == "1"
    # Of more clients than are kept in mind, those that were quiet for longest begin anew.
    monkeypatch.setattr(guard, "_CLIENTS", 2)
    app = create_app(Service(encoder, open_live(index_file)), Settings(rate=0.5))
    clients = [TestClient(app, "http://127.0.0.1", client=(f"192.0.2.{n}", 1)) for n in range(3)]
    asked = (0, 0, 1, 0, 2, 0, 1)
    assert [clients[n].get("/healthz").status_code for n in asked] == [200, 429, 200, 429, 200, 429, 200]


def test_uploads_are_limited_by_bytes_and_pixels(encoder, index_file, monkeypatch):
    assert Settings().max_pixels == 25_000_000
    written = io.BytesIO()
    Image.new("L", (200, 200)).save(written, "PNG")
    decoded = []

    def endless():
        for _ in range(100):
            yield b" " * 1000

    with client_of(encoder, index_file, Settings(max_upload=5000, max_pixels=10_000)) as client:
        with monkeypatch.context() as patched:
            patched.setattr(Image.Image, "load", decoded.append)
            answer = client.post("/search", files={"image": written.getvalue()})
        assert answer.status_code == 422
        assert decoded == []
        assert "200 x 200 pixels" in answer.json()["error"]
        for body in (b" " * 6001, endless()):
            answer = client.post("/search", content=body, headers=JSON)
            assert answer.status_code == 413
            assert answer.json() == {"error": "more than 5,000 bytes"}
        assert client.post("/search", files={"image": png(1)}).status_code == 200
        monkeypatch.setattr(guard, "_UPLOADS", 0)  # of other requests at the same time
        answer = client.post("/search", json={"id": 1})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json() == {"error": "too many uploads at a time: try again later"}


def test_a_slow_request_is_ended(encoder, index_file, monkeypatch):
    release = threading.Event()
    service = Service(encoder, open_live(index_file))
    inner = service._searches.run

    def slow(batch):
        release.wait(20)
        return inner(batch)

    with TestClient(create_app(service, Settings(timeout=0.2)), base_url="http://127.0.0.1") as client:
        monkeypatch.setattr(service._searches, "run", slow)
        answer = client.post("/search", json={"id": 1})
        release.set()
        assert answer.status_code == 503
        assert "0.2 seconds" in answer.json()["error"]
        assert answer.headers["retry-after"] == "1"
        assert client.get("/healthz").status_code == 200


# What is beside ---------------------------------------------------------------------------------------------------------


def test_the_page_needs_nothing_from_elsewhere_and_every_answer_forbids_it(served):
    for path in ("/", "/page/page.js", "/info", "/nothing", "/items/1/thumbnail"):
        headers = served.client.get(path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
    folder = Path(__file__).parents[2] / "gpq_faiss" / "serve" / "page"
    files = sorted(folder.iterdir())
    assert len(files) > 3
    for file in files:
        text = file.read_text()
        links = text.replace("http://www.w3.org/2000/svg", "")
        assert not any(part in links for part in ("http://", "https://", "innerHTML", "style=", "<style"))
    page = served.client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.text == (folder / "index.html").read_text()


def test_thumbnails_and_names_are_those_of_the_items(served, tmp_path):
    answer = served.client.get("/items/11/thumbnail")
    assert answer.headers["content-type"] == "image/png"
    shown = np.asarray(Image.open(io.BytesIO(answer.content)).convert("L"))
    np.testing.assert_array_equal(shown, DIGITS.pixels[11])
    for name in ("cats/a.png", "cats/b.png", "dogs/c.png"):
        (tmp_path / "secret" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (300, 200)).save(tmp_path / "secret" / name)
    catalogue = Catalogue(open_data(tmp_path / "secret"))
    known = [("cats/a.png", ("cats",)), ("cats/b.png", ("cats",)), ("dogs/c.png", ("dogs",))]
    assert [catalogue.about(row) for row in range(3)] == known
    small, kind = catalogue.thumbnail(0) or (b"", "")
    assert kind == "image/jpeg"
    assert Image.open(io.BytesIO(small)).size == (192, 128)
    (tmp_path / "secret" / "dogs" / "c.png").unlink()
    assert catalogue.thumbnail(2) is None


def test_metrics_and_the_description_for_programs(served):
    served.search(id=1)
    for path in ("/items/3", "/nothing/at/all", "/nothing/else"):
        served.client.get(path)
    text = served.client.get("/metrics").text
    assert 'gpq_requests_total{route="/search",status="200"} 1.0' in text
    assert 'gpq_requests_total{route="/items/{id}",status="200"} 1.0' in text
    assert 'gpq_requests_total{route="other",status="404"} 2.0' in text
    assert f"gpq_items {float(len(DIGITS))}" in text
    api = served.client.get("/openapi.json").json()
    content = api["paths"]["/search"]["post"]["requestBody"]["content"]
    assert "allow_labels" in content["application/json"]["schema"]["properties"]
    assert content["multipart/form-data"]["schema"]["required"] == ["image"]
