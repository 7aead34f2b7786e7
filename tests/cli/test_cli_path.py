"""The fixed plain forms of the commands, end to end: scripts rely on them, on what they print and on the keys of their JSON."""

import json
import logging
import os
import re
import shutil

import faiss
import h5py
import numpy as np
import pytest
from commands import ITEMS, clusters, done, refused
from PIL import Image


def answer(line):
    """The JSON of a command."""
    return json.loads(done(f"{line} --format json"))


def test_the_path_leaves_its_files(shop, tmp_path):
    data = f"{shop.data} --labels {shop.labels}"
    said = done(
        f"train {data} --preset paper --bits 16 --seed 3 --set training.steps=3 --out {tmp_path}/model"
    )
    assert said.startswith(f"{tmp_path}/model: 16 bits, 205 labelled and 0 unlabelled items, 3 steps in ")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["input"] == {"kind": "features", "width": 16}
    assert (config["config"]["training"]["seed"], config["config"]["quantizer"]["codebooks"]) == (3, 4)
    of_model = {path.name for path in (tmp_path / "model").iterdir()}
    assert of_model == {"model.safetensors", "config.json", "metrics.jsonl", "split.json"}
    model, codes = shop.model, tmp_path / "codes.h5"
    assert done(f"encode {model} {data} --out {codes}") == f"{codes}: 240 codes of 2 bytes\n"
    assert done(f"export-faiss {model} --out {tmp_path}/empty.faiss") == f"{tmp_path}/empty.faiss\n"
    index = tmp_path / "index.faiss"
    assert done(f"index {model} {codes} --out {index}") == f"{index}\n"
    indexes = {f"{name}.faiss{end}" for name in ("empty", "index") for end in ("", ".json")}
    assert {path.name for path in tmp_path.iterdir()} == {
        *("model", "codes.h5", "features.h5", "index.faiss.items.sqlite"),
        *indexes,
    }


def test_ids_and_names_of_files_are_those_of_results(shop, tmp_path):
    ids = np.arange(ITEMS)[::-1] * 3 + (1 << 40)
    np.save(tmp_path / "ids.npy", ids)
    (tmp_path / "names.txt").write_text("".join(f"item {row}\n" for row in range(ITEMS)))
    read = f"--read ids={tmp_path}/ids.npy --read names={tmp_path}/names.txt"
    done(f"encode {shop.model} {shop.data} {read} --out {tmp_path}/codes.h5")
    done(f"index {shop.model} {tmp_path}/codes.h5 --out {tmp_path}/index.faiss")
    found = answer(f"search {shop.model} {tmp_path}/index.faiss {shop.queries} -k 5")
    for query in found["queries"]:
        rows = [ids.tolist().index(item) for item in query["ids"]]
        assert query["names"] == [f"item {row}" for row in rows]


def test_search_in_every_form(shop, tmp_path):
    search = f"search {shop.model} {shop.index} {shop.queries} -k 5"
    found = answer(search)
    assert set(found) == {"k", "codebooks_fingerprint", "description", "queries"}
    assert found["description"] == f"{ITEMS} items in memory"
    assert (found["k"], len(found["queries"])) == (5, 7)
    for i, query in enumerate(found["queries"]):
        assert set(query) == {"id", "name", "ids", "scores", "labels"}
        assert query["id"] == i
        assert len(query["ids"]) == len(query["scores"]) == 5
        assert query["scores"] == sorted(query["scores"], reverse=True)
        # Well separated clusters: the neighbours of a query are of its class.
        assert {item % 3 for item in query["ids"]} == {i % 3}
    table = done(search).splitlines()
    assert table[0].split() == ["query", "rank", "id", "score", "labels"]
    rows = [line.split() for line in table if line.split() and line.split()[0].isdigit()]
    assert [int(row[2]) for row in rows] == [i for query in found["queries"] for i in query["ids"]]
    assert done(f"{search} --format json --out {tmp_path}/results.json") == ""
    assert json.loads((tmp_path / "results.json").read_text()) == found


def test_every_form_of_queries_finds_the_same(shop, tmp_path):
    queries = np.load(shop.queries)
    np.savez(tmp_path / "queries.npz", features=queries)
    with h5py.File(tmp_path / "queries.h5", "w") as file:
        file["features"] = queries
    search = f"search {shop.model} {shop.index}"
    found = answer(f"{search} {shop.queries}")["queries"]
    for form in (tmp_path / "queries.npz", tmp_path / "queries.h5", f"features:{shop.queries}"):
        assert [q["ids"] for q in answer(f"{search} {form}")["queries"]] == [q["ids"] for q in found]
    some = answer(f"{search} {shop.queries} --rows 2,1:6:2,-1")["queries"]
    assert [(q["id"], q["ids"]) for q in some] == [(i, found[i]["ids"]) for i in (2, 1, 3, 5, 6)]


