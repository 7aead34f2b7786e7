"""The service over HTTP, in this process: answers, limits, and one line for each mistake."""

import io
import logging

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_factory import digits, make_model
from PIL import Image
from served import BEARER, TOKEN, Served, client_of, open_live

import gpq_faiss as gpq
from gpq_faiss import Encoder, export_encoder, open_data, open_encoder
from gpq_faiss.errors import DataError
from gpq_faiss.indexes.opening import open_index
from gpq_faiss.serve.schemas import Settings
from gpq_faiss.serve.service import Service

DIGITS = digits()
IDS = np.arange(len(DIGITS))
CLASSES = DIGITS.labels.dense().argmax(axis=1)
VECTOR = [1.0] * 72
JSON = {"content-type": "application/json"}


def png(row):
    content = io.BytesIO()
    Image.fromarray(DIGITS.image(row)).save(content, "PNG")
    return content.getvalue()


def vector_of(encoder, row):
    return encoder.embed(DIGITS.read(slice(row, row + 1)), queries=True)[0]


def nearest(served, vector, k, **filters):
    D, ids = open_index(served.index_file).search(vector, k, **filters)
    return [pair for pair in zip(ids[0].tolist(), D[0].tolist(), strict=True) if pair[0] != -1]


def results_of(answer):
    assert answer.status_code == 200, answer.text
    return [(result["id"], result["score"]) for result in answer.json()["results"]]


def error_of(answer, status):
    assert answer.status_code == status, answer.text
    (error,) = answer.json().values()
    assert "\n" not in error
    return error


# Searches -----------------------------------------------------------------------------------------


def test_an_image_an_item_and_a_vector_find_the_nearest(served, encoder):
    vector = vector_of(encoder, 7)
    allow = np.setdiff1d(np.flatnonzero(np.isin(CLASSES, [7, 8])), [7, 9])
    expected = nearest(served, vector, 20, allow=allow)
    filters = {"k": "20", "allow_labels": ["7", "8"], "deny_ids": ["7", "9"]}
    answer = served.client.post("/search/image", files={"image": png(7)}, data=filters)
    assert results_of(answer) == expected
    for query in ({"id": 7}, {"vector": vector[0].tolist()}):
        body = {**query, "k": 20, "allow_labels": ["7", "8"], "deny_ids": [7, 9]}
        assert results_of(served.client.post("/search", json=body)) == expected


id_lists = st.lists(st.integers(0, 2000) | st.just(10**15), max_size=60)
label_lists = st.lists(st.sampled_from("0123456789"), max_size=4)
names = {"allow_ids": id_lists, "deny_ids": id_lists}
names |= {"allow_labels": label_lists, "deny_labels": label_lists}


@settings(max_examples=30, suppress_health_check=list(HealthCheck), deadline=None)
@given(filters=st.fixed_dictionaries({}, optional=names))
def test_filters_are_those_of_the_index(served, encoder, filters):
    labels = CLASSES.astype(str)
    passed = np.isin(IDS, filters.get("allow_ids", IDS))
    passed &= np.isin(labels, filters.get("allow_labels", labels))
    passed &= ~np.isin(IDS, filters.get("deny_ids", [-1]))
    passed &= ~np.isin(labels, filters.get("deny_labels", ["-"]))
    expected = nearest(served, vector_of(encoder, 3), 12, allow=np.flatnonzero(passed))
    assert results_of(served.client.post("/search", json={"id": 3, **filters, "k": 12})) == expected


def test_an_item_without_a_picture_is_searched_by_its_code(encoder, index_file):
    vector = open_index(index_file).reconstruct(4)
    with open_live(index_file) as live:
        served = Served(client_of(Service(encoder, live)), index_file)
        assert served.search(id=4) == served.search(vector=vector.tolist())
        assert "no picture" in error_of(served.client.get("/items/4/thumbnail"), 404)


def test_a_file_of_codes_is_served_as_an_index(served, encoder, built):
    with open_live(built / "codes.h5") as live:
        codes = Served(client_of(Service(encoder, live, DIGITS)), live.path)
        query = {"id": 7, "allow_labels": ["7"], "k": 99}
        assert codes.search(**query) == served.search(**query)


