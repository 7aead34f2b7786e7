"""Data at URLs, from a server that the test starts: copied once into the cache, checked at each
opening, never half there.
"""

import functools
import http.server
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from image_files import png, refused, save, shard

import gpq_faiss as gpq
from gpq_faiss.data.images import decode_image
from gpq_faiss.data.paths import cache_folder
from gpq_faiss.stages.search import open_queries

X = np.random.default_rng(0).standard_normal((12, 4)).astype(np.float32)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder and its URL, with the paths of the files that were sent; some answers are bad."""
    monkeypatch.setenv("GPQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    root, asked = tmp_path / "site", []
    root.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            if "forbidden" in self.path:
                self.send_error(403)
            elif "cut" in self.path:
                self.send_response(200)
                self.send_header("Content-Length", "5000")
                self.end_headers()
                self.close_connection = True
                self.wfile.write(b"only this")
            else:
                super().do_GET()

        def log_message(self, *args):
            """Nothing is printed."""

    make = functools.partial(Handler, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), make) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        yield SimpleNamespace(root=root, asked=asked, url=url)
        server.shutdown()


def test_files_are_copied_once_and_again_when_they_change(site):
    source, file = f"features:{site.url}/x.npy", save(site.root / "x.npy", X)
    labels = save(site.root / "y.npy", np.arange(12) % 2)
    for _ in range(2):
        dataset = gpq.open_data(source, labels=f"{site.url}/{labels.name}")
        np.testing.assert_array_equal(dataset.read(slice(None)), X)
        assert dataset.require_labels().dense().argmax(axis=1).tolist() == [
            i % 2 for i in range(12)
        ]
    assert sorted(site.asked) == ["/x.npy", "/y.npy"]
    save(file, 2 * np.concatenate([X, X]))
    np.testing.assert_array_equal(gpq.open_data(source).read(slice(0, 12)), 2 * X)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("features:URL/none-{0..1}.npy", "/none-0.npy cannot be read .404"),
        ("features:URL/cut.npy", "/cut.npy cannot be read"),
        ("features:URL/forbidden.npy?token=secret", "/forbidden.npy cannot be read .403"),
        ("features:URL/text.npy", "is not a .npy array"),
        (
            "http://u:secret@127.0.0.1:1/x.npy?token=secret#secret",
            "http://127.0.0.1:1/x.npy cannot be read",
        ),
        ("features:nosuch://x/x.npy", "Protocol not known: nosuch"),
        ("features:s3://bucket/x.npy", "cannot be read .*s3fs"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_leaves_nothing(site, spec, message):
    save(site.root / "text.npy", "hello " * 200)
    assert "secret" not in refused(spec.replace("URL", site.url), message)
    files = {path.name for path in cache_folder().rglob("*") if path.is_file()}
    assert files <= {"text.npy"}


def test_shards_and_images(site):
    for k in range(2):
        save(site.root / f"{k}.png", png(k))
        shard(site.root / f"s-{k}.tar", {f"{k}.png": png(k)})
    shards = gpq.open_data(f"webdataset:{site.url}/s-{{0..1}}.tar")
    query = open_queries(f"{site.url}/0.png?token=1")
    assert (shards.texts["name"].tolist(), query.name) == (["0", "1"], f"{site.url}/0.png")
    for data in (shards, query):
        np.testing.assert_array_equal(data.read(slice(0, 1))[0], decode_image(png(0)))
