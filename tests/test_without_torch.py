"""What a machine that only searches does without torch: an installation of the extra ``search``
alone.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from model_factory import make_model, random_input

import gpq_faiss as gpq
from gpq_faiss.errors import MismatchError, UsageError

pytest.importorskip("onnxscript", reason="the extra 'onnx' is not installed")
pytest.importorskip("onnxruntime", reason="the extra 'onnx' is not installed")

N, Q, WIDTH = 300, 12, 20

# What the extra ``train`` brings, and all else that the base and ``search`` do not.
BLOCKED = """
import sys
for name in (
    "torch", "torchvision", "sklearn", "scipy", "onnx", "onnxscript", "pyarrow", "timm", "fastapi"
):
    sys.modules[name] = None
"""
COMMANDS = f"""{BLOCKED}
import json, contextlib, io
import gpq_faiss
from click.testing import CliRunner
from gpq_cli.main import cli
answers = []
for call in json.loads(sys.argv[1]):
    if call[0] == "index":  # a light machine opens files that another made, too
        gpq_faiss.open_index(sys.argv[2])
    result = CliRunner().invoke(cli, ["-q", *call], prog_name="gpq")
    answers.append([result.exit_code, result.stdout, result.stderr])
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def shop(tmp_path_factory, encoders):
    """A folder with what a machine with torch made: codes, an index and the encoder in ONNX; and
    labelled queries.
    """
    folder = tmp_path_factory.mktemp("shop")
    shutil.copytree(encoders[0], folder / "model")
    shutil.copy(encoders[1], folder)
    for name, n in (("items", N), ("queries", Q)):
        np.save(folder / f"{name}.npy", random_input("features", n, seed=n))
        np.save(folder / f"{name}-labels.npy", np.random.default_rng(n).integers(0, 3, n))
        data = gpq.open_data(f"features:{folder}/{name}.npy", labels=f"{folder}/{name}-labels.npy")
        gpq.encode(folder / "model", data, folder / f"{name}.h5")
    gpq.index(folder / "model", folder / "items.h5", folder / "index.faiss")
    return folder


def in_process(shop, code, calls):
    """Exit code, stdout and stderr of commands in a process that begins with ``code``."""
    words = json.dumps([call.split() for call in calls])
    completed = subprocess.run(
        [sys.executable, "-c", code, words, str(shop / "index.faiss")],
        capture_output=True,
        text=True,
        check=False,
        cwd=shop,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    assert completed.returncode == 0, completed.stderr
    return [(code, out, err) for code, out, err in json.loads(completed.stdout)]


WORKING = [
    "--help",
    *(f"{name} --help" for name in ("search", "index", "info", "export", "evaluate")),
    *(f"{name} --help" for name in ("train", "encode", "serve", "experiment")),
    *(f"info {name} --format json" for name in ("items.h5", "index.faiss", "encoder.onnx")),
    "index model items.h5 --kind ivf --out lists.faiss",
    "export-faiss model --out empty.faiss",
    "export model --to numpy --out codebooks.npz",
    "info model --format json",
    "search encoder.onnx index.faiss queries.npy -k 5 --format json",
    "evaluate encoder.onnx features:queries.npy --labels queries-labels.npy --codes items.h5"
    " --format json",
]
NEEDS_TORCH = [
    "train features:items.npy --labels items-labels.npy --out other",
    "encode model features:items.npy --out other.h5",
    "search model index.faiss queries.npy",
    "evaluate model features:items.npy --labels items-labels.npy",
    "export-encoder model --out other.onnx",
    "search encoder.onnx index.faiss digits",
]


def test_what_needs_no_torch_runs(shop):
    answers = in_process(shop, COMMANDS, WORKING)
    assert [
        (call, stderr) for call, (code, _, stderr) in zip(WORKING, answers, strict=True) if code
    ] == []
    model, ranked, measured = (json.loads(stdout) for _, stdout, _ in answers[-3:])
    assert model == json.loads(json.dumps(gpq.info(shop / "model"))) | {"path": "model"}
    expected = gpq.search(shop / "model", shop / "index.faiss", str(shop / "queries.npy"), k=5)
    assert [query["ids"] for query in ranked["queries"]] == expected.ids.tolist()
    queries = gpq.open_data(f"features:{shop}/queries.npy", labels=f"{shop}/queries-labels.npy")
    evaluation = gpq.evaluate(shop / "model", queries, codes=shop / "items.h5", ks=(1, 10))
    assert measured["map"] == pytest.approx(evaluation.ranking.map, abs=1e-9)


def test_what_needs_torch_names_the_extra(shop):
    for call, (code, _, stderr) in zip(
        NEEDS_TORCH, in_process(shop, COMMANDS, NEEDS_TORCH), strict=True
    ):
        assert (code, len(stderr.splitlines())) == (2, 1), (call, stderr)
        assert "pip install 'gpq-faiss[train]'" in stderr


def test_misused_onnx_file_is_refused(shop, tmp_path):
    onnx = shop / "encoder.onnx"
    queries = gpq.open_data(f"features:{shop}/queries.npy", labels=f"{shop}/queries-labels.npy")
    with pytest.raises(UsageError, match="runs on the CPU"):
        gpq.open_encoder(onnx, "cuda")
    with pytest.raises(UsageError, match="queries only"):
        gpq.evaluate(onnx, queries)
    codes = gpq.encode(make_model(tmp_path / "other", M=5, seed=9), queries, tmp_path / "other.h5")
    with pytest.raises(MismatchError, match="other codebooks"):
        gpq.search(onnx, codes, queries)


def test_without_faiss_the_remedy_is_named(shop):
    commands = COMMANDS.replace("gpq_faiss.open_index(sys.argv[2])", "pass")
    calls = ["--help", "index model items.h5 --out never.faiss"]
    helped, built = in_process(shop, f"import sys; sys.modules['faiss'] = None\n{commands}", calls)
    assert (helped[0], built[0]) == (0, 2)
    assert (
        built[2]
        == "gpq: gpq index needs Faiss: pip install 'gpq-faiss[search]' or 'gpq-faiss[train]'\n"
    )
