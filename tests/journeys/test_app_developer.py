"""An application developer: a folder of pictures and a table of labels; a service that finds similar ones by upload."""

import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest
from commands import done, refused
from PIL import Image

TOKEN = "a-token-of-this-journey"  # noqa: S105
KINDS = ("ring", "cross", "bar")
BEARER = {"authorization": f"Bearer {TOKEN}"}


def picture(seed):
    image = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (48, 64, 3), dtype=np.uint8))
    held = io.BytesIO()
    image.save(held, "JPEG", quality=92)
    return held.getvalue()


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """The working folder with 150 pictures in ``photos``, and ``labels.csv`` of half of them."""
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    for i in range(150):
        Path(f"photos/img_{i:04d}.jpg").write_bytes(picture(i))
    lines = [f"img_{i:04d}.jpg,{KINDS[i % 3]}" for i in range(1, 150, 2)]
    Path("labels.csv").write_text("\n".join(["image,label", *lines]))
    return tmp_path


@pytest.fixture
def service(photos):
    """``gpq serve`` of the pictures, trained and indexed by commands."""
    training = "--preset paper --bits 24 --set network.backbone=mlp --set network.image_size=24 --set training.steps=10"
    done(f"train folder:photos --labels labels.csv --labelled all {training} --out model")
    done("encode model folder:photos --labels labels.csv --out codes.h5")
    done("index model codes.h5 --out index.faiss")
    call = "serve index.faiss --model model --data folder:photos --labels labels.csv --writable --port 0"
    popen = subprocess.Popen(
        [sys.executable, "-m", "gpq_cli", *call.split()],
        env={**os.environ, "GPQ_SERVE_TOKEN": TOKEN},
        stderr=subprocess.PIPE,
        text=True,
    )
    said = []
    while not said or "serving 150 items at " not in said[-1]:
        said.append(popen.stderr.readline())
        assert said[-1], "".join(said)
    threading.Thread(target=popen.stderr.read, daemon=True).start()
    address = said[-1].split("serving 150 items at ")[1].split("/ ")[0]
    with httpx.Client(base_url=address, timeout=30) as client:
        yield client
    popen.send_signal(signal.SIGTERM)
    assert popen.wait(30) == 0


def test_pictures_are_found_added_and_removed_over_http(service, photos):
    def search(picture, **options):
        answer = service.post("/search", files={"image": picture}, data=options)
        assert answer.status_code == 200, answer.text
        return answer.json()["results"]

    assert "<html" in service.get("/").text
    query, new = picture(1000), picture(1001)
    results = search(query, k=5)
    assert len(results) == 5
    for one in results:
        assert (photos / "photos" / one["name"]).is_file()
        number = int(one["name"][4:8])
        assert one.get("labels") == ([KINDS[number % 3]] if number % 2 else None)
    small = service.get(f"/items/{results[0]['id']}/thumbnail")
    assert small.headers["content-type"].startswith("image/")
    assert max(Image.open(io.BytesIO(small.content)).size) <= 192
    # Only pictures of one label.
    assert all(one["labels"] == ["cross"] for one in search(query, k=5, allow_labels="cross"))
    # A new picture, under its name; and away with it.
    item = {"files": {"image": new}, "data": {"name": "new.jpg", "labels": "ring"}}
    assert service.post("/items", **item).status_code == 401
    added = service.post("/items", **item, headers=BEARER)
    assert added.status_code == 201, added.text
    number = added.json()["id"]
    assert service.get(f"/items/{number}").json() == {"id": number, "name": "new.jpg", "labels": ["ring"]}
    assert [one["name"] for one in search(new, k=1000) if one["id"] == number] == ["new.jpg"]
    assert service.delete(f"/items/{number}", headers=BEARER).status_code == 200
    assert service.get(f"/items/{number}").status_code == 404
    assert service.post("/search", files={"image": b"no image"}).status_code == 422


def test_pictures_that_memory_cannot_hold_are_refused(photos, monkeypatch):
    monkeypatch.setattr("gpq_faiss.inputs.available_memory", lambda: 4 << 30)
    line = refused("train folder:photos --labels labels.csv --labelled all --preset paper --out model")
    assert "images of 224 pixels per side" in line
    assert "lower network.image_size" in line
