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
from gpq_faiss.encoder import OnnxEncoder
from gpq_faiss.errors import DataError, GpqError, MismatchError, UsageError

pytest.importorskip("onnxscript", reason="the extra 'onnx' is not installed")
pytest.importorskip("onnxruntime", reason="the extra 'onnx' is not installed")

N, Q, WIDTH = 300, 12, 20

# What the extra ``train`` brings, and all else that the base and ``search`` do not.
BLOCKED = """
import sys
for name in ("torch", "torchvision", "sklearn", "scipy", "onnx", "onnxscript", "pyarrow", "timm", "fastapi"):
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
    here = tmp_path_factory.mktemp("shop")
    shutil.copytree(encoders[0], here / "model")
    shutil.copy(encoders[1], here)
    for name, n in (("items", N), ("queries", Q)):
        values = random_input("features", n, seed=n)
        np.save(here / f"{name}.npy", values)
        np.save(here / f"{name}-labels.npy", np.random.default_rng(n).integers(0, 3, n))
        data = gpq.open_data(f"features:{here}/{name}.npy", labels=f"{here}/{name}-labels.npy")
        gpq.encode(here / "model", data, here / f"{name}.h5")
    gpq.index(here / "model", here / "items.h5", here / "index.faiss")
    return here


def in_process(shop, code, calls):
    """Exit code, stdout and stderr of commands in a process that begins with ``code``."""
    words = json.dumps([call.split() for call in calls])
    done = subprocess.run(
        [sys.executable, "-c", code, words, str(shop / "index.faiss")],
        capture_output=True,
        text=True,
        check=False,
        cwd=shop,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    assert done.returncode == 0, done.stderr
    return [(code, out, err) for code, out, err in json.loads(done.stdout)]


WORKING = [
    "--help",
    *(f"{name} --help" for name in ("search", "index", "info", "export", "evaluate")),
    *(f"{name} --help" for name in ("train", "encode", "serve", "experiment")),
    *(
        f"info {name} --format json"
        for name in ("items.h5", "index.faiss", "encoder.onnx", "items.npy")
    ),
    "index model items.h5 --kind ivf --out lists.faiss",
    "export-faiss model --out empty.faiss",
    "export model --to numpy --out codebooks.npz",
    "info model --format json",
    "search encoder.onnx index.faiss queries.npy -k 5 --format json",
    "evaluate encoder.onnx features:queries.npy --labels queries-labels.npy --codes items.h5 --format json",
]
NEEDS_TORCH = [
    "train features:items.npy --labels items-labels.npy --out other",
    "encode model features:items.npy --out other.h5",
    "search model index.faiss queries.npy",
    "evaluate model features:items.npy --labels items-labels.npy",
    "export-encoder model --out other.onnx",
    "search encoder.onnx index.faiss digits",
]


def test_what_needs_no_torch_runs_and_what_does_names_the_extra(shop):
    answers = in_process(shop, COMMANDS, [*WORKING, *NEEDS_TORCH])
    worked, refused = answers[: len(WORKING)], answers[len(WORKING) :]
    assert [(call, err) for call, (code, _, err) in zip(WORKING, worked, strict=True) if code] == []
    for call, (code, _, stderr) in zip(NEEDS_TORCH, refused, strict=True):
        assert (code, len(stderr.splitlines())) == (2, 1), (call, stderr)
        assert "pip install 'gpq-faiss[train]'" in stderr
    assert "gpq train needs torch" in refused[0][2]
    about_model, ranked, measured = (json.loads(out) for _, out, _ in worked[-3:])
    whole = json.loads(json.dumps(gpq.info(shop / "model")))
    assert set(whole) - set(about_model) == {"backbone", "parameters"}
    assert about_model == {key: whole[key] for key in about_model} | {"path": "model"}
    expected = gpq.search(shop / "model", shop / "index.faiss", str(shop / "queries.npy"), k=5)
    assert [query["ids"] for query in ranked["queries"]] == expected.ids.tolist()
    own = gpq.open_data(f"features:{shop}/queries.npy", labels=f"{shop}/queries-labels.npy")
    there = gpq.evaluate(shop / "model", own, codes=shop / "items.h5", ks=(1, 10))
    assert measured["map"] == pytest.approx(there.ranking.map, abs=1e-9)


def test_an_onnx_file_gives_query_vectors_on_the_cpu_and_nothing_else(shop, tmp_path):
    encoder = gpq.open_encoder(shop / "encoder.onnx")
    assert isinstance(encoder, OnnxEncoder)
    queries = np.load(shop / "queries.npy")
    vectors, fine = encoder.embed(queries, queries=True)
    expected, _ = gpq.Encoder.load(shop / "model").embed(queries, queries=True)
    assert np.abs(vectors - expected).max() < 1e-5
    assert fine.all()
    mean = np.asarray(gpq.load_model(shop / "model").network.backbone.input.mean)
    assert encoder.embed(mean[None], queries=True)[1].shape == (1,)
    assert encoder.embed(np.empty((0, WIDTH)), queries=True)[0].shape == (0, 60)
    other = make_model(tmp_path / "other", "features", M=5, K=16, d=12, seed=9)
    own = gpq.open_data(f"features:{shop}/queries.npy", labels=f"{shop}/queries-labels.npy")
    others = gpq.encode(other, own, tmp_path / "other.h5")
    index, mine, codes = (
        gpq.index(other, others, tmp_path / "i.faiss"),
        shop / "encoder.onnx",
        shop / "items.h5",
    )
    calls = [
        (UsageError, "queries only", lambda: encoder.embed(queries)),
        (UsageError, "runs on the CPU", lambda: gpq.open_encoder(mine, "cuda")),
        (UsageError, "queries only", lambda: gpq.evaluate(mine, f"features:{shop}/queries.npy")),
        (MismatchError, "other codebooks", lambda: gpq.search(mine, index, f"{shop}/queries.npy")),
        (MismatchError, "encode the data again", lambda: gpq.evaluate(mine, own, codes=others)),
        (
            UsageError,
            "leave out --compare",
            lambda: gpq.evaluate(mine, own, codes=codes, compare=["pq"]),
        ),
    ]
    for error, message, call in calls:
        with pytest.raises(error, match=message):
            call()


def test_a_damaged_onnx_file_is_one_clear_error(shop, tmp_path, capfd):
    whole, rng = (shop / "encoder.onnx").read_bytes(), np.random.default_rng(4)
    path, refused = tmp_path / "damaged.onnx", list[str]()
    for case in range(80):
        data = bytearray(whole)
        if case % 4 == 0:
            data = data[: rng.integers(len(data))]
        else:  # mostly where the graph and its description lie, not among the weights
            at = rng.integers(0, 6000, 4) if case % 2 else -rng.integers(1, 3000, 4)
            for place in at.tolist():
                data[place] = int(rng.integers(256))
        path.write_bytes(data)
        try:
            vectors, fine = OnnxEncoder.load(path).embed(np.ones((2, WIDTH)), queries=True)
        except GpqError as error:
            refused.append(str(error))
        else:
            assert (vectors.shape, fine.shape) == ((2, 60), (2,))
    assert len(refused) > 40
    said = capfd.readouterr()
    assert said.out + said.err == ""
    path.write_text("not ONNX")
    for wrong, message in (
        (path, "not an exported encoder"),
        (tmp_path / "nothing.onnx", "not found"),
    ):
        with pytest.raises(DataError, match=message):
            gpq.open_encoder(wrong)


def test_without_faiss_too_the_remedy_is_told(shop):
    commands = COMMANDS.replace("gpq_faiss.open_index(sys.argv[2])", "pass")
    calls = ["--help", "index model items.h5 --out never.faiss"]
    helped, built = in_process(shop, f"import sys; sys.modules['faiss'] = None\n{commands}", calls)
    assert (helped[0], built[0]) == (0, 2)
    assert (
        built[2]
        == "gpq: gpq index needs Faiss: pip install 'gpq-faiss[search]' or 'gpq-faiss[train]'\n"
    )
