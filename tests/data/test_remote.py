"""Data at URLs, from a server that the test starts: copied once into the cache, checked at each
opening, never half there.
"""

import functools
import http.server
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from image_files import png, put, refused, save, shard

import gpq_faiss as gpq
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
            sends = self.command == "GET"
            asked.extend([self.path] * (sends and not self.path.endswith("/")))
            if "forbidden" in self.path:
                self.send_error(403)
            elif "cut" not in self.path:
                super().do_GET() if sends else super().do_HEAD()
            else:
                self.send_response(200)
                self.send_header("Content-Length", "5000")
                self.end_headers()
                self.close_connection = sends
                self.wfile.write(b"only this" * sends)

        do_HEAD = do_GET

        def log_message(self, *args):
            """Nothing is printed."""

    make = functools.partial(Handler, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), make) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield SimpleNamespace(
            root=root, asked=asked, url=f"http://127.0.0.1:{server.server_address[1]}"
        )
        server.shutdown()
        thread.join()


def test_files_are_copied_once_and_again_when_they_change(site):
    save(site.root / "x.npy", X)
    save(site.root / "y.csv", "id,label\n" + "".join(f"{i},c{i % 2}\n" for i in range(12)))
    save(site.root / "ids.txt", "".join(f"{i}\n" for i in range(12)))
    for _ in range(2):
        dataset = gpq.open_data(
            f"features:{site.url}/x.npy", labels=f"{site.url}/y.csv", ids=f"{site.url}/ids.txt"
        )
        np.testing.assert_array_equal(dataset.read(slice(None)), X)
        assert dataset.require_labels().class_ids().tolist() == [i % 2 for i in range(12)]
        assert dataset.name == f"features:{site.url}/x.npy"
    save(site.root / "x.npy", 2 * np.concatenate([X, X]))
    np.testing.assert_array_equal(
        gpq.open_data(f"features:{site.url}/x.npy").read(slice(0, 12)), 2 * X
    )
    assert (sorted(site.asked[:3]), site.asked[3:]) == (
        ["/ids.txt", "/x.npy", "/y.csv"],
        ["/x.npy"],
    )


def test_shards_images_and_tables(site):
    put(site.root, "a/0.png", "a/1.png")
    save(site.root / "t.csv", "image,label\na/0.png,x\n")
    for k in range(2):
        shard(site.root / f"s-{k}.tar", {f"{k}.png": png(k)})
    image = gpq.open_data(f"folder:{site.root}/a").read(slice(0, 1))[0]
    shards = gpq.open_data(f"webdataset:{site.url}/s-{{0..1}}.tar")
    query = open_queries(f"{site.url}/a/0.png?token=1")
    assert (shards.texts["name"].tolist(), query.name) == (["0", "1"], f"{site.url}/a/0.png")
    for data in (shards, query):
        np.testing.assert_array_equal(data.read(slice(0, 1))[0], image)
    refused(f"csv:{site.url}/t.csv", "none of its 1 images exists.*--read root")
    assert len(gpq.open_data(f"csv:{site.url}/t.csv", root=str(site.root))) == 1


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
