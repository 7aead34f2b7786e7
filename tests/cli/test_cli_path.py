"""The fixed plain forms of the commands, end to end: scripts rely on them, on what they print and on the keys of their JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import faiss
import h5py
import numpy as np
import pytest
from commands import ITEMS, Shop, clusters, done, gpq
from PIL import Image

TINY = ("--preset", "paper", "--set", "network.backbone=mlp", "--set", "training.steps=20")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path on the digits, in the forms that are fixed; the shop's tests are on ready-made features."""
    folder = tmp_path_factory.mktemp("digits")
    model = folder / "model"
    plain = ("train", "digits", "--bits", 48, "--labelled", "10-per-class", "--seed", 0, "--out", model)
    said = done(*plain, *TINY)
    assert said.startswith(f"{model}: 48 bits, ")
    assert "20 steps" in said
    assert (
        done("encode", model, "digits", "--out", folder / "codes.h5")
        == f"{folder}/codes.h5: 1,797 codes of 6 bytes\n"
    )
    assert done("export-faiss", model, "--out", folder / "empty.faiss") == f"{folder}/empty.faiss\n"
    assert (
        done("index", model, folder / "codes.h5", "--out", folder / "index.faiss")
        == f"{folder}/index.faiss\n"
    )
    return folder


def test_the_stages_leave_their_files_and_nothing_else(digits: Path) -> None:
    files = {path.name for path in digits.iterdir()}
    indexes = {"empty.faiss", "empty.faiss.json", "index.faiss", "index.faiss.json"}
    assert files - {"scores.json"} >= {"model", "codes.h5", "features.h5", *indexes}
    assert not [name for name in files if name.startswith(".")]
    assert {path.name for path in (digits / "model").iterdir()} == {
        "model.safetensors",
        "config.json",
        "metrics.jsonl",
        "split.json",
    }


def test_plain_faiss_opens_both_indexes(digits: Path) -> None:
    empty = faiss.read_index(str(digits / "empty.faiss"))
    assert empty.is_trained
    assert empty.ntotal == 0
    assert (empty.pq.M, empty.pq.nbits) == (12, 4)
    filled = faiss.read_index(str(digits / "index.faiss"))
    assert filled.ntotal == 1797
    with h5py.File(digits / "features.h5") as file:
        vectors = file["features"][:5]
    scores, ids = filled.search(vectors, 10)
    found = json.loads(
        done(
            "search",
            digits / "model",
            digits / "index.faiss",
            "digits",
            "--rows",
            "0:5",
            "-k",
            10,
            "--format",
            "json",
        )
    )
    # Equal scores may come in another order from plain Faiss, so the scores are compared, and the ids of those apart.
    np.testing.assert_allclose([q["scores"] for q in found["queries"]], scores, atol=1e-5)
    for query, row_ids, row_scores in zip(found["queries"], ids, scores, strict=True):
        better = row_scores > row_scores[-1] + 1e-5
        assert set(row_ids[better]) <= set(query["ids"])


def test_evaluate_on_the_digits_gives_the_key_map(digits: Path) -> None:
    found = json.loads(done("evaluate", digits / "model", "digits", "--protocol", 1, "--format", "json"))
    assert 0.15 < found["map"] <= 1, "no better than chance"
    assert found["bits"] == 48
    assert found["protocol"] == "1"
    like = found["likeness"]
    assert 0 <= like["nn10_at_100"] <= 1
    assert like["queries"] == min(found["n_queries"], 400)
    assert "exact cosine of the inputs" in like["definition"]


def test_evaluate_tells_likeness_of_all_that_it_compares(digits: Path) -> None:
    command = ("evaluate", digits / "model", "digits", "--compare", "float")
    found = json.loads(done(*command, "--format", "json"))
    assert found["compared"]["float"]["likeness"]["nn10_at_100"] == 1
    lines = [re.split(r"\s{2,}", line) for line in done(*command).splitlines()]
    column = lines[0].index("NN10@100")
    cells = {line[0]: line[column] for line in lines[2:4]}
    assert cells == {found["method"]: f"{found['likeness']['nn10_at_100']:.4f}", "float": "1.0000"}


def test_search_gives_a_picture_of_the_digits(digits: Path) -> None:
    out = digits.parent / "ranked.png"
    search = ("search", digits / "model", digits / "index.faiss", "digits", "--rows", "0:3", "-k", 4)
    assert done(*search, "--format", "png", "--images", "digits", "--out", out) == f"{out}\n"
    with Image.open(out) as image:
        assert image.format == "PNG"
        assert min(image.size) > 100