def test_features_are_used_again_or_not_kept(shop, tmp_path):
    done(f"index {shop.model} {shop.vectors} --out {tmp_path}/index.faiss")
    assert (tmp_path / "index.faiss").read_bytes() == shop.index.read_bytes()
    encode = f"encode {shop.model} {shop.data} --labels {shop.labels} --out {tmp_path}"
    done(f"{encode}/plain.h5 --no-features --batch-size 32")
    assert not list(tmp_path.glob("*features*"))
    times = []
    for _ in range(2):
        done(f"{encode}/codes.h5")
        times.append((tmp_path / "features.h5").stat().st_mtime_ns)
        (tmp_path / "codes.h5").unlink()
    assert times[0] == times[1]


def test_sources_become_shards_of_a_manifest(shop, tmp_path):
    manifest = tmp_path / "all.json"
    assert done(f"index {shop.model} {shop.codes} --out {manifest}") == f"{manifest}\n"
    assert len(list((tmp_path / "all.shards").glob("*.faiss"))) == 1
    search = f"search {shop.model} {manifest} {shop.queries} -k 5"
    assert answer(search)["queries"] == answer(search.replace(str(manifest), str(shop.index)))["queries"]
    described = answer(f"info {manifest}")
    assert (described["kind"], described["ntotal"], described["verified"]) == ("shards", ITEMS, True)
    line = refused(f"index {shop.model} {shop.codes} --add --overwrite --out {manifest}", code=2)
    assert "give one of them" in line


def test_evaluate_in_every_form(shop, tmp_path):
    evaluate = f"evaluate {shop.model} {shop.data} --labels {shop.labels} --protocol 1 --compare pq,float"
    found = answer(f"{evaluate} --plot {tmp_path}/pr.png")
    stated = {"map", "bits", "protocol", "split_hash", "data", "model_fingerprint", "notes", "versions"}
    assert stated <= set(found)
    assert (found["map"] > 0.9, found["bits"], found["protocol"]) == (True, 16, "1")
    assert (set(found["compared"]), set(found["precision"])) == ({"pq", "float"}, {"1", "10", "100"})
    like = found["likeness"]
    assert like["queries"] == found["n_queries"]
    assert "exact cosine of the inputs" in like["definition"]
    with Image.open(tmp_path / "pr.png") as image:
        assert image.format == "PNG"
    for form, mark in (("table", "queries,"), ("markdown", "|"), ("latex", "tabular")):
        text = done(f"{evaluate} --format {form}")
        assert all(part in text for part in ("gpq (paper)", "mAP", mark, f"{found['map']:.4f}"))
    lines = [re.split(r"\s{2,}", row) for row in done(evaluate).splitlines()]
    column = lines[0].index("NN10@100")
    assert [row[column] for row in (lines[2], lines[4])] == [f"{like['nn10_at_100']:.4f}", "1.0000"]
    csv = done(f"{evaluate} --format csv").splitlines()
    assert dict(zip(csv[0].split(","), csv[1].split(","), strict=True))["mAP"] == str(found["map"])
    assert done(f"{evaluate} --format json --out {tmp_path}/scores.json") == ""
    assert json.loads((tmp_path / "scores.json").read_text())["map"] == found["map"]


@pytest.mark.parametrize("protocol", ["1 --queries 17-per-class", "2", "transfer", "transfer:0,3"])
def test_every_protocol_trains_and_evaluates(shop, tmp_path, protocol):
    features, labels = clusters(400)
    np.savez(tmp_path / "x.npz", features=features, labels=np.where(np.arange(400) % 4 == 3, 3, labels))
    settings = f"--config {shop.settings} --set training.steps=5 --preset paper --labelled 0.5"
    done(f"train {tmp_path}/x.npz {settings} --protocol {protocol} --out {tmp_path}/model")
    name = protocol.split(maxsplit=1)[0]
    found = answer(f"evaluate {tmp_path}/model {tmp_path}/x.npz --protocol {name}")
    assert (found["protocol"], 0 < found["map"] <= 1) == (name, True)
    trained_on = json.loads((tmp_path / "model" / "config.json").read_text())["class_names"]
    assert len(trained_on) == {"1": 4, "2": 3, "transfer": 3, "transfer:0,3": 2}[name]
    assert name != "1" or found["n_queries"] == 17 * 4


