"""The service over HTTP, in this process: answers, limits, and one line for each mistake."""

import io
import json
import logging
import shutil
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from model_factory import digits, make_model
from PIL import Image
from served import BEARER, TOKEN, Served, client_of, open_live

import gpq_faiss as gpq
from gpq_faiss import Encoder, export_encoder, open_data, open_encoder
from gpq_faiss.codes.encode import decode
from gpq_faiss.errors import UsageError
from gpq_faiss.indexes.opening import open_index
from gpq_faiss.serve.run import serve
from gpq_faiss.serve.schemas import Settings
from gpq_faiss.serve.service import Service
from gpq_faiss.store.changes import changes_path

DIGITS = digits()
CLASSES = DIGITS.labels.class_ids()
VECTOR = [1.0] * 72
JSON = {"content-type": "application/json"}


def png(row):
    content = io.BytesIO()
    Image.fromarray(DIGITS.pixels[row]).save(content, "PNG")
    return content.getvalue()


def vector_of(encoder, row):
    return encoder.embed(DIGITS.read(slice(row, row + 1)), queries=True)[0]


def nearest(served, vector, k, **filters):
    D, ids = open_index(served.index_file).search(vector, k, **filters)
    return [(int(id_), float(score)) for id_, score in zip(ids[0], D[0], strict=True) if id_ != -1]


def results_of(answer):
    assert answer.status_code == 200, answer.text
    return [(result["id"], result["score"]) for result in answer.json()["results"]]


def error_of(answer, status):
    assert answer.status_code == status, answer.text
    (error,) = answer.json().values()
    assert "\n" not in error
    assert len(error) < 400
    return error


# Searches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [0, 7, 100])
def test_an_image_an_item_and_a_vector_find_the_nearest(served, encoder, row):
    vector = vector_of(encoder, row)
    expected = nearest(served, vector, 20)
    form = {"files": {"image": png(row)}, "data": {"k": "20"}}
    for request in (
        form,
        {"json": {"id": row, "k": 20}},
        {"json": {"vector": vector[0].tolist(), "k": 20}},
    ):
        assert results_of(served.client.post("/search", **request)) == expected


def test_results_have_names_and_labels(served):
    (result,) = served.search(id=7, k=1)
    assert result["labels"] == [str(CLASSES[result["id"]])]


FILTERS = [
    ({"allow_ids": [5, 9, 10**15, 4]}, lambda ids: np.isin(ids, [4, 5, 9])),
    ({"deny_ids": [3, 5]}, lambda ids: ~np.isin(ids, [3, 5])),
    ({"allow_labels": ["3", "8"]}, lambda ids: np.isin(CLASSES, [3, 8])),
    ({"deny_labels": ["3"], "deny_ids": [1]}, lambda ids: (CLASSES != 3) & (ids != 1)),
    (
        {"allow_labels": ["3"], "allow_ids": list(range(50)), "deny_ids": [3]},
        lambda ids: (CLASSES == 3) & (ids < 50) & (ids != 3),
    ),
    ({"allow_ids": []}, lambda ids: ids < 0),
    ({"allow_labels": []}, lambda ids: ids < 0),
    ({"deny_labels": []}, lambda ids: ids >= 0),
]


@pytest.mark.parametrize(("filters", "passes"), FILTERS)
def test_filters_are_those_of_the_index(served, encoder, filters, passes):
    allow = np.flatnonzero(passes(np.arange(len(DIGITS))))
    expected = nearest(served, vector_of(encoder, 3), 12, allow=allow)
    assert results_of(served.client.post("/search", json={"id": 3, "k": 12, **filters})) == expected
    if all(filters.values()):  # a form has no empty lists
        form = {name: list(map(str, values)) for name, values in filters.items()} | {"k": "12"}
        answer = served.client.post("/search", files={"image": png(3)}, data=form)
        assert results_of(answer) == expected


