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
from gpq_faiss.report.figure import COLOURS
from gpq_faiss.report.gallery import Ranked, save_gallery
from gpq_faiss.report.maps import FlatCodebook, cell_borders, plot_codebooks, plot_scatters
from gpq_faiss.report.plots import plot_curves, plot_heat_map, plot_tradeoff

MAGIC = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}
R = np.random.default_rng(0)
LEVELS = np.linspace(0, 1, 11)
AXES = {"x": "x", "y": "y"}
CLASSES = [f"class {i}" for i in range(30)]
POINTS, CLASS_OF = R.standard_normal((4, 2)), np.array([-1, 3, 12, 29])
Z = R.standard_normal((16, 2))
Z /= np.linalg.norm(Z, axis=1, keepdims=True)
GROUPS = {
    "ours": {"exact": ([2000.0], [0.7]), "lists": ([4000.0, 9000.0, 2500.0], [0.69, 0.6, 0.7])},
    "theirs": {"graph": ([1000.0], [0.4])},
}
CURVES = {"GPQ": (LEVELS, 1 - LEVELS), "PQ": (LEVELS, 0.5 - LEVELS / 2)}
BITS = {"GPQ": ([12, 48], [0.55, 0.7], [0.07, 0.0]), "PQ": ([12, 48], [0.2, 0.3], [0.0, 0.0])}
SMALL = [R.integers(0, 256, (8, 8), dtype=np.uint8) for _ in range(4)]
PHOTO = R.integers(0, 256, (90, 160, 3), dtype=np.uint8)
ROWS = [
    Ranked(SMALL[0], SMALL[1:], np.array([3.0, 2.0, 1.0]), [True, False, None], "7", ["7", "1", "?"]),
    Ranked(PHOTO, [PHOTO[::-1]]),
]

DRAW = {
    "curves": lambda path, **o: plot_curves(CURVES, path, **AXES, log_x=False, **o),
    "bits": lambda path, **o: plot_curves(BITS, path, **AXES, title="mAP", from_zero=False, **o),
    "tradeoff": lambda path, **o: plot_tradeoff(GROUPS, path, x="queries per second", y="mAP@100", **o),
    "heat": lambda path, **o: plot_heat_map(
        [[0.1, np.nan], [0.3, 0.4]], path, rows="ab", columns="cd", **AXES, **o
    ),
    "scatters": lambda path, **o: plot_scatters({"a": (POINTS, CLASS_OF)}, CLASSES, path, title="t", **o),
    "codebooks": lambda path, **o: plot_codebooks(
        [FlatCodebook("a", Z, POINTS, CLASS_OF)], CLASSES, path, **o
    ),
    "gallery": lambda path, **o: save_gallery(ROWS, path, title="nearest", **o),
}


@pytest.mark.parametrize("name", DRAW)
def test_written_as_the_ending_says_and_the_same_each_time(name, tmp_path):
    for suffix, magic in MAGIC.items():
        path = DRAW[name](tmp_path / f"out{suffix}")
        assert path.read_bytes().startswith(magic)
        assert path.stat().st_size > 4000
    assert {p.name for p in tmp_path.iterdir()} == {f"out{suffix}" for suffix in MAGIC}
    pixels = np.asarray(Image.open(tmp_path / "out.png").convert("RGB"))
    assert min(pixels.shape[:2]) >= 300
    assert 0.01 < (pixels != 255).any(axis=2).mean() < 0.9
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 20
    with pytest.raises(OutputExistsError, match="--overwrite"):
        DRAW[name](tmp_path / "out.svg")
    before = (tmp_path / "out.svg").read_bytes()
    assert DRAW[name](tmp_path / "out.svg", overwrite=True).read_bytes() == before


def test_a_tradeoff_is_a_colour_a_group_and_a_line_in_the_order_of_speed(tmp_path):
    drawn = DRAW["tradeoff"](tmp_path / "t.svg").read_text().lower()
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


def test_borders_of_cells_are_equally_near_to_two_codewords():
    angles = cell_borders(Z)
    assert (np.diff(angles) > 0).all()
    nearness = np.sort(np.stack([np.cos(angles), np.sin(angles)], axis=1) @ Z.T, axis=1)
    np.testing.assert_allclose(nearness[:, -1], nearness[:, -2], atol=1e-12)
    # Each cell has one codeword.
    cells = np.searchsorted(angles, np.arctan2(Z[:, 1], Z[:, 0])) % 16
    assert sorted(cells) == list(range(16))


@pytest.mark.parametrize(
    ("error", "draw"),
    [
        (UsageError, lambda out: DRAW["curves"](out.with_suffix(".gif"))),
        (DataError, lambda out: plot_curves({}, out, **AXES)),
        (DataError, lambda out: plot_curves({"a": ([0, 1], [1])}, out, **AXES)),
        (DataError, lambda out: plot_tradeoff({}, out, **AXES)),
        (DataError, lambda out: plot_tradeoff({"a": {}}, out, **AXES)),
        (DataError, lambda out: plot_tradeoff({"a": {"b": ([1, 2], [1])}}, out, **AXES)),
        (DataError, lambda out: plot_tradeoff({"a": {"b": ([0], [1])}}, out, **AXES)),
        (DataError, lambda out: plot_heat_map([[1.0]], out, rows="ab", columns="c", **AXES)),
        (DataError, lambda out: plot_heat_map([[np.nan]], out, rows="a", columns="c", **AXES)),
        (DataError, lambda out: plot_scatters({}, [], out)),
        (DataError, lambda out: plot_scatters({"a": (np.zeros((4, 3)), CLASS_OF)}, CLASSES, out)),
        (DataError, lambda out: plot_codebooks([], [], out)),
        (
            DataError,
            lambda out: plot_codebooks([FlatCodebook("a", np.zeros((4, 3)), POINTS, CLASS_OF)], CLASSES, out),
        ),
        (DataError, lambda out: save_gallery([], out)),
        (UsageError, lambda out: save_gallery(ROWS, out, columns=0)),
        (DataError, lambda out: save_gallery([Ranked(SMALL[0].astype(float), SMALL)], out)),
        (DataError, lambda out: save_gallery([Ranked(PHOTO, [PHOTO], scores=[1.0, 2.0])], out)),
        (DataError, lambda out: save_gallery([Ranked(PHOTO, [np.zeros((8, 8, 4), np.uint8)])], out)),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(error, draw, tmp_path):
    with pytest.raises(error) as caught:
        draw(tmp_path / "x.png")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_matplotlib_is_loaded_only_to_draw_and_pyplot_never():
    code = (
        "import sys, tempfile, os\n"
        "from gpq_faiss.report.plots import plot_curves\n"
        "import gpq_faiss.report.gallery, gpq_faiss.report.maps\n"
        "assert 'matplotlib' not in sys.modules\n"
        "plot_curves({'a': ([0, 1], [1, 0])}, os.path.join(tempfile.mkdtemp(), 'a.png'), x='x', y='y')\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert not {'torch', 'faiss', 'h5py'} & set(sys.modules)\n"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