def test_the_features_form_trains_with_labels_from_a_file(shop: Shop, tmp_path: Path) -> None:
    out = tmp_path / "model"
    done(
        "train",
        f"features:{shop.features}",
        "--labels",
        shop.labels,
        "--out",
        out,
        "--set",
        "training.steps=3",
    )
    description = json.loads((out / "config.json").read_text())
    assert description["input"] == {"kind": "features", "width": 16}
    assert description["config"]["preset"] == "recommended"
    assert description["config"]["quantizer"]["codebooks"] == 12, "48 bits are the default"


def test_search_in_every_form(shop: Shop, tmp_path: Path) -> None:
    search = ("search", shop.model, shop.index, shop.queries, "-k", 5)
    found = json.loads(done(*search, "--format", "json"))
    assert set(found) == {"k", "codebooks_fingerprint", "description", "queries"}
    assert found["description"] == f"{ITEMS} items in memory"
    assert found["k"] == 5
    assert len(found["queries"]) == 7
    for i, query in enumerate(found["queries"]):
        assert set(query) == {"id", "name", "ids", "scores", "labels"}
        assert query["id"] == i
        assert len(query["ids"]) == len(query["scores"]) == 5
        assert query["scores"] == sorted(query["scores"], reverse=True)
        # Well separated clusters: the neighbours of a query are of its class.
        assert {item % 3 for item in query["ids"]} == {i % 3}
    table = done(*search).splitlines()
    assert table[0].split() == ["query", "rank", "id", "score", "labels"]
    rows = [line.split() for line in table if line.split() and line.split()[0].isdigit()]
    assert [int(row[2]) for row in rows] == [i for query in found["queries"] for i in query["ids"]]

    out = tmp_path / "results.json"
    assert done(*search, "--format", "json", "--out", out) == ""
    assert json.loads(out.read_text()) == found
    out = tmp_path / "results.h5"
    assert done(*search, "--format", "h5", "--out", out) == f"{out}\n"
    with h5py.File(out) as file:
        assert file["ids"].dtype == np.int64
        assert file["scores"].dtype == np.float32
        assert file["ids"][:].tolist() == [query["ids"] for query in found["queries"]]
        np.testing.assert_allclose(file["scores"][:], [query["scores"] for query in found["queries"]])
        assert file["query_ids"][:].tolist() == list(range(7))


def test_every_form_of_queries_finds_the_same(shop: Shop, tmp_path: Path) -> None:
    queries = np.load(shop.queries)
    np.savez(tmp_path / "queries.npz", features=queries)
    with h5py.File(tmp_path / "queries.h5", "w") as file:
        file["features"] = queries
    done("encode", shop.model, f"features:{shop.queries}", "--out", tmp_path / "query-codes.h5")
    forms = [
        shop.queries,
        tmp_path / "queries.npz",
        tmp_path / "queries.h5",
        tmp_path / "query-features.h5",  # vectors of the model itself: the network does not run
        f"features:{shop.queries}",
    ]
    found = [json.loads(done("search", shop.model, shop.index, form, "--format", "json")) for form in forms]
    for other in found[1:]:
        assert [q["ids"] for q in other["queries"]] == [q["ids"] for q in found[0]["queries"]]
    some = json.loads(
        done("search", shop.model, shop.index, shop.queries, "--rows", "2,5", "--format", "json")
    )
    for query, same in zip(some["queries"], (found[0]["queries"][2], found[0]["queries"][5]), strict=True):
        assert (query["id"], query["ids"]) == (same["id"], same["ids"])
        np.testing.assert_allclose(query["scores"], same["scores"], atol=1e-5)


def test_codes_and_features_make_the_same_index(shop: Shop, tmp_path: Path) -> None:
    done("index", shop.model, shop.vectors, "--out", tmp_path / "index.faiss")
    assert (tmp_path / "index.faiss").read_bytes() == shop.index.read_bytes()


def test_codes_without_features_are_the_same(shop: Shop, tmp_path: Path) -> None:
    out = tmp_path / "codes.h5"
    done(
        "encode",
        shop.model,
        shop.data,
        "--labels",
        shop.labels,
        "--no-features",
        "--batch-size",
        32,
        "--out",
        out,
    )
    assert [path.name for path in tmp_path.iterdir()] == ["codes.h5"]
    with h5py.File(out) as one, h5py.File(shop.codes) as two:
        np.testing.assert_array_equal(one["codes"], two["codes"])
        np.testing.assert_array_equal(one["ids"], two["ids"])
        np.testing.assert_array_equal(one["labels"], two["labels"])