def test_queries_of_many_clients_get_their_own_answers_together(served):
    rng = np.random.default_rng(0)
    requests = [{"vector": rng.standard_normal(72).tolist(), "k": 1 + row % 7} for row in range(40)]
    requests += [{"id": row, "deny_ids": [row]} for row in range(10)]
    alone = [served.search(**request) for request in requests]
    sizes, search, begin = [], served.service._search_batch, threading.Barrier(16)

    def search_batch(vectors, *arguments, **filters):
        sizes.append(len(vectors))
        return search(vectors, *arguments, **filters)

    served.service._search_batch = search_batch

    def ask(row):
        begin.wait()
        return served.search(**requests[row % 50])

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(400))) == alone * 8
    assert sum(sizes) == 400
    assert max(sizes) > 1


def test_an_error_of_a_search_is_that_of_all_who_wait(served, monkeypatch):
    client = served.client
    client.__init__(client.app, base_url="http://127.0.0.1", raise_server_exceptions=False)
    with monkeypatch.context() as patched:
        patched.setattr(type(served.service), "_search_batch", lambda *_: 1 / 0)
        assert error_of(client.post("/search", json={"id": 1}), 500) == "internal error"
    assert served.search(id=1)


def test_an_item_without_a_picture_is_searched_by_its_code(encoder, index_file):
    index = open_index(index_file)
    expected = index.search(decode(index.code_of(4)[None], index.codebooks), 10)[1][0].tolist()
    with open_live(index_file) as live:
        client = client_of(Service(encoder, live))
        assert [id_ for id_, _ in results_of(client.post("/search", json={"id": 4}))] == expected
        assert "no picture" in error_of(client.get("/items/4/thumbnail"), 404)
        assert client.get("/info").json()["thumbnails"] is False


def test_a_file_of_codes_is_served_as_an_index(served, encoder, built):
    with open_live(built / "codes.h5") as live:
        client = client_of(Service(encoder, live, DIGITS))
        for path, body in (
            ("/search", {"id": 7, "allow_labels": ["7"]}),
            ("/search", {"id": 8, "k": 99}),
        ):
            answers = [c.post(path, json=body).json() for c in (client, served.client)]
            assert answers[0] == answers[1]
        assert client.get("/items/7/thumbnail").status_code == 200


def test_a_network_in_onnx_answers_searches(built, served, tmp_path):
    pytest.importorskip("onnxscript", reason="the extra 'onnx' is not installed")
    file = export_encoder(built / "model", tmp_path / "encoder.onnx")
    with open_live(built / "index.faiss") as live:
        query = {"files": {"image": png(5)}}
        clients = client_of(Service(open_encoder(file), live)), served.client
        scores = [[score for _, score in results_of(c.post("/search", **query))] for c in clients]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    with pytest.raises(UsageError, match="needs the model folder"):
        serve(built / "index.faiss", file, settings=Settings(token=TOKEN, port=0), writable=True)


@pytest.fixture
def features(tmp_path):
    """A service of features, with the features as its data."""
    x = np.random.default_rng(0).standard_normal((30, 20)).astype(np.float32)
    names = np.array([f"item {row}" for row in range(30)])
    np.savez(tmp_path / "x.npz", features=x, names=names)
    model, data = make_model(tmp_path / "model"), f"features:{tmp_path / 'x.npz'}"
    file = gpq.index(model, gpq.encode(model, data, tmp_path / "c.h5"), tmp_path / "i.faiss")
    with open_live(file, writable=True) as live:
        service = Service(Encoder.load(model), live, open_data(data), Settings(token=TOKEN))
        served = Served(client_of(service), service, file)
        served.x = x
        yield served


def test_features_an_id_and_a_name_find_the_nearest(features):
    x = features.x
    expected = nearest(features, features.service.encoder.embed(x[3:4], queries=True)[0], 30)
    for query in ({"id": 3}, {"name": "item 3"}, {"features": x[3].tolist()}):
        assert results_of(features.client.post("/search", json={**query, "k": 30})) == expected


def test_added_features_have_the_code_of_the_indexed_ones(features):
    assert features.add(features=features.x[3].tolist()) == 30
    np.testing.assert_array_equal(*(features.service.code_of(id_) for id_ in (3, 30)))


WITHOUT_CODE = [{"features": [0.0] * 20}, {"features": [1.0]}, {"vector": VECTOR[1:]}]


@pytest.mark.parametrize("path", ["/search", "/items"])
@pytest.mark.parametrize("body", WITHOUT_CODE)
def test_features_without_a_code_are_refused(features, path, body):
    error_of(features.client.post(path, json=body, headers=BEARER), 422)


