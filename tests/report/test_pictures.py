"""Plots and galleries: written in every format, with content, wholly or not at all."""

import numpy as np
import pytest
from PIL import Image

from gpq_faiss.errors import DataError, OutputExistsError, UsageError
from gpq_faiss.report.gallery import Cell, save_gallery
from gpq_faiss.report.plots import plot_curves

MAGIC = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}
R = np.random.default_rng(0)
LEVELS = np.linspace(0, 1, 11)
AXES = {"x": "x", "y": "y"}
CURVES = {"GPQ": (LEVELS, 1 - LEVELS), "PQ": (LEVELS, 0.5 - LEVELS / 2), "point": ([0.5], [0.5])}
BITS = {"GPQ": ([12, 48], [0.55, 0.7], [0.07, 0.0]), "PQ": ([12, 48], [0.2, 0.3], [0.0, 0.0])}
SMALL = [R.integers(0, 256, (8, 8), dtype=np.uint8) for _ in range(4)]
PHOTO = R.integers(0, 256, (90, 160, 3), dtype=np.uint8)
ROWS = [
    [
        Cell(SMALL[0], "7"),
        *map(Cell, SMALL[1:], ("7 · 3.00", "1 · 2.00", "? · 1.00"), (True, False, None)),
    ],
    [Cell(PHOTO, ""), Cell(PHOTO[::-1], "0.50")],
]

DRAW = {
    "curves": lambda path, **o: plot_curves(CURVES, path, **AXES, **o),
    "bits": lambda path, **o: plot_curves(BITS, path, **AXES, title="mAP", **o),
    "gallery": lambda path, **o: save_gallery(ROWS, path, **o),
}


@pytest.mark.parametrize("name", DRAW)
def test_pictures_have_content_and_are_not_replaced_unasked(name, tmp_path):
    path = DRAW[name](tmp_path / "out.png")
    pixels = np.asarray(Image.open(path).convert("RGB"))
    assert min(pixels.shape[:2]) >= 300
    assert 0.01 < (pixels != 255).any(axis=2).mean() < 0.9
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 20
    with pytest.raises(OutputExistsError, match="--overwrite"):
        DRAW[name](path)


@pytest.mark.parametrize("suffix", MAGIC)
def test_written_as_the_ending_says_and_the_same_each_time(suffix, tmp_path):
    path = DRAW["gallery"](tmp_path / f"out{suffix}")
    before = path.read_bytes()
    assert before.startswith(MAGIC[suffix])
    assert len(before) > 4000
    assert DRAW["gallery"](path, overwrite=True).read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_frames_tell_relevance_and_small_images_keep_their_edges(tmp_path):
    board = (np.indices((8, 8)).sum(axis=0) % 2 * 255).astype(np.uint8)

    def colours(relevant):
        path = save_gallery(
            [[Cell(board, ""), Cell(board, "1.00", relevant)]], tmp_path / "g.png", overwrite=True
        )
        pixels = np.asarray(Image.open(path).convert("RGB"))[40:-50]  # without the key beneath
        assert (pixels < 10).all(axis=2).sum() > 10_000  # smoothing would leave grey
        return {tuple(int(v) for v in c) for c in np.unique(pixels.reshape(-1, 3), axis=0)}

    frames = {(0x1A, 0x98, 0x50), (0xD7, 0x30, 0x27)}
    assert frames & colours(True) == {(0x1A, 0x98, 0x50)}
    assert frames & colours(False) == {(0xD7, 0x30, 0x27)}
    assert not frames & colours(None)


def test_bad_input_is_refused_before_anything_is_written(tmp_path):
    for error, draw in (
        (UsageError, lambda: DRAW["curves"](tmp_path / "x.gif")),
        (DataError, lambda: plot_curves({}, tmp_path / "x.png", **AXES)),
    ):
        with pytest.raises(error):
            draw()
    assert list(tmp_path.iterdir()) == []
