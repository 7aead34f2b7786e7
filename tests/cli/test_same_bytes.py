"""The same input and seed give the same bytes, whenever a command runs: no product holds a time."""

from commands import content, done

DATA = "features:features.npy --labels labels.npy"
CALLS = [
    f"train {DATA} --preset run.toml --set training.steps=6 --out NEW/model",
    f"encode NEW/model {DATA} --out NEW/codes.h5",
    "export-faiss NEW/model --kind fastscan --out NEW/empty.faiss",
    "export NEW/model --to numpy --out NEW/codebooks.npz",
    "export NEW/codes.h5 --to parquet --out NEW/codes.parquet",
    "export-encoder NEW/model --out NEW/encoder.onnx",
    "export-encoder NEW/model --side items --out NEW/encoder.pt2",
    "index NEW/model NEW/codes.h5 --out NEW/flat.faiss",
    "index NEW/model NEW/codes.h5 --kind ivf --out NEW/ivf.faiss",
    "index NEW/model NEW/codes.h5 --kind fused --no-ids --out NEW/fused.faiss",
    "index NEW/model NEW/codes.h5 --out NEW/index.lists",
    "search NEW/model NEW/flat.faiss queries.npy -k 3 --out NEW/results.json",
    "search NEW/model NEW/flat.faiss queries.npy -k 3 --out NEW/results.parquet",
    "search image-model image.faiss images/a/0.png --images folder:images --out NEW/results.png",
    f"evaluate NEW/model {DATA} --out NEW/report.json --plot NEW/curve.pdf --run NEW/run.trec",
    f"evaluate NEW/model {DATA} --out NEW/report.csv --plot NEW/curve.svg",
]


def test_every_product_has_the_same_bytes(folder):
    """They are made some seconds apart, by which HDF5, zip and PDF count."""
    for call in CALLS:
        done(call.replace("NEW", "one"))
    for call in CALLS:
        done(call.replace("NEW", "two"))
    first, second = content(folder / "one"), content(folder / "two")
    assert len(first) > 20
    assert first.keys() == second.keys()
    # How long each step took is in the metrics, and nowhere else.
    assert {name for name in first if first[name] != second[name]} <= {"model/metrics.jsonl"}