def test_a_model_of_features_takes_no_image(features):
    error = error_of(features.client.post("/search", files={"image": png(1)}), 422)
    assert error == "image: the model takes features, not images"


# Items --------------------------------------------------------------------------------------------


def listed(served, **options):
    answer = served.client.get("/items", params=options)
    assert answer.status_code == 200, answer.text
    items = answer.json()["items"]
    return items


def test_a_few_items_of_every_label_are_listed_first(served):
    items = listed(served, k=30)
    assert [item["labels"] for item in items] == [[str(c)] for c in range(10)] * 3
    assert listed(served, k=7) == items[:7]
    assert len({item["id"] for item in listed(served, k=1000)}) == 1000


def test_the_items_of_some_labels_are_listed(served):
    ids = {item["id"] for item in listed(served, k=1000, label=["3", "8"])}
    assert ids == set(np.flatnonzero(np.isin(CLASSES, [3, 8])).tolist())


def test_removed_items_are_not_listed(served):
    items = listed(served, k=30)
    for item in items[:3]:
        served.remove(item["id"])
    assert not {item["id"] for item in items[:3]} & {item["id"] for item in listed(served, k=1000)}


def test_items_are_found_by_name(served):
    first, second = (served.add(vector=VECTOR, name="a name", labels=["x"]) for _ in range(2))
    assert listed(served, name="a name", k=1) == [{"id": first, "name": "a name", "labels": ["x"]}]
    error = error_of(served.client.post("/search", json={"name": "a name"}), 409)
    assert error.startswith("2 items have the name 'a name'")
    served.remove(second)
    assert [item["id"] for item in listed(served, name="a name", label="x")] == [first]
    assert listed(served, name="a name", label="3") == []
    assert served.ids(name="a name", k=3) == served.ids(id=first, k=3)


def test_labels_are_counted(served):
    served.remove(int(np.flatnonzero(CLASSES == 3)[0]))
    served.add(vector=VECTOR, labels=["4", "new"])
    info = served.client.get("/info").json()
    expected = Counter(map(str, CLASSES.tolist())) + Counter(["4", "new"])
    expected["3"] -= 1
    assert dict(zip(info["labels"], info["label_counts"], strict=True)) == expected


def test_an_index_without_labels_lists_some_items(encoder, built, tmp_path):
    path = gpq.index(built / "model", built / "codes.h5", tmp_path / "i.faiss", names=False)
    with open_live(path) as live:
        client = client_of(Service(encoder, live))
        items = client.get("/items?k=30").json()["items"]
        assert len({item["id"] for item in items}) == 30
        assert client.get("/info").json()["labels"] == []


# Changes ------------------------------------------------------------------------------------------


def test_items_are_added_and_removed_at_once(served):
    answer = served.client.post("/items", files={"image": png(7)}, headers=BEARER)
    assert (answer.status_code, answer.json()) == (201, {"id": len(DIGITS)})
    assert len(DIGITS) in served.ids(id=7, k=40)
    served.remove(7)
    assert 7 not in served.ids(id=len(DIGITS), k=40)
    for method, path in (
        ("GET", "/items/7"),
        ("GET", "/items/7/thumbnail"),
        ("DELETE", "/items/7"),
    ):
        error = error_of(served.client.request(method, path, headers=BEARER), 404)
        assert error == "no item has the id 7"
    assert served.client.get("/healthz").json() == {"status": "ok", "ntotal": len(DIGITS)}


def test_added_items_have_their_own_name_and_labels(served):
    served.add(vector=VECTOR, id=5000, name="a new seven, é", labels=["7", "new", "7"])
    assert served.item(5000) == {"id": 5000, "name": "a new seven, é", "labels": ["7", "new"]}
    form = {"name": "from a form", "labels": ["a", "b"], "id": "5001"}
    served.client.post("/items", files={"image": png(3)}, data=form, headers=BEARER)
    assert served.item(5001) == {"id": 5001, "name": "from a form", "labels": ["a", "b"]}
    served.add(vector=VECTOR, id=6001)
    assert served.item(6001) == {"id": 6001}
    assert served.ids(vector=VECTOR, allow_labels=["new", "b"]) == [5000, 5001]


