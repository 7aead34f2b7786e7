"""An application developer: a folder of pictures and a table of labels; a service that finds similar ones by upload."""

from __future__ import annotations

import csv
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from commands import done, refused
from PIL import Image, ImageDraw

TOKEN = "a-token-of-this-journey"  # noqa: S105
KINDS = ("ring", "cross", "bar")
BEARER = {"authorization": f"Bearer {TOKEN}"}


def picture(kind: str, rng: np.random.Generator) -> Image.Image:
    image = Image.fromarray(rng.integers(90, 160, (48, 64, 3), dtype=np.uint8))
    draw, x, y = ImageDraw.Draw(image), int(rng.integers(4, 36)), int(rng.integers(2, 20))
    colour = tuple(int(value) for value in rng.integers(0, 80, 3))
    if kind == "ring":
        draw.ellipse([x, y, x + 24, y + 24], outline=colour, width=5)
    elif kind == "cross":
        draw.line([x, y, x + 24, y + 24], fill=colour, width=6)
        draw.line([x + 24, y, x, y + 24], fill=colour, width=6)
    else:
        draw.rectangle([x, y + 8, x + 26, y + 16], fill=colour)
    return image


def as_bytes(image: Image.Image) -> bytes:
    held = io.BytesIO()
    image.save(held, "JPEG", quality=92)
    return held.getvalue()


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder with 150 pictures in ``photos``, and ``labels.csv`` of half of them."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    Path("photos").mkdir()
    with open("labels.csv", "w", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(["image", "label"])
        for i in range(150):
            kind = KINDS[i % 3]
            (Path("photos") / f"img_{i:04d}.jpg").write_bytes(as_bytes(picture(kind, rng)))
            if i % 2:
                table.writerow([f"img_{i:04d}.jpg", kind])
    return tmp_path


@pytest.fixture
def service(photos: Path) -> Iterator[httpx.Client]:
    """``gpq serve`` of the pictures, trained and indexed by commands."""
    training = "--preset paper --bits 24 --set network.backbone=mlp --set network.image_size=24 --set training.steps=40"
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
    assert popen.stderr is not None
    said = []
    for line in popen.stderr:
        said.append(line)
        if "serving 150 items at " in line:
            break
    else:
        raise AssertionError("".join(said))
    threading.Thread(target=popen.stderr.read, daemon=True).start()
    address = line.split("serving 150 items at ")[1].split("/ ")[0]
    with httpx.Client(base_url=address, timeout=30) as client:
        yield client
    popen.send_signal(signal.SIGTERM)
    assert popen.wait(30) == 0


def test_pictures_are_found_added_and_removed_over_http(service: httpx.Client, photos: Path) -> None:
    assert "<html" in service.get("/").text
    rng = np.random.default_rng(7)
    query = as_bytes(picture("ring", rng))
    sent = service.post("/search", files={"image": query}, data={"k": "5"})
    assert sent.status_code == 200, sent.text
    results = sent.json()["results"]
    assert len(results) == 5
    for one in results:
        assert (photos / "photos" / one["name"]).is_file()
        number = int(one["name"][4:8])
        assert one.get("labels") == ([KINDS[number % 3]] if number % 2 else None)
    small = service.get(f"/items/{results[0]['id']}/thumbnail")
    assert small.headers["content-type"].startswith("image/")
    assert max(Image.open(io.BytesIO(small.content)).size) <= 192

    # Only pictures of one label.
    crosses = service.post("/search", files={"image": query}, data={"k": "5", "allow_labels": "cross"}).json()
    assert all(one["labels"] == ["cross"] for one in crosses["results"])

    # A new picture, under its name; and away with it.
    new = as_bytes(picture("ring", rng))
    refused = service.post("/items", files={"image": new})
    assert refused.status_code == 401
    added = service.post(
        "/items", files={"image": new}, data={"name": "new.jpg", "labels": "ring"}, headers=BEARER
    )
    assert added.status_code == 201, added.text
    number = added.json()["id"]
    assert service.get(f"/items/{number}").json() == {"id": number, "name": "new.jpg", "labels": ["ring"]}
    found = service.post("/search", files={"image": new}, data={"k": "1000"}).json()["results"]
    assert next(one for one in found if one["id"] == number)["name"] == "new.jpg"
    assert service.delete(f"/items/{number}", headers=BEARER).status_code == 200
    assert service.get(f"/items/{number}").status_code == 404
    assert service.post("/search", files={"image": b"no image"}).status_code == 422


def test_pictures_that_memory_cannot_hold_are_refused(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpq_faiss.inputs.available_memory", lambda: 4 << 30)
    line = refused("train folder:photos --labels labels.csv --labelled all --preset paper --out model")
    assert "images of 224 pixels per side" in line
    assert "lower network.image_size" in line