def test_a_network_in_onnx_answers_searches(built, served, tmp_path):
    pytest.importorskip("onnxscript", reason="the extra 'onnx' is not installed")
    encoder = open_encoder(export_encoder(built / "model", tmp_path / "encoder.onnx"))
    with open_live(built / "index.faiss") as live:
        onnx = Served(client_of(Service(encoder, live, DIGITS)), live.path)
        scores = [[result["score"] for result in side.search(id=5)] for side in (onnx, served)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


# Models of features -------------------------------------------------------------------------------


@pytest.fixture
def features(tmp_path):
    """A service of features, with the features as its data."""
    x = np.random.default_rng(0).standard_normal((30, 20)).astype(np.float32)
    np.savez(tmp_path / "x.npz", features=x, names=[f"item {row}" for row in range(30)])
    model, data = make_model(tmp_path / "model"), open_data(f"features:{tmp_path / 'x.npz'}")
    file = gpq.index(model, gpq.encode(model, data, tmp_path / "c.h5"), tmp_path / "i.faiss")
    with open_live(file, writable=True) as live:
        service = Service(Encoder.load(model), live, data, Settings(token=TOKEN))
        yield Served(client_of(service), file)


def test_features_an_id_and_a_name_find_the_nearest(features, tmp_path):
    x = np.load(tmp_path / "x.npz")["features"][3]
    expected = nearest(features, Encoder.load(tmp_path / "model").embed([x], queries=True)[0], 30)
    for query in ({"id": 3}, {"name": "item 3"}, {"features": x.tolist()}):
        assert results_of(features.client.post("/search", json={**query, "k": 30})) == expected


def test_added_features_have_the_code_of_the_indexed_ones(features, tmp_path):
    added = features.add(features=np.load(tmp_path / "x.npz")["features"][3].tolist())
    index = open_index(features.index_file)
    np.testing.assert_array_equal(index.code_of(added), index.code_of(3))


@pytest.mark.parametrize("path", ["/search", "/items"])
@pytest.mark.parametrize(
    "body", [{"features": [0.0] * 20}, {"features": [1.0]}, {"vector": VECTOR[1:]}]
)
def test_features_without_a_code_are_refused(features, path, body):
    error_of(features.client.post(path, json=body, headers=BEARER), 422)


def test_all_items_can_be_removed(features):
    for id_ in range(30):
        features.remove(id_)
    assert features.search(vector=VECTOR) == []
    assert features.items() == []
    assert features.add(vector=VECTOR) == 30
    assert features.ids(vector=VECTOR) == [30]


# Items --------------------------------------------------------------------------------------------


def test_a_few_items_of_every_label_are_listed_first(served):
    items = served.items(k=30)
    assert [item["labels"] for item in items] == [[str(c)] for c in range(10)] * 3
    assert served.items(k=7) == items[:7]


def test_items_are_found_by_name(served):
    first, second = (served.add(vector=VECTOR, name="a name", labels=["x"]) for _ in range(2))
    assert served.items(name="a name", k=1) == [{"id": first, "name": "a name", "labels": ["x"]}]
    error = error_of(served.client.post("/search", json={"name": "a name"}), 409)
    assert error.startswith("2 items have the name 'a name'")
    served.remove(second)
    assert [item["id"] for item in served.items(name="a name", label="x")] == [first]
    assert served.items(name="a name", label="3") == []
    assert served.ids(name="a name", k=3) == served.ids(id=first, k=3)


def test_items_without_labels_are_listed(features):
    assert len({item["id"] for item in features.items(k=7)}) == 7
    assert features.call("GET", "/info")["labels"] == []


# Changes ------------------------------------------------------------------------------------------


def test_items_are_added_and_removed_at_once(served):
    assert served.call("POST", "/items/image", 201, files={"image": png(7)}) == {"id": len(DIGITS)}
    assert len(DIGITS) in served.ids(id=7, k=40)
    served.remove(7)
    assert 7 not in served.ids(id=len(DIGITS), k=40)
    assert 7 not in {item["id"] for item in served.items(k=1000, label="7")}
    for method, path in (
        ("GET", "/items/7"),
        ("GET", "/items/7/thumbnail"),
        ("DELETE", "/items/7"),
    ):
        assert served.call(method, path, 404) == {"error": "no item has the id 7"}
    assert served.call("GET", "/healthz") == {"status": "ok", "ntotal": len(DIGITS)}


def test_an_added_item_has_its_own_name_and_labels(served):
    form = {"name": "a new seven, é", "labels": ["7", "new", "7"], "id": "5000"}
    served.client.post("/items/image", files={"image": png(3)}, data=form, headers=BEARER)
    assert served.call("GET", "/items/5000") == {
        "id": 5000,
        "name": "a new seven, é",
        "labels": ["7", "new"],
    }
    served.add(vector=VECTOR, id=6001)
    assert served.call("GET", "/items/6001") == {"id": 6001}
    assert served.ids(vector=VECTOR, allow_labels=["new"]) == [5000]


def test_an_id_given_again_has_nothing_of_the_old_item(served):
    served.remove(3)
    served.add(vector=VECTOR, id=3, name="new", labels=["new"])
    assert served.call("GET", "/items/3") == {"id": 3, "name": "new", "labels": ["new"]}
    assert 3 not in served.ids(vector=VECTOR, k=1000, allow_labels=[str(CLASSES[3])])
    assert "no picture" in error_of(served.client.get("/items/3/thumbnail"), 404)


# Pictures -----------------------------------------------------------------------------------------


def test_the_picture_of_an_item_is_its_own(served):
    answer = served.client.get("/items/11/thumbnail")
    assert answer.headers["content-type"] == "image/png"
    pixels = np.asarray(Image.open(io.BytesIO(answer.content)).convert("RGB"))
    np.testing.assert_array_equal(pixels, DIGITS.image(11))


@pytest.fixture
def folder(tmp_path):
    """A folder of images of one colour each, with a model and an index of them."""
    model = make_model(tmp_path / "model", "images", image_size=8, backbone="mlp")
    for number, name in enumerate(("cat/a", "cat/b", "dog/c", "dog/d")):
        path = tmp_path / "images" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (300, 200), (60 * number, 0, 0)).save(path)
    codes = gpq.encode(model, f"folder:{tmp_path / 'images'}", tmp_path / "c.h5")
    gpq.index(model, codes, tmp_path / "index.faiss")
    return tmp_path