def test_an_id_given_again_has_nothing_of_the_old_item(served):
    served.remove(3)
    served.add(vector=VECTOR, id=3, name="new", labels=["new"])
    assert served.item(3) == {"id": 3, "name": "new", "labels": ["new"]}
    assert 3 not in served.ids(vector=VECTOR, k=1000, allow_labels=[str(CLASSES[3])])
    assert error_of(served.client.get("/items/3/thumbnail"), 404)


def test_an_id_beyond_the_largest_is_not_given(served):
    largest = 2**63 - 1
    assert served.add(vector=VECTOR, id=largest) == largest
    answer = served.client.post("/items", json={"vector": VECTOR}, headers=BEARER)
    assert "no larger id" in error_of(answer, 409)


def test_all_items_can_be_removed(features):
    for id_ in range(30):
        features.remove(id_)
    assert features.search(vector=VECTOR) == []
    assert features.add(vector=VECTOR) == 30
    assert features.ids(vector=VECTOR) == [30]


# Pictures -----------------------------------------------------------------------------------------


def test_the_picture_of_an_item_is_its_own(served):
    answer = served.client.get("/items/11/thumbnail")
    assert answer.headers["content-type"] == "image/png"
    pixels = np.asarray(Image.open(io.BytesIO(answer.content)).convert("L"))
    np.testing.assert_array_equal(pixels, DIGITS.pixels[11])


@pytest.fixture
def folder(tmp_path):
    """A folder of images of one colour each, and a service of its index."""
    images, model = (
        tmp_path / "images",
        make_model(tmp_path / "m", "images", image_size=8, backbone="mlp"),
    )
    for number, name in enumerate(("cat/a", "cat/b", "dog/c", "dog/d")):
        (images / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (300, 200), (60 * number, 0, 0)).save(images / f"{name}.png")
    codes = gpq.encode(model, f"folder:{images}", tmp_path / "c.h5")
    path = gpq.index(model, codes, tmp_path / "i.faiss")

    def open_service():
        live = open_live(path, writable=True)
        service = Service(
            Encoder.load(model), live, open_data(f"folder:{images}"), Settings(token=TOKEN)
        )
        return Served(client_of(service), service, path)

    return images, open_service


def colour(served, id_):
    """Return the red value of the picture of an item; None if there is none."""
    answer = served.client.get(f"/items/{id_}/thumbnail")
    if answer.status_code == 404:
        return None
    picture = Image.open(io.BytesIO(answer.content))
    assert picture.size == (192, 128)
    return round(picture.getpixel((50, 50))[0] / 60)


def test_pictures_are_found_by_name_in_a_folder_that_changed(folder):
    images, open_service = folder
    Image.new("RGB", (300, 200), (255, 0, 0)).save(images / "cat" / "0.png")
    (images / "cat" / "b.png").unlink()
    served = open_service()
    assert [colour(served, id_) for id_ in range(4)] == [0, None, 2, 3]
    assert served.item(1) == {"id": 1, "name": "cat/b.png", "labels": ["cat"]}


def test_a_picture_that_went_meanwhile_is_left_out(folder):
    images, open_service = folder
    served = open_service()
    (images / "dog" / "c.png").unlink()
    assert [colour(served, id_) for id_ in range(4)] == [0, 1, None, 3]
    assert served.ids(id=2, k=4)


def test_other_data_without_names_give_no_pictures(encoder, index_file, caplog):
    other = gpq.open_data(DIGITS.pixels[:100, :, :, None].repeat(3, axis=3))
    with open_live(index_file) as live, caplog.at_level(logging.WARNING):
        client = client_of(Service(encoder, live, other))
        assert "has no names, and is not the data that were indexed: no pictures" in caplog.text
        assert client.get("/items/3/thumbnail").status_code == 404
        assert client.get("/info").json()["thumbnails"] is False


def test_pictures_by_id_need_all_changes_of_the_index(served, built, tmp_path):
    served.remove(3)
    served.add(vector=VECTOR, id=3)
    path = gpq.index(built / "model", served.index_file, tmp_path / "new" / "index.faiss")
    for has_changes in (False, True):
        if has_changes:
            shutil.copy(changes_path(served.index_file), path.parent)
        with open_live(path) as live:
            client = client_of(Service(served.service.encoder, live, DIGITS))
            assert client.get("/info").json()["thumbnails"] is has_changes
            found = [client.get(f"/items/{id_}/thumbnail").status_code for id_ in (3, 4)]
            assert found == [404, 200 if has_changes else 404]


