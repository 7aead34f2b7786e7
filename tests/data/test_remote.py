"""Data at URLs, from a server that the test starts: copied once into the cache, checked at each opening, never half there."""

from __future__ import annotations

import functools
import http.server
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from image_files import png, put

import gpq_faiss as gpq
from gpq_faiss.data.base import ImageDataset
from gpq_faiss.data.paths import cache_folder, files_of, is_url, local_path, without_secrets
from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.stages.queries import open_queries

X = np.random.default_rng(0).standard_normal((12, 4)).astype(np.float32)


class Handler(http.server.SimpleHTTPRequestHandler):
    """Files of a folder; requests are counted, and some answers are bad."""

    def do_GET(self) -> None:
        server: Any = self.server
        server.asked.append(self.path)
        if "cut" in self.path:
            self.send_response(200)
            self.send_header("Content-Length", "5000")
            self.end_headers()
            self.wfile.write(b"only this")
            self.close_connection = True
        elif "forbidden" in self.path:
            self.send_error(403)
        else:
            super().do_GET()

    def do_HEAD(self) -> None:
        if "cut" in self.path:
            self.send_response(200)
            self.send_header("Content-Length", "5000")
            self.end_headers()
        elif "forbidden" in self.path:
            self.send_error(403)
        else:
            super().do_HEAD()

    def log_message(self, format: str, *args: Any) -> None:
        del format, args


class Site:
    """A folder and its URL."""

    def __init__(self, root: Path, server: Any) -> None:
        self.root, self._server = root, server
        self.url = f"http://127.0.0.1:{server.server_address[1]}"

    def asked(self) -> list[str]:
        """Paths of the files that were sent since the last call."""
        asked, self._server.asked = self._server.asked, []
        return [path for path in asked if not path.endswith("/")]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("GPQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    root = tmp_path / "site"
    root.mkdir()
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(root))
    )
    server.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield Site(root, server)
    server.shutdown()
    server.server_close()
    thread.join()


def save(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, array)


def test_features_and_labels_are_copied_once_and_again_when_they_change(site: Site) -> None:
    save(site.root / "x.npy", X)
    (site.root / "y.csv").write_text("id,label\n" + "".join(f"{i},c{i % 2}\n" for i in range(12)))
    (site.root / "ids.txt").write_text("".join(f"{i}\n" for i in range(12)))
    given: dict[str, Any] = {"labels": f"{site.url}/y.csv", "ids": f"{site.url}/ids.txt"}
    for _ in range(2):
        dataset = gpq.open_data(f"features:{site.url}/x.npy", **given)
        np.testing.assert_array_equal(dataset.read(slice(None)), X)
        assert dataset.labels is not None
        assert dataset.labels.class_ids().tolist() == [i % 2 for i in range(12)]
        assert dataset.name == f"features:{site.url}/x.npy"
    assert sorted(site.asked()) == ["/ids.txt", "/x.npy", "/y.csv"]
    save(site.root / "x.npy", 2 * np.concatenate([X, X]))
    np.testing.assert_array_equal(gpq.open_data(f"features:{site.url}/x.npy").read(slice(0, 12)), 2 * X)
    assert site.asked() == ["/x.npy"]


@pytest.mark.parametrize("harm", ["changed", "shorter", "without its origin", "gone"])
def test_a_copy_that_is_not_whole_is_made_anew(site: Site, harm: str) -> None:
    save(site.root / "x.npy", X)
    copy = local_path(f"{site.url}/x.npy")
    site.asked()
    content = copy.read_bytes()
    origin = copy.with_name("x.npy.origin.json")
    if harm == "changed":
        copy.write_bytes(content[:-1] + b"\0" if content[-1] else content[:-1] + b"\1")
    elif harm == "shorter":
        copy.write_bytes(content[:-1])
    elif harm == "gone":
        copy.unlink()
    else:
        origin.write_text("{")
    assert local_path(f"{site.url}/x.npy").read_bytes() == content
    assert site.asked() == ["/x.npy"]
    assert json.loads(origin.read_text())["url"] == f"{site.url}/x.npy"


def test_shards_and_folders_of_images(site: Site, tmp_path: Path) -> None:
    import tarfile

    put(site.root / "images", "a/0.png", "a/1.png", "b/2.png", "b/.hidden/3.png")
    (site.root / "images" / "notes.txt").write_text("x")
    for k in range(2):
        with tarfile.open(site.root / f"s-{k}.tar", "w") as tar:
            tar.add(site.root / "images" / "a" / f"{k}.png", f"{k}.png")
    folder = gpq.open_data(f"folder:{site.url}/images")
    assert isinstance(folder, ImageDataset)
    local = gpq.open_data(f"folder:{site.root}/images")
    assert folder.texts["name"].tolist() == local.texts["name"].tolist() == ["a/0.png", "a/1.png", "b/2.png"]
    assert folder.labels is not None
    assert folder.labels.class_names == ("a", "b")
    for one, other in zip(folder.read(slice(None)), local.read(slice(None)), strict=True):
        np.testing.assert_array_equal(one, other)
    shards = gpq.open_data(f"webdataset:{site.url}/s-{{0..1}}.tar")
    assert shards.texts["name"].tolist() == ["0", "1"]
    np.testing.assert_array_equal(shards.read(slice(1, 2))[0], local.read(slice(1, 2))[0])
    archive = gpq.open_data(f"folder:{site.url}/s-0.tar")
    assert archive.texts["name"].tolist() == ["0.png"]
    query = open_queries(f"{site.url}/images/a/0.png?token=1")
    assert query.name == f"{site.url}/images/a/0.png"
    np.testing.assert_array_equal(query.read(slice(None))[0], local.read(slice(0, 1))[0])
    (site.root / "images" / "a" / "1.png").unlink()
    with pytest.raises(DataError, match=r"1 of 3 images cannot be read \(.*/images/a/1.png: not found\)"):
        folder.read(slice(None))