# Searches that are no plain ones -----------------------------------------------------------------------------------------


@pytest.fixture(params=["", "--memory 2MB --threads 1"])
def budget(request, monkeypatch):
    """In memory, and with a budget that (as the test has it) does not hold the index."""
    monkeypatch.setattr("gpq_faiss.indexes.opening._COPIES", 10**6)
    return str(request.param)


def test_filters_and_least_scores(shop, tmp_path, budget):
    search = f"search {shop.model} {shop.index} {shop.queries}"
    every = answer(f"{search} -k {ITEMS}")["queries"]
    assert answer(f"{search} {budget} -k 9")["queries"] == answer(f"{search} -k 9")["queries"]
    np.save(tmp_path / "ids.npy", np.arange(0, ITEMS, 3))
    (tmp_path / "ids.txt").write_text("".join(f"{i}\n" for i in range(0, ITEMS, 3)))
    for option in ("--allow-ids", "--deny-ids"):
        for name in ("ids.npy", "ids.txt"):
            found = answer(f"{search} {budget} -k 9 {option} {tmp_path}/{name}")["queries"]
            inside = option == "--allow-ids"
            expected = [[i for i in query["ids"] if (i % 3 == 0) == inside][:9] for query in every]
            assert [query["ids"] for query in found] == expected
    least = float(np.median([query["scores"][5] for query in every]))
    found = answer(f"{search} {budget} --min-score {least}")
    assert (found["min_score"], "k" in found) == (least, False)
    for query, whole in zip(found["queries"], every, strict=True):
        assert query["ids"] == [i for i, s in zip(whole["ids"], whole["scores"], strict=True) if s >= least]
    assert done(f"{search} {budget} --min-score 1e6").strip() == "no item found"
    for least in ("-inf", "-1e400"):
        found = answer(f"{search} {budget} --min-score {least}")["queries"]
        assert [query["ids"] for query in found] == [query["ids"] for query in every]
    assert not any(query["ids"] for query in answer(f"{search} {budget} --min-score inf")["queries"])


def test_names_of_files_that_are_no_text_are_shown(shop, tmp_path, monkeypatch):
    """In no traceback, on the terminal as in a file."""
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # xdist does not send such texts
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    os.makedirs(folder)
    photo = shutil.copy(shop.photo, os.fsdecode(os.fsencode(folder) + b"/\xff.png"))
    assert "caf\\xe9/codes.h5" in done(
        "encode", shop.image_model, f"folder:{folder}", "--out", f"{folder}/codes.h5"
    )
    search = ["search", shop.image_model, shop.image_index, photo, "-k", 1]
    assert "\\xff.png" in done(*search)
    done(*search, "--out", tmp_path / "out.txt")
    done("export", shop.codes, "--to", "parquet", "--out", f"{folder}/codes.parquet")
    assert "\\xff.png" in (tmp_path / "out.txt").read_text()


def test_every_kind_is_searched_as_a_plain_index(shop, tmp_path, budget, caplog):
    np.save(tmp_path / "noise.npy", np.random.default_rng(0).normal(size=(300, 16)).astype(np.float32))
    done(f"encode {shop.model} features:{tmp_path}/noise.npy --out {tmp_path}/codes.h5")
    found = {}
    for kind in ("flat", "fused", "ivf", "fastscan"):
        out = tmp_path / f"{kind}.faiss"
        caplog.clear()
        done(f"index {shop.model} {tmp_path}/codes.h5 --kind {kind} --memory 64MB --out {out}")
        assert ("plain Faiss finds only part" in caplog.text) == (kind == "fastscan")
        assert faiss.read_index(str(out)).ntotal == 300
        found[kind] = answer(f"search {shop.model} {out} {tmp_path}/noise.npy -k 80 {budget}")["queries"]
    assert found["ivf"] == found["fused"] == found["flat"] == found["fastscan"]
    lists = f"search {shop.model} {tmp_path}/ivf.faiss {tmp_path}/noise.npy -k 80 {budget} --nprobe"
    every = answer(f"{lists} 1000")
    assert (every["proven_exact"], every["queries"]) == (300, found["flat"])
    assert not budget or answer(f"{lists} 1")["proven_exact"] < 300
