"""The same input and seed give the same bytes, whenever a command runs: no product holds a time."""

import numpy as np
from commands import content, done, fill

from gpq_faiss.store.hdf5 import read_arrays

GRID = 'methods = ["gpq", "pq"]\nbits = [12]\nseeds = [0]\nlabelled = "20-per-class"\npreset = "paper"\n'
CALLS = """
train DATA --labels LABELS --preset paper --set training.steps=6 --config SETTINGS --out ./model
encode ./model DATA --labels LABELS --out ./codes.h5
export-faiss ./model --out ./empty.faiss
export ./model --to numpy --out ./codebooks.npz
export ./model --to factory --out ./factory.faiss
export-encoder ./model --out ./encoder.onnx
export-encoder ./model --out ./encoder.pt2
index ./model ./codes.h5 --out ./flat.faiss
index ./model ./codes.h5 --kind fastscan --out ./fastscan.faiss
index ./model ./codes.h5 --kind ivf --out ./ivf.faiss
index ./model ./codes.h5 --kind fused --no-ids --out ./fused.faiss
index ./model ./codes.h5 --out ./index.lists
index ./model ./flat.faiss --out ./flat-of-index.faiss
search ./model ./flat.faiss QUERIES -k 3 --format json --out ./found.json
search IMAGE_MODEL IMAGE_INDEX PHOTO -k 2 --images folder:IMAGES --format png --out ./found.png
evaluate ./model DATA --labels LABELS --format json --out ./png.json --plot ./curve.png
evaluate ./model DATA --labels LABELS --format json --out ./svg.json --plot ./curve.svg
evaluate ./model DATA --labels LABELS --format json --out ./pdf.json --plot ./curve.pdf
experiment run ./grid.toml DATA --labels LABELS --set training.steps=8 --out ./runs
"""
"""One output of every command and form."""


def test_every_product_has_the_same_bytes(shop, tmp_path):
    """Made some seconds apart, by which HDF5, zip and PDF count."""
    one, two = tmp_path / "one", tmp_path / "two"
    for root in (one, two):
        root.mkdir()
        (root / "grid.toml").write_text(GRID)
        for call in CALLS.strip().splitlines():
            done(
                *[str(root / word) if word.startswith("./") else word for word in fill(call, shop)]
            )
    first, second = content(one), content(two)
    runs = [name for name in first if name.startswith("runs/") and name.endswith(".h5")]
    for made in (first, second):
        # How long each step took is in the metrics and in one attribute of a run, and nowhere else.
        for name in (*runs, "model/metrics.jsonl"):
            assert made.pop(name)
    assert first == second
    assert len(first) > 25
    assert len(runs) == 2
    for name in runs:
        (arrays, about), (others, about_other) = (
            read_arrays(root / name, "a run") for root in (one, two)
        )
        assert [made.pop("seconds") for made in (about, about_other)]
        assert about == about_other
        np.testing.assert_equal(arrays, others)