def colour(client, id_):
    """Return the red value of the picture of an item; None if there is none."""
    answer = client.get(f"/items/{id_}/thumbnail")
    if answer.status_code == 404:
        return None
    return round(Image.open(io.BytesIO(answer.content)).getpixel((50, 50))[0] / 60)


def test_pictures_are_found_by_name_but_not_for_added_items(folder, caplog):
    images = folder / "images"
    Image.new("RGB", (300, 200), (255, 0, 0)).save(images / "cat" / "0.png")
    (images / "cat" / "b.png").unlink()
    Image.new("RGB", (300, 200), (255, 0, 0)).save(images / "dog" / "c.png")
    encoder, data = Encoder.load(folder / "model"), open_data(f"folder:{images}")
    with open_live(folder / "index.faiss", writable=True) as live:
        client = client_of(Service(encoder, live, data, Settings(token=TOKEN)))
        assert "have changed since they were encoded" in caplog.text
        added = Served(client, live.path).add(vector=VECTOR, name="dog/d.png")
        assert [colour(client, id_) for id_ in range(4)] == [0, None, None, 3]
        assert colour(client, added) is None


def test_other_data_without_names_give_no_pictures(encoder, index_file, caplog):
    pixels = gpq.open_data(np.stack(DIGITS.read(slice(0, 100))))
    with open_live(index_file) as live, caplog.at_level(logging.WARNING):
        client = client_of(Service(encoder, live, pixels))
        assert "is not the data that were indexed: no pictures" in caplog.text
        error_of(client.get("/items/3/thumbnail"), 404)


def test_pictures_by_id_need_all_changes_of_the_index(served, encoder, built, tmp_path):
    served.remove(3)
    served.add(vector=VECTOR, id=3)
    path = gpq.index(built / "model", served.index_file, tmp_path / "new" / "index.faiss")
    with open_live(path) as live:
        error_of(client_of(Service(encoder, live, DIGITS)).get("/items/4/thumbnail"), 404)
    result = gpq.search(built / "model", served.index_file, DIGITS, rows="3", k=1)
    with pytest.raises(DataError, match="or a service has changed it"):
        result.draw(DIGITS, DIGITS, tmp_path / "results.png")


# Mistakes -----------------------------------------------------------------------------------------

SEARCHES = [
    ({"content": b"hello", "headers": {"content-type": "text/plain"}}, 422, "body"),
    ({"content": b'{"id": "\xff"}', "headers": JSON}, 400, "parsing the body"),
    ({"content": b"[" * 100_000, "headers": JSON}, 400, "parsing the body"),
    ({"content": b'{"vector": [NaN]}', "headers": JSON}, 422, "vector.0"),
    ({"content": iter([b"{}"]), "headers": JSON}, 413, "content-length"),
    ({"content": b"{bad", "headers": JSON}, 422, "an object of JSON"),
    ({"content": b'{"id": 1}'}, 422, "content-type: application/json"),
    ({"json": {}}, 422, "give one of vector, features, id, name"),
    ({"json": {"id": 1, "vector": VECTOR}}, 422, "give one of"),
    ({"json": {"id": 1, "limit": 3}}, 422, "limit"),
    ({"json": {"id": "1"}}, 422, "id"),
    ({"json": {"id": 2**63}}, 422, "id"),
    ({"json": {"id": 1, "k": 0}}, 422, "k"),
    ({"json": {"id": 1, "k": 1001}}, 422, "1000"),
    ({"json": {"vector": [1e38] * 72}}, 422, "vector.0"),
    ({"json": {"features": [1.0]}}, 422, "takes images"),
    ({"json": {"id": 1, "allow_labels": ["10"]}}, 422, "no item has the label '10'"),
    ({"json": {"id": -1}}, 404, "no item has the id -1"),
    ({"json": {"name": "none"}}, 404, "0 items have the name 'none'"),
    ({"files": {"image": png(1)}}, 422, "body"),
]
IMAGE_SEARCHES = [
    ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400, "boundary"),
    ({"files": {"image": png(1)[:60]}}, 422, "image"),
    ({"files": {"picture": png(1)}}, 422, "image"),
    ({"data": {"id": "1"}, "files": {"image": png(1)}}, 422, "id"),
    ({"json": {"id": 1}}, 422, "image"),
    ({"data": {"image": "a.png"}}, 422, "image: a file is needed"),
]