def test_files_in_memory_by_a_pattern(site: Site) -> None:
    del site
    memory = fsspec.filesystem("memory")
    for k in (0, 2, 10):
        with memory.open(f"/shards/x-{k}.npy", "wb") as file:
            np.save(file, X + k)
    try:
        dataset = gpq.open_data("features:memory://shards/x-*.npy")
        np.testing.assert_array_equal(dataset.read(slice(None)), np.concatenate([X, X + 2, X + 10]))
        with memory.open("/images/a/0.png", "wb") as file:
            file.write(png(0))
        assert len(gpq.open_data("folder:memory://images")) == 1
    finally:
        memory.store.clear()


def test_tables_of_images_need_their_folder(site: Site) -> None:
    put(site.root, "a/0.png")
    (site.root / "t.csv").write_text("image,label\na/0.png,x\n")
    with pytest.raises(UsageError, match="where are its images"):
        gpq.open_data(f"csv:{site.url}/t.csv")
    assert len(gpq.open_data(f"csv:{site.url}/t.csv", root=str(site.root))) == 1


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("features:URL/none.npy", "/none.npy not found"),
        ("features:URL/none-{0..1}.npy", "/none-0.npy not found"),
        ("features:URL/cut.npy", r"/cut.npy (cannot be read|was cut off)"),
        ("features:URL/forbidden.npy", "/forbidden.npy cannot be read .403"),
        ("features:URL/text.npy", "is not a .npy array"),
        ("features:URL/forbidden.npy?token=secret", "forbidden"),
        ("folder:URL/none", "/none (not found|contains no images)"),
        ("folder:URL/empty", "contains no images"),
        ("webdataset:URL/text.tar", "not a readable tar|no samples"),
        ("hf:URL/hub", "is not a folder"),
        ("features:http://127.0.0.1:1/x.npy", "cannot be read"),
        ("http://127.0.0.1:1/x.npy?token=secret", "cannot be read"),
        ("features:nosuch://x/x.npy", "there is no file system for nosuch://"),
        ("features:s3://bucket/x.npy", "needs another package .*s3fs"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_leaves_nothing(site: Site, spec: str, why: str) -> None:
    (site.root / "empty").mkdir()
    for name in ("text.npy", "text.tar"):
        (site.root / name).write_text("hello " * 200)
    with pytest.raises((DataError, UsageError), match=why) as caught:
        gpq.open_data(spec.replace("URL", site.url)).read(slice(None))
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)
    left = {path.name for path in cache_folder().rglob("*") if path.is_file()}
    assert not {name for name in left if "text" not in name}


def test_a_copy_that_cannot_be_written_is_one_line(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(site.root / "x.npy", X)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GPQ_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="cannot write"):
        gpq.open_data(f"features:{site.url}/x.npy")


@pytest.mark.parametrize(
    ("missing", "url"), [("fsspec", "memory://x.npy"), ("aiohttp", "https://host/x.npy")]
)
def test_without_the_extra(missing: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(DataError, match=r"reading .* needs .*: pip install 'gpq-faiss\[remote\]'"):
        gpq.open_data(f"features:{url}")


def test_what_is_a_url_and_what_is_told_of_it() -> None:
    assert is_url("https://u:p@host/a.npy?sig=1")
    assert without_secrets("https://u:p@host:80/a.npy?sig=1#x") == "https://host:80/a.npy"
    for path in ("a.npy", "/a/b", "C:/x", "a:b", "~/x"):
        assert not is_url(path)
        assert without_secrets(path) == path


def test_ranges_and_patterns(tmp_path: Path) -> None:
    for name in ("x-08.npy", "x-09.npy", "x-10.npy", "{1..2}.npy"):
        (tmp_path / name).write_text("")
    assert [path.name for path in files_of(f"{tmp_path}/x-{{08..10}}.npy")] == [
        "x-08.npy",
        "x-09.npy",
        "x-10.npy",
    ]
    assert [path.name for path in files_of(f"{tmp_path}/x-{{8..9}}.npy")] == ["x-8.npy", "x-9.npy"]
    assert [path.name for path in files_of(f"{tmp_path}/x-*.npy")] == ["x-08.npy", "x-09.npy", "x-10.npy"]
    assert [path.name for path in files_of(f"{tmp_path}/{{1..2}}.npy")] == ["{1..2}.npy"]