def test_evaluate_in_every_form(shop: Shop, tmp_path: Path) -> None:
    evaluate = (
        "evaluate",
        shop.model,
        shop.data,
        "--labels",
        shop.labels,
        "--protocol",
        1,
        "--compare",
        "pq",
    )
    plot = tmp_path / "pr.png"
    found = json.loads(done(*evaluate, "--format", "json", "--plot", plot))
    wanted = {
        "map",
        "bits",
        "protocol",
        "split_hash",
        "data",
        "model_fingerprint",
        "compared",
        "notes",
        "versions",
    }
    assert wanted <= set(found)
    assert found["map"] > 0.9
    assert set(found["compared"]) == {"pq"}
    assert 0 < found["compared"]["pq"]["map"] <= 1
    assert set(found["precision"]) == {"1", "10", "100"}
    with Image.open(plot) as image:
        assert image.format == "PNG"
    rounded = f"{found['map']:.4f}"
    for form, marks in (
        ("table", ("queries,", rounded)),
        ("markdown", ("|", rounded)),
        ("latex", ("tabular", rounded)),
    ):
        text = done(*evaluate, "--format", form)
        assert all(mark in text for mark in ("gpq (paper)", "mAP", *marks))
    csv = done(*evaluate, "--format", "csv").splitlines()
    assert dict(zip(csv[0].split(","), csv[1].split(","), strict=True))["mAP"] == str(found["map"])
    out = tmp_path / "scores.json"
    assert done(*evaluate, "--format", "json", "--out", out) == ""
    assert json.loads(out.read_text())["map"] == found["map"]


@pytest.mark.parametrize("protocol", ["1", "2", "transfer", "transfer:0,3"])
def test_every_protocol_trains_and_evaluates(shop: Shop, tmp_path: Path, protocol: str) -> None:
    features, labels = clusters(400)
    np.savez(tmp_path / "four.npz", features=features, labels=np.where(np.arange(400) % 4 == 3, 3, labels))
    data, model = f"features:{tmp_path}/four.npz", tmp_path / "model"
    done(
        "train",
        data,
        "--config",
        shop.settings,
        "--preset",
        "paper",
        "--protocol",
        protocol,
        "--labelled",
        "0.5",
        "--out",
        model,
    )
    found = json.loads(done("evaluate", model, data, "--protocol", protocol, "--format", "json"))
    assert found["protocol"] == protocol
    assert 0 < found["map"] <= 1


def test_as_many_queries_are_set_apart_as_are_asked_for(shop: Shop, tmp_path: Path) -> None:
    features, labels = clusters(400)
    np.savez(tmp_path / "four.npz", features=features, labels=labels)
    data, model = f"features:{tmp_path}/four.npz", tmp_path / "model"
    settings = ("--config", shop.settings, "--preset", "paper", "--labelled", "20-per-class")
    done("train", data, *settings, "--queries", "17-per-class", "--out", model)
    found = json.loads(done("evaluate", model, data, "--format", "json"))
    assert found["n_queries"] == 17 * len(np.unique(labels))
    for bad, code, message in (
        (("--queries", "17"), 2, "--queries 17: write N-per-class, or name a file"),
        (("--queries", "300-per-class"), 1, "300 queries are requested: lower --queries"),
        (("--queries", "5-per-class", "--protocol", "2"), 2, "protocol 2 chooses queries itself"),
    ):
        result = gpq("train", data, *settings, *bad, "--out", tmp_path / "other")
        assert result.exit_code == code
        assert message in result.stderr


def test_a_finished_features_file_is_used_again(shop: Shop, tmp_path: Path) -> None:
    done("encode", shop.model, shop.data, "--labels", shop.labels, "--out", tmp_path / "codes.h5")
    before = (tmp_path / "features.h5").stat().st_mtime_ns
    (tmp_path / "codes.h5").unlink()
    done("encode", shop.model, shop.data, "--labels", shop.labels, "--out", tmp_path / "codes.h5")
    assert (tmp_path / "features.h5").stat().st_mtime_ns == before


def test_gpq_is_a_program_too(shop: Shop) -> None:
    """Through a shell's eyes: python -m works, results on stdout, the log on stderr."""
    command = [sys.executable, "-m", "gpq_cli", "-q", "info", str(shop.codes), "--format", "json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout)["kind"] == "codes"
    assert ran.stderr == ""