@pytest.mark.parametrize(("request_", "status", "message"), SEARCHES)
def test_a_wrong_search_is_one_clear_line(served, request_, status, message):
    assert message in error_of(served.client.post("/search", **request_), status)


@pytest.mark.parametrize(("request_", "status", "message"), IMAGE_SEARCHES)
def test_a_wrong_search_by_image_is_one_clear_line(served, request_, status, message):
    assert message in error_of(served.client.post("/search/image", **request_), status)


ADDITIONS = [
    ({"id": -1}, 422, "id"),
    ({"id": 5}, 409, "the id 5 is in use"),
    ({"k": 5}, 422, "k"),
    ({"vector": [0.0] * 72}, 422, "item"),
    ({"vector": None}, 422, "give one of"),
    ({"name": "a\nb"}, 422, "name"),
    ({"labels": [""]}, 422, "labels.0"),
]


@pytest.mark.parametrize(("body", "status", "message"), ADDITIONS)
def test_a_wrong_addition_is_one_clear_line_and_changes_nothing(served, body, status, message):
    error = served.call("POST", "/items", status, json={"vector": VECTOR, **body})["error"]
    assert message in error
    assert served.client.get("/healthz").json()["ntotal"] == len(DIGITS)


PATHS = [
    ("/items/x", 422, "id: "),
    ("/page/..%2fapp.py", 404, ""),
    ("/search", 405, "Method Not Allowed"),
    ("/items?k=1001", 422, "k: 1001 is more than 1000"),
    ("/items?labels=1", 422, "labels: Extra inputs are not permitted"),
    ("/items?label=none", 422, "no item has the label 'none'"),
    ("/items?" + "&".join(["label=1"] * 1001), 422, "label: "),
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
        answers = [
            client.post("/search/image", files={"image": image})
            for image in (content.getvalue(), bytes(100_001))
        ]
    assert "6000 x 5000 pixels" in error_of(answers[0], 422)
    assert "at most 100,000 bytes" in error_of(answers[1], 413)


@pytest.mark.parametrize("sent", [None, f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", "Bearer ÿ"])
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
        for path, query in (
            ("/search", {"json": {"id": 1}}),
            ("/search/image", {"files": {"image": png(1)}}),
        ):
            error_of(client.post(path, **query), 401)
            assert client.post(path, **query, headers=BEARER).status_code == 200
        assert client.get("/").status_code == 200


def test_a_read_only_service_refuses_changes(encoder, index_file):
    with open_live(index_file) as live:
        client = client_of(Service(encoder, live, settings=Settings(token=TOKEN)))
        for answer in (
            client.delete("/items/1", headers=BEARER),
            client.post("/items", json={"vector": VECTOR}, headers=BEARER),
            client.post("/items/image", files={"image": png(1)}, headers=BEARER),
        ):
            assert "read-only" in error_of(answer, 403)


@pytest.mark.parametrize(
    ("host", "status"),
    [("LocalHost:8000", 200), ("Search.example:443", 200), ("127.0.0.1.evil.example", 400)],
)
def test_other_host_names_are_refused(encoder, index_file, host, status):
    with open_live(index_file) as live:
        options = Settings(allowed_hosts=("search.example",))
        client = client_of(Service(encoder, live, settings=options))
        assert client.get("/info", headers={"host": host}).status_code == status


@pytest.mark.parametrize("path", ["/", "/page/page.js", "/info", "/nothing", "/items/1/thumbnail"])
def test_every_answer_forbids_content_from_other_sites(served, path):
    policy = served.client.get(path).headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy


def test_the_requests_are_described_for_programs(served):
    assert "url: 'openapi.json'" in served.client.get("/docs").text.replace('"', "'")
    paths = served.client.get("/openapi.json").json()["paths"]
    for path, kind in (("/search", "application/json"), ("/search/image", "multipart/form-data")):
        assert [*paths[path]["post"]["requestBody"]["content"]] == [kind]