# Mistakes -----------------------------------------------------------------------------------------

SEARCHES = [
    ({"content": b"hello", "headers": {"content-type": "text/plain"}}, 422, "body"),
    ({"content": b'{"id": "\xff"}', "headers": JSON}, 400, "parsing the body"),
    ({"content": b"[" * 100_000, "headers": JSON}, 400, "parsing the body"),
    ({"content": b'{"id": ' + b"9" * 5000 + b"}", "headers": JSON}, 400, "parsing the body"),
    ({"content": b'{"vector": [NaN]}', "headers": JSON}, 422, "vector.0"),
    ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400, "boundary"),
    ({"content": iter([b"{}"]), "headers": JSON}, 413, "content-length"),
    ({"json": [1]}, 422, "body"),
    ({"json": {}}, 422, "give one of vector, features, id, name"),
    ({"json": {"id": 1, "vector": VECTOR}}, 422, "give one of"),
    ({"json": {"id": 1, "limit": 3}}, 422, "limit"),
    ({"json": {"id": "1"}}, 422, "id"),
    ({"json": {"id": 2**63}}, 422, "id"),
    ({"json": {"id": 1, "k": 0}}, 422, "k"),
    ({"json": {"id": 1, "k": 1001}}, 422, "1000"),
    ({"json": {"vector": [1.0]}}, 422, "vector"),
    ({"json": {"vector": [1e38] * 72}}, 422, "vector.0"),
    ({"json": {"features": [1.0]}}, 422, "takes images"),
    ({"json": {"id": 1, "allow_labels": ["10"]}}, 422, "no item has the label '10'"),
    ({"json": {"id": 1, "deny_ids": list(range(10_001))}}, 422, "deny_ids"),
    ({"json": {"id": -1}}, 404, "no item has the id -1"),
    ({"json": {"name": "none"}}, 404, "0 items have the name 'none'"),
    ({"files": {"image": png(1)[:60]}}, 422, "image"),
    ({"files": {"picture": png(1)}}, 422, "image"),
    ({"data": {"k": "ten"}, "files": {"image": png(1)}}, 422, "k"),
    ({"data": {"id": "1"}, "files": {"image": png(1)}}, 422, "id"),
]


@pytest.mark.parametrize(("request_", "status", "message"), SEARCHES)
def test_a_wrong_search_is_one_clear_line(served, request_, status, message):
    assert message in error_of(served.client.post("/search", **request_), status)


ADDITIONS = [
    ({"id": -1}, 422, "-1 marks"),
    ({"id": 5}, 409, "the id 5 is in use"),
    ({"k": 5}, 422, "k"),
    ({"vector": [0.0] * 72}, 422, "item"),
    ({"vector": VECTOR[1:]}, 422, "vector"),
    ({"vector": None}, 422, "give one of"),
    ({"name": ""}, 422, "name"),
    ({"name": "a\nb"}, 422, "name"),
    ({"name": "\ud800"}, 422, "name"),
    ({"labels": [""]}, 422, "labels.0"),
    ({"labels": ["a"] * 101}, 422, "labels"),
]


@pytest.mark.parametrize(("body", "status", "message"), ADDITIONS)
def test_a_wrong_addition_is_one_clear_line_and_changes_nothing(served, body, status, message):
    content = json.dumps({"vector": VECTOR, **body})
    answer = served.client.post("/items", content=content, headers={**BEARER, **JSON})
    assert message in error_of(answer, status)
    assert served.service.live.changes == {}


PATHS = [
    ("/items/x", 422, "id: "),
    (f"/items/{2**63}", 422, "id: "),
    ("/items/..%2f..%2fetc%2fpasswd", 404, ""),
    ("/page/..%2fapp.py", 404, ""),
    ("/search", 405, "Method Not Allowed"),
    ("/nothing", 404, "Not Found"),
    ("/items?k=0", 422, "k: "),
    ("/items?k=1001", 422, "k: 1001 is more than 1000"),
    ("/items?label=none", 422, "no item has the label 'none'"),
    ("/items?" + "&".join(["label=1"] * 51), 422, "label: "),
]


