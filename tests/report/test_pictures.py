"""Plots and galleries: written in every format, with content, wholly or not at all, and without global
state."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gpq_faiss.errors import DataError, OutputExistsError, UsageError
from gpq_faiss.evaluation.tables import Spread
from gpq_faiss.report.figure import COLOURS
from gpq_faiss.report.gallery import Ranked, save_gallery
from gpq_faiss.report.plots import plot_map_bits, plot_pr_curves, plot_tradeoff, plot_validation

LEVELS = np.linspace(0, 1, 11)
MAGIC = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}


def draw_pr(path, **options):
    return plot_pr_curves({"GPQ": (LEVELS, 1 - LEVELS), "PQ": (LEVELS, 0.5 - LEVELS / 2)}, path, **options)


def draw_bits(path, **options):
    series = {"GPQ": {12: [0.5, 0.6], 48: Spread(0.7, 0.01, 3)}, "PQ": {12: 0.2, 48: 0.3}}
    return plot_map_bits(series, path, title="mAP", **options)


def draw_validation(path, **options):
    return plot_validation({"seed 0": ([0, 100, 400], [0.1, 0.5, 0.4])}, path, **options)


def draw_tradeoff(path, **options):
    groups = {
        "ours": {"exact": ([2000.0], [0.7]), "lists": ([4000.0, 9000.0, 2500.0], [0.69, 0.6, 0.7])},
        "theirs": {"graph": ([1000.0], [0.4])},
    }
    return plot_tradeoff(groups, path, x="queries per second", y="mAP@100", **options)


def draw_gallery(path, **options):
    r = np.random.default_rng(0)
    small = [r.integers(0, 256, (8, 8), dtype=np.uint8) for _ in range(4)]
    photo = r.integers(0, 256, (90, 160, 3), dtype=np.uint8)
    rows = [
        Ranked(small[0], small[1:], np.array([3.0, 2.0, 1.0]), [True, False, None], "7", ["7", "1", "?"]),
        Ranked(photo, [photo[::-1]]),
    ]
    return save_gallery(rows, path, title="nearest", **options)


DRAW = [draw_pr, draw_bits, draw_validation, draw_tradeoff, draw_gallery]


@pytest.mark.parametrize("draw", DRAW)
@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_written_as_the_ending_says(draw, suffix, tmp_path):
    path = draw(tmp_path / f"out{suffix}")
    assert path.read_bytes().startswith(MAGIC[suffix])
    assert path.stat().st_size > 4000
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    if suffix == ".png":
        pixels = np.asarray(Image.open(path).convert("RGB"))
        assert min(pixels.shape[:2]) >= 300
        assert 0.01 < (pixels != 255).any(axis=2).mean() < 0.9
        assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 20


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_equal_pictures_are_equal_files(tmp_path, suffix):
    one, two = (draw_bits(tmp_path / f"{name}{suffix}") for name in "ab")
    assert one.read_bytes() == two.read_bytes()


def test_a_tradeoff_is_a_colour_a_group_and_a_line_in_the_order_of_speed(tmp_path):
    drawn = draw_tradeoff(tmp_path / "t.svg").read_text().lower()
    for i, colour in enumerate(COLOURS[:3]):
        assert (f"stroke: {colour.lower()}" in drawn) == (i < 2)
    lines = re.findall(r'd="m ([^"]+)" clip-path="[^"]+" style="fill: none; stroke: #0072b2', drawn)
    (lists,) = [line for line in lines if line.count("l") == 2]
    across = [float(pair.split()[0]) for pair in lists.split("l")]
    assert across == sorted(across)


def test_frames_tell_relevance(tmp_path):
    black = np.zeros((8, 8), dtype=np.uint8)

    def colours(relevant):
        path = save_gallery([Ranked(black, [black], relevant=relevant)], tmp_path / "g.png", overwrite=True)
        pixels = np.asarray(Image.open(path).convert("RGB"))[40:-50]  # without the key beneath
        return {tuple(int(v) for v in c) for c in np.unique(pixels.reshape(-1, 3), axis=0)}

    green, red = (0x1A, 0x98, 0x50), (0xD7, 0x30, 0x27)
    assert green in colours([True])
    assert red not in colours([True])
    assert red in colours([False])
    assert green not in colours([False])
    assert not {green, red} & colours(None)


def test_small_images_keep_their_edges(tmp_path):
    board = (np.indices((8, 8)).sum(axis=0) % 2 * 255).astype(np.uint8)
    path = save_gallery([Ranked(board, [board])], tmp_path / "g.png")
    pixels = np.asarray(Image.open(path).convert("L"))
    assert (pixels < 10).sum() > 10_000  # smoothing would leave grey


@pytest.mark.parametrize("draw", DRAW)
def test_an_existing_file_is_kept_unless_told(draw, tmp_path):
    path = tmp_path / "x.png"
    path.write_bytes(b"mine")
    with pytest.raises(OutputExistsError, match="--overwrite"):
        draw(path)
    assert path.read_bytes() == b"mine"
    assert draw(path, overwrite=True).read_bytes().startswith(MAGIC[".png"])


def test_bad_input_is_refused_before_anything_is_written(tmp_path):
    image = np.zeros((8, 8), dtype=np.uint8)
    out = tmp_path / "x.png"
    cases = [
        (UsageError, lambda: draw_pr(tmp_path / "x.gif")),
        (DataError, lambda: plot_pr_curves({}, out)),
        (DataError, lambda: plot_pr_curves({"a": ([0, 1], [1])}, out)),
        (DataError, lambda: plot_tradeoff({}, out, x="x", y="y")),
        (DataError, lambda: plot_tradeoff({"a": {}}, out, x="x", y="y")),
        (DataError, lambda: plot_tradeoff({"a": {"b": ([1, 2], [1])}}, out, x="x", y="y")),
        (DataError, lambda: plot_tradeoff({"a": {"b": ([0], [1])}}, out, x="x", y="y")),
        (DataError, lambda: save_gallery([], out)),
        (UsageError, lambda: save_gallery([Ranked(image, [image])], out, columns=0)),
        (DataError, lambda: save_gallery([Ranked(image.astype(float), [image])], out)),
        (DataError, lambda: save_gallery([Ranked(image, [image], scores=[1.0, 2.0])], out)),
        (DataError, lambda: save_gallery([Ranked(image, [np.zeros((8, 8, 4), dtype=np.uint8)])], out)),
    ]
    for error, call in cases:
        with pytest.raises(error) as caught:
            call()
        assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_matplotlib_is_loaded_only_to_draw_and_pyplot_never():
    code = (
        "import sys, tempfile, os\n"
        "from gpq_faiss.report.plots import plot_pr_curves\n"
        "import gpq_faiss.report.gallery\n"
        "assert 'matplotlib' not in sys.modules\n"
        "plot_pr_curves({'a': ([0, 1], [1, 0])}, os.path.join(tempfile.mkdtemp(), 'a.png'))\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert not {'torch', 'faiss', 'h5py'} & set(sys.modules)\n"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