@pytest.mark.parametrize(("path", "status", "message"), PATHS)
def test_a_wrong_path_is_one_clear_line(served, path, status, message):
    assert message in error_of(served.client.get(path), status)


# Limits and safety --------------------------------------------------------------------------------


def test_uploads_are_limited_by_bytes_and_pixels(encoder, index_file):
    content = io.BytesIO()
    Image.new("L", (6000, 5000)).save(content, "PNG")
    with open_live(index_file) as live:
        client = client_of(Service(encoder, live, settings=Settings(max_upload=100_000)))
        error = error_of(client.post("/search", files={"image": content.getvalue()}), 422)
        assert "6000 x 5000 pixels" in error
        answer = client.post("/search", content=b" " * 100_001, headers=JSON)
        assert "at most 100,000 bytes" in error_of(answer, 413)


@pytest.mark.parametrize(
    "sent", [None, "Bearer wrong", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", "Bearer ÿ"]
)
@pytest.mark.parametrize(("method", "path"), [("DELETE", "/items/1"), ("POST", "/items")])
def test_writing_needs_the_token(served, method, path, sent):
    headers = {} if sent is None else {"authorization": sent.encode("latin-1")}
    answer = served.client.request(method, path, headers=headers)
    assert error_of(answer, 401) == "the token is missing or wrong"
    assert answer.headers["www-authenticate"] == "Bearer"


def test_reading_from_other_machines_needs_the_token(encoder, index_file):
    with open_live(index_file) as live:
        client = client_of(Service(encoder, live, settings=Settings(host="192.0.2.7", token=TOKEN)))
        for path in ("/info", "/items", "/items?k=x", "/items/1", "/items/1/thumbnail"):
            error_of(client.get(path), 401)
        for query in ({"json": {"id": 1}}, {"files": {"image": png(1)}}):
            error_of(client.post("/search", **query), 401)
            assert client.post("/search", **query, headers=BEARER).status_code == 200
        for path in ("/", "/healthz", "/page/page.js", "/docs"):
            assert client.get(path).status_code == 200


def test_a_read_only_service_refuses_changes(encoder, index_file):
    with open_live(index_file) as live:
        client = client_of(Service(encoder, live, settings=Settings(token=TOKEN)))
        for answer in (
            client.delete("/items/1", headers=BEARER),
            client.post("/items", json={"vector": VECTOR}, headers=BEARER),
            client.post("/items", files={"image": png(1)}, headers=BEARER),
        ):
            assert "read-only" in error_of(answer, 403)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(
            (host, 200)
            for host in ("127.0.0.1:8000", "LocalHost:8000", "[::1]:80", "Search.example:443")
        ),
        *(
            (host, 400)
            for host in ("evil.example", "127.0.0.1.evil.example", "[::1", "127.0.0.1/evil.example")
        ),
    ],
)
def test_other_host_names_are_refused(encoder, index_file, host, status):
    with open_live(index_file) as live:
        client = client_of(
            Service(encoder, live, settings=Settings(allowed_hosts=("search.example",)))
        )
        assert client.get("/info", headers={"host": host}).status_code == status


@pytest.mark.parametrize("path", ["/", "/page/page.js", "/info", "/nothing", "/items/1/thumbnail"])
def test_every_answer_forbids_what_comes_from_elsewhere(served, path):
    headers = served.client.get(path).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"


def test_the_page_needs_nothing_from_elsewhere(served):
    folder = Path(gpq.__file__).parent / "serve" / "page"
    files = sorted(folder.iterdir())
    assert len(files) > 3
    for file in files:
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not any(
            part in text for part in ("http://", "https://", "innerHTML", "style=", "<style")
        )
    page = served.client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.text == (folder / "index.html").read_text()


def test_the_requests_are_described_for_programs(served):
    content = served.client.get("/openapi.json").json()["paths"]["/search"]["post"]["requestBody"][
        "content"
    ]
    assert content["multipart/form-data"]["schema"]["required"] == ["image"]
    assert "application/json" in content
    assert "swagger" in served.client.get("/docs").text
